"""Small pieces of upstream files together as parts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from interop.datasets.source import Part


def grouped(path: Path, pieces: Iterable[tuple[Any, int, int]], most: int = 1 << 24) -> list[Part]:
    """Parts of consecutive pieces, each (what, rows, bytes): of `most` bytes or a larger piece. `Part.which` has the `what`.

    Pieces without rows are left out.
    """
    parts: list[Part] = []
    held: list[Any] = []
    rows = size = 0
    for what, count, more in pieces:
        if held and size + more > most:
            parts.append(Part(rows, path, tuple(held)))
            held, rows, size = [], 0, 0
        if count:
            held.append(what)
            rows, size = rows + count, size + more
    return [*parts, Part(rows, path, tuple(held))] if held else parts
