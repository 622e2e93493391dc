"""The lock that a buffer holds while it draws, reads and writes."""

from typing import Any


class Turn:
    """The time that a buffer has its storage for itself: among threads, and where it is shared among processes too.

    The lock is that of the storage, which several buffers may have. Reentrant.
    """

    __slots__ = ("_buffer", "_processes", "_threads")

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __enter__(self) -> None:
        while True:
            threads = self._buffer._storage._access
            threads.acquire()
            if threads is self._buffer._storage._access:
                break
            threads.release()  # the storage was exchanged while this thread waited
        self._threads, self._processes = threads, self._buffer._process_lock
        if self._processes is not None:
            try:
                self._processes.acquire()
            except BaseException:
                threads.release()
                raise

    def __exit__(self, *raised: object) -> None:
        try:
            if self._processes is not None:
                self._processes.release()
        finally:
            self._threads.release()
