"""The time that a buffer has its storage for itself."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from interop.shared.access import Access, Holding


class Turn(Holding):
    """The turn of a buffer at its storage, while it draws, reads or writes; where processes share it, among them too.

    The lock is that of the storage, which several buffers may have. Reentrant.
    """

    __slots__ = ("_buffer",)

    def __init__(self, buffer: Any) -> None:
        super().__init__(buffer._storage.lock)
        self._buffer = buffer

    def __enter__(self) -> Any:
        self._take(self._buffer._storage.lock)
        while self._access is not self._buffer._storage.lock:  # it was exchanged while this thread waited
            self.__exit__()
            self._take(self._buffer._storage.lock)


@contextlib.contextmanager
def turns(buffers: Sequence[Any]) -> Iterator[None]:
    """The turns of several buffers at once, taken in the one order in which all threads take them."""
    while True:
        wanted = _accesses(buffers)
        with contextlib.ExitStack() as held:
            for each in wanted:
                held.enter_context(each.turn())
            if wanted == _accesses(buffers):  # else a storage was exchanged while this thread waited
                yield
                return


def _accesses(buffers: Sequence[Any]) -> list[Access]:
    return sorted((each._storage.lock for each in buffers), key=id)
