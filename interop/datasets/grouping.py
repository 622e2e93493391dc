"""Partition of upstream files into parts of about 16 MB."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from interop.datasets.source import Part

_BYTES = 1 << 24


def grouped(path: Path, pieces: Iterable[tuple[Any, int, int]], most: int | None = None) -> list[Part]:
    """Group consecutive pieces, (what, rows, bytes), into parts. Empty pieces are skipped. `Part.which` lists each `what`.

    A part has up to `most` bytes, by default 16 MB, or is a single piece.
    """
    groups = defaultdict[int, list[tuple[Any, int]]](list)
    offset = 0
    for piece, rows, size in pieces:
        if rows:
            groups[offset // (most or _BYTES)].append((piece, rows))
        offset += size
    return [Part(sum(rows for _, rows in group), path, tuple(piece for piece, _ in group)) for group in groups.values()]


def ranges(rows: int, size: int) -> list[tuple[int, int]]:
    """Divide the rows of a file of `size` bytes into ranges (first, last + 1)."""
    step = max(_BYTES * rows // max(size, 1), 1)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]
