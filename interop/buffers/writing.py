"""The time of a write, with what its transforms make of the data."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from interop.buffers.turn import turn
from interop.shared.interrupts import uninterrupted

if TYPE_CHECKING:
    from interop.buffers.joined import Joined


@contextlib.contextmanager
def writing(buffer: "Joined", data: Any) -> Iterator[Any]:
    """Hold the lock of a buffer for a write of data that was made before."""
    with turn(buffer):
        yield data


@contextlib.contextmanager
def keeping_writing(buffer: "Joined", make: Callable[[], Any]) -> Iterator[Any]:
    """The same where transforms keep something for the next write: `make` runs under the lock, in the order of writes.

    A write that fails leaves what they keep as it was.
    """
    with turn(buffer):
        chain, before, at = buffer.transform, buffer.transform.snapshot(), _position(buffer)
        try:
            yield make()
        except BaseException:
            if _position(buffer) == at:  # rows that were written although a signal came then are part of the stream
                with uninterrupted():
                    chain.restore(before)
            raise


def _position(buffer: "Joined") -> tuple[Any, ...]:
    """What a write changes once its rows are stored: first the cursor, where there is one, then the count."""
    writer = buffer.writer
    return getattr(writer, "_cursor", None), writer.write_count
