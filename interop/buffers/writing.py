"""The turn of a write, with what its transforms made of the data."""

from collections.abc import Callable
from typing import Any

from interop.buffers.turn import Turn
from interop.shared.interrupts import uninterrupted


class Writing(Turn):
    """A turn for what is to be stored, which was made before."""

    __slots__ = ("_data",)

    def __init__(self, buffer: Any, data: Any) -> None:
        super().__init__(buffer)
        self._data = data

    def __enter__(self) -> Any:
        super().__enter__()
        return self._data


class KeepingWriting(Turn):
    """The same where transforms keep something for the next write: they run within the turn, in the order of writes.

    A write that fails leaves what they keep as it was.
    """

    __slots__ = ("_before", "_make", "_standing")

    def __init__(self, buffer: Any, make: Callable[[], Any]) -> None:
        super().__init__(buffer)
        self._make = make

    def __enter__(self) -> Any:
        super().__enter__()
        self._before: Any = None
        try:
            self._before = self._buffer._transform.snapshot()
            self._standing = self._stands()
            return self._make()
        except BaseException:
            self._back()
            super().__exit__()
            raise

    def __exit__(self, kind: Any = None, *rest: object) -> None:
        try:
            # What was written although a signal broke off what followed is part of the stream.
            if kind is not None and self._stands() == self._standing:
                self._back()
        finally:
            super().__exit__(kind, *rest)

    def _back(self) -> None:
        if self._before is None:
            return
        with uninterrupted():
            self._buffer._transform.restore(self._before)

    def _stands(self) -> tuple[Any, ...]:
        """What a write changes once its rows are stored: first the cursor, where there is one, then the count."""
        writer = self._buffer._writer
        return getattr(writer, "_cursor", None), writer.write_count
