"""A lock among processes that goes with its holder: the kernel frees it when that process ends, however it ends."""

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
    """A record lock on a file without a name, held by a process as a whole: its threads need another lock beside it.

    Processes that are forked, or started with it among their arguments, have it too; a copy or a pickle is another lock.
    A forked child does not hold what its parent holds. About 1 us to acquire and release.
    """

    __slots__ = ("__weakref__", "_descriptor")

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of the file, which belongs to the lock from now on."""
        # A process that closes any descriptor of the file loses its lock: there is one object, with one of them.
        self._descriptor = descriptor = _unnamed_file() if descriptor is None else descriptor
        _here[_file_of(descriptor)] = self
        weakref.finalize(self, os.close, descriptor).atexit = False

    def acquire(self) -> None:
        """Wait until no other process holds it. Nothing is held where that is interrupted."""
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX)  # goes on after a signal
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:  # seen by the kernel among processes, where threads may go on
                    raise
                time.sleep(_RETRY)
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Let others have it; nothing happens where this process does not hold it."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def __reduce__(self) -> Any:
        return (_received, (DupFd(self._descriptor),)) if starting_a_worker() else (ProcessLock, ())


def _received(duplicate: Any) -> ProcessLock:
    descriptor = duplicate.detach()
    # Where the lock was here before, the second descriptor stays open, for the lock's sake.
    return _here.get(_file_of(descriptor)) or ProcessLock(descriptor)


def _file_of(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("interop-lock", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
