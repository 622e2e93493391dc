"""The time that a buffer has its storage for itself."""

from typing import Any

from interop.storages.access import Holding


class Turn(Holding):
    """The turn of a buffer at its storage, while it draws, reads or writes; where processes share it, among them too.

    The lock is that of the storage, which several buffers may have. Reentrant.
    """

    __slots__ = ("_buffer",)

    def __init__(self, buffer: Any) -> None:
        super().__init__(buffer._storage._access)
        self._buffer = buffer

    def __enter__(self) -> Any:
        self._take(self._buffer._storage._access)
        while self._access is not self._buffer._storage._access:  # it was exchanged while this thread waited
            self.__exit__()
            self._take(self._buffer._storage._access)
