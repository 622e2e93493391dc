"""Rows of a ring that do not continue the row before them, because a write began elsewhere than at the cursor."""

from collections.abc import Iterable, Iterator

import numpy as np


class Discontinuities:
    """Rows that do not continue the row before them, other than the cursor, where one always is.

    A write at the cursor continues the last write. A write that begins elsewhere leaves a discontinuity before its first
    row and, until something is written behind it, after its last row; a write that begins where an earlier one ended
    continues that one. A discontinuity is gone when the rows on both sides of it are written by one call.
    """

    def __init__(self) -> None:
        self._rows: set[int] = set()
        self._ends: set[int] = set()  # of these, behind the last row of a write
        self._closed: set[int] = set()  # the cursor, where the row before it is no end of a write
        self._counts: tuple[int, int] | None = None  # before the last write
        self._undo: list[tuple[set[int], bool, int]] = []  # what it changed: the set, whether added, the row

    def __bool__(self) -> bool:
        """Whether a write at the cursor can change anything: there are some, or were before one that may be rolled back."""
        return bool(self._rows or self._undo or self._closed)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def write(self, start: int, count: int, cursor: int, capacity: int, counts: tuple[int, int]) -> bool:
        """Rows come from `start` on around the ring; none: the cursor moves there. O(the smaller of rows and sets).

        Whether they continue the row before them.

        `counts` identify the state of the ring before the write; several calls with the same are parts of one write.
        """
        if self._counts != counts:
            self._counts, self._undo = counts, []
        open_end = cursor not in self._closed
        continues = start in self._ends or (start == cursor and open_end)
        self._change(self._rows, not continues, [start])
        self._change(self._ends, False, [start])
        self._change(self._closed, False, list(self._closed))
        if not (count or continues):
            self._change(self._closed, True, [start])
        if start != cursor:
            self._change(self._rows, True, [cursor])
            self._change(self._ends, open_end, [cursor])
        for held in (self._rows, self._ends):
            if count - 1 < len(held):
                self._change(held, False, [(start + step) % capacity for step in range(1, count)])
            else:
                self._change(held, False, [row for row in held if (row - start - 1) % capacity < count - 1])
        return continues

    def move(self, start: int, stop: int, by: int) -> None:
        """Rows from `stop` on move; those from `start` to there are gone."""
        for held in (self._rows, self._ends, self._closed):
            moved = [row + by if row >= max(stop, start + 1) else row for row in held if not start < row < stop]
            held.clear()
            held.update(moved)
        self._undo = []

    def _change(self, held: set[int], add: bool, rows: Iterable[int]) -> None:
        for row in rows:
            if (row in held) != add:
                (held.add if add else held.remove)(row)
                self._undo.append((held, add, row))

    def settle(self, counts: tuple[int, int]) -> None:
        """Be as before the last write where that was rolled back."""
        if self._counts == counts:
            undo, self._counts = self._undo, None
            for held, added, row in reversed(undo):
                self._change(held, not added, [row])


def pieces(rows: np.ndarray, capacity: int) -> list[tuple[int, int]]:
    """Rows, in the order of a write, as runs around the ring: the first row and the number of each."""
    rows = rows[np.diff(rows, prepend=-1) != 0]
    first = (
        np.flatnonzero(np.diff(rows, prepend=rows[:1] - 2) % capacity != 1) if capacity > 1 else np.arange(rows.size)
    )
    return list(zip(rows[first].tolist(), np.diff(first, append=rows.size).tolist(), strict=True))
