"""The lock on the folder of a checkpoint that is being written."""

import fcntl
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from fbuf.checkpoint.errors import CheckpointError

_held: "weakref.WeakValueDictionary[tuple[int, ...], FolderLock]" = (
    weakref.WeakValueDictionary()
)  # by folder and thread


class FolderLock:
    """An exclusive lock on a folder, among threads and processes. It owns the open folder, `handle`.

    Where an exception from a signal handler, or a failing disk, cuts `release` short, the lock is free as soon as nothing
    refers to this object.
    """

    def __init__(self, path: Path, waits: Callable[[], None] | None = None) -> None:
        """Wait for the lock, after a call of `waits` where it is held.

        CheckpointError where this thread holds it, as below a signal handler that saves.
        """
        self.handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self.handle)
        self._close.atexit = False
        found = os.fstat(self.handle)
        self._holder = found.st_dev, found.st_ino, os.getpid(), threading.get_ident()
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if self._holder in _held:
                raise CheckpointError(f"{path} is being written by this thread already") from None
            if waits is not None:
                waits()
            fcntl.flock(self.handle, fcntl.LOCK_EX)
        _held[self._holder] = self

    def release(self) -> None:
        """Free the lock and close the folder; nothing happens the second time."""
        try:
            if self._close.alive:  # closing is not enough: a forked child has the descriptor as well
                fcntl.flock(self.handle, fcntl.LOCK_UN)
        finally:
            self._close()
            if _held.get(self._holder) is self:
                del _held[self._holder]
