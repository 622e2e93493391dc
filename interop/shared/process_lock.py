"""A lock among processes that the kernel releases when its holder ends, however it ends."""

import errno
import fcntl
import os
import tempfile
import time
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

from interop.shared.processes import starting_a_worker

_RETRY = 1e-3  # seconds
_here: weakref.WeakValueDictionary[tuple[int, int], "ProcessLock"] = weakref.WeakValueDictionary()  # by file


class ProcessLock:
    """A record lock on a file without a name. A process holds it as a whole: its threads need another lock beside it.

    Forked and started processes share it; a copy or a pickle is another lock. A forked child does not hold what its parent
    holds. Acquire and release take about 1 us.
    """

    __slots__ = ("__weakref__", "_descriptor")

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of the file. The lock closes it."""
        # A process that closes any descriptor of the file loses its lock: so it has one object, with one descriptor.
        self._descriptor = descriptor = _unnamed_file() if descriptor is None else descriptor
        _here[_identity(descriptor)] = self
        weakref.finalize(self, os.close, descriptor).atexit = False

    def acquire(self) -> None:
        """Wait until no other process holds it. After an interrupt nothing is held."""
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX)  # continues after a signal
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:  # the kernel sees processes that wait for each other, not threads
                    raise
                time.sleep(_RETRY)
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Release it; without effect where this process does not hold it."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def __reduce__(self) -> Any:
        return (_received, (DupFd(self._descriptor),)) if starting_a_worker() else (ProcessLock, ())


def _received(duplicate: Any) -> ProcessLock:
    descriptor = duplicate.detach()
    # Where the lock exists here already, the second descriptor stays open: to close it would release the lock.
    return _here.get(_identity(descriptor)) or ProcessLock(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("interop-lock", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
