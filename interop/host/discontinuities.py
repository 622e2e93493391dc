"""Rows of a ring that do not continue the row before them, because a write began elsewhere than at the cursor."""

from collections.abc import Iterable, Iterator

import numpy as np


class Discontinuities:
    """Rows that do not continue the row before them, other than the cursor, which never does.

    A write at the cursor continues the last write. A write elsewhere leaves a discontinuity at its first row and, until a
    write behind it, after its last row; a write that begins where an earlier one ended continues that one. One call that
    writes the rows on both sides of a discontinuity removes it.
    """

    def __init__(self) -> None:
        self._rows: set[int] = set()
        self._ends: set[int] = set()  # of these, the rows behind the last row of a write
        self._closed: set[int] = set()  # the cursor, where the row before it does not end a write
        self._counts: tuple[int, int] | None = None  # before the last write
        self._undo: list[tuple[set[int], bool, int]] = []  # its changes: the set, whether added, the row

    def __bool__(self) -> bool:
        """Whether a write at the cursor can change a discontinuity, or one that a roll back brings back."""
        return bool(self._rows or self._undo or self._closed)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def write(self, start: int, count: int, cursor: int, capacity: int, counts: tuple[int, int]) -> bool:
        """Note a write of `count` rows from `start` on; of no rows: a move of the cursor. Whether it continues a write.

        `counts` identify the state of the ring before the write; calls with equal counts are parts of one write. O(the
        smaller of rows and sets).
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

    def close(self, cursor: int) -> None:
        """Note that the next write at the cursor does not continue the row before it."""
        self._change(self._closed, True, [cursor])
        self._change(self._ends, False, [cursor])

    def move(self, start: int, stop: int, by: int) -> None:
        """Note that the rows from `stop` on move, and those from `start` to `stop` are removed."""
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
        """Undo the last write if it was rolled back to these counts."""
        if self._counts == counts:
            undo, self._counts = self._undo, None
            for held, added, row in reversed(undo):
                self._change(held, not added, [row])


def pieces(rows: np.ndarray, capacity: int) -> list[tuple[int, int]]:
    """The runs around the ring of rows in the order of a write: the first row and the number of rows of each."""
    rows = rows[np.diff(rows, prepend=-1) != 0]
    first = (
        np.flatnonzero(np.diff(rows, prepend=rows[:1] - 2) % capacity != 1) if capacity > 1 else np.arange(rows.size)
    )
    return list(zip(rows[first].tolist(), np.diff(first, append=rows.size).tolist(), strict=True))
