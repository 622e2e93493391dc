"""The time that a buffer has its storage for itself."""

from typing import Any


class Turn:
    """The turn of a buffer at its storage, while it draws, reads or writes; where processes share it, among them too.

    The lock is that of the storage, which several buffers may have. Reentrant.
    """

    __slots__ = ("_access", "_buffer")

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __enter__(self) -> None:
        while True:
            access = self._buffer._storage._access
            access.acquire()
            if access is self._buffer._storage._access:
                break
            access.release()  # the storage was exchanged while this thread waited
        self._access = access

    def __exit__(self, *raised: object) -> None:
        self._access.release()
