"""The lock on the folder of a checkpoint that is being written."""

import fcntl
import os
import threading
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
        try:
            found = os.fstat(self.handle)
            self._holder = found.st_dev, found.st_ino, os.getpid(), threading.get_ident()
            if self._holder in _held:
                raise CheckpointError(f"{path} is being written by this thread already")
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waits is not None:
                    waits()
                fcntl.flock(self.handle, fcntl.LOCK_EX)
        except BaseException:
            os.close(self.handle)
            raise
        _held.add(self._holder)

    def release(self) -> None:
        """Free the lock and close the folder."""
        _held.discard(self._holder)
        try:
            fcntl.flock(self.handle, fcntl.LOCK_UN)  # closing is not enough: a forked child has the descriptor as well
        finally:
            os.close(self.handle)
