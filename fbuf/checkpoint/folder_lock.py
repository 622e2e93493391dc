"""The lock on the folder of a checkpoint that is being written."""

import fcntl
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from fbuf.checkpoint.errors import CheckpointError

_held: set[tuple[int, ...]] = set()  # by folder and thread


class FolderLock:
    """An exclusive lock on a folder, among threads and processes. It owns the open folder, `handle`."""

    def __init__(self, path: Path, waits: Callable[[], None] | None = None) -> None:
        """Wait for the lock, after a call of `waits` where it is held.

        CheckpointError where this thread holds it, as below a signal handler that saves.
        """
        self.handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = os.fstat(self.handle)
        holder = found.st_dev, found.st_ino, os.getpid(), threading.get_ident()
        is_held = holder in _held
        # A lock that an exception of a signal handler has lost is free, too.
        self._close = weakref.finalize(self, _closed, self.handle, None if is_held else holder)
        self._close.atexit = False
        if is_held:
            raise CheckpointError(f"{path} is being written by this thread already")
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waits is not None:
                waits()
            fcntl.flock(self.handle, fcntl.LOCK_EX)
        _held.add(holder)

    def release(self) -> None:
        """Free the lock and close the folder; nothing happens the second time."""
        try:
            if self._close.alive:  # closing is not enough: a forked child has the descriptor as well
                fcntl.flock(self.handle, fcntl.LOCK_UN)
        finally:
            self._close()


def _closed(handle: int, holder: tuple[int, ...] | None) -> None:
    os.close(handle)
    if holder is not None:
        _held.discard(holder)
