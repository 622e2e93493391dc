"""Upstream files in pieces of some 16 MB: small ones together, large ones divided."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from interop.datasets.source import Part

_BYTES = 1 << 24


def grouped(path: Path, pieces: Iterable[tuple[Any, int, int]], most: int | None = None) -> list[Part]:
    """Parts of consecutive pieces, each (what, rows, bytes), without those of no rows. `Part.which` has the `what`.

    Parts have `most` bytes, by default 16 MB, or are one piece.
    """
    groups, offset = defaultdict[int, list[tuple[Any, int]]](list), 0
    for what, rows, size in pieces:
        if rows:
            groups[offset // (most or _BYTES)].append((what, rows))
        offset += size
    return [Part(sum(rows for _, rows in each), path, tuple(what for what, _ in each)) for each in groups.values()]


def ranges(rows: int, size: int) -> list[tuple[int, int]]:
    """Divide the rows of a file of `size` bytes into ranges (first, last + 1)."""
    step = max(_BYTES * rows // max(size, 1), 1)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]
