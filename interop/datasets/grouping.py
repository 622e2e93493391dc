"""Small pieces of upstream files together as parts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from interop.datasets.source import Part

_BYTES = 1 << 24


def grouped(path: Path, pieces: Iterable[tuple[Any, int, int]]) -> list[Part]:
    """Parts of consecutive pieces, each (what, rows, bytes): of 16 MB, or a larger piece. `Part.which` has the `what`.

    Pieces without rows are left out.
    """
    parts: list[Part] = []
    held: list[Any] = []
    rows = size = 0
    for what, count, more in pieces:
        if held and size + more > _BYTES:
            parts.append(Part(rows, path, tuple(held)))
            held, rows, size = [], 0, 0
        if count:
            held.append(what)
            rows, size = rows + count, size + more
    return [*parts, Part(rows, path, tuple(held))] if held else parts
