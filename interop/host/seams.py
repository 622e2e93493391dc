"""Where the rows of a ring do not follow from those before them, because they were written elsewhere than at its end."""

from collections.abc import Iterable, Iterator

import numpy as np


class Seams:
    """Row numbers before which a stream of writes is broken off, but for the end of the ring, where one always is.

    A write at the end goes on with what was written last. Who begins elsewhere breaks what is there, before the first row
    and, while nothing is written behind it, after the last one; who goes on where another write was left goes on with that.
    A seam is gone when rows on both sides of it are written in one go.
    """

    def __init__(self) -> None:
        self._rows: set[int] = set()
        self._left: set[int] = set()  # of these, where a write was left
        self._counts: tuple[int, int] | None = None  # before the last write
        self._undo: list[tuple[bool, bool, int]] = []  # what it changed: of those left, whether put in, the row

    def __len__(self) -> int:
        return len(self._rows)

    def __bool__(self) -> bool:
        """Whether a write at the end can change anything: there are some, or were before one that may be taken back."""
        return bool(self._rows or self._undo)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def write(self, start: int, count: int, end: int, capacity: int, counts: tuple[int, int]) -> None:
        """Rows come from `start` on around the ring, whose end is `end`. O(the smaller of rows and seams).

        `counts` tell one state of the ring from another, before the write; several with the same are parts of one write.
        """
        if self._counts != counts:
            self._counts, self._undo = counts, []
        if start == end or start in self._left:
            self._change(False, False, [start])
            self._change(True, False, [start])
        else:
            self._change(False, True, [start])
        if start != end:
            self._change(False, True, [end])
            self._change(True, True, [end])
        for of_left, held in ((False, self._rows), (True, self._left)):
            if count - 1 < len(held):
                self._change(of_left, False, [(start + step) % capacity for step in range(1, count)])
            else:
                self._change(of_left, False, [row for row in held if (row - start - 1) % capacity < count - 1])

    def move(self, start: int, stop: int, by: int) -> None:
        """Rows from `stop` on move; those from `start` to there are gone."""
        for held in (self._rows, self._left):
            moved = [row + by if row >= max(stop, start + 1) else row for row in held if not start < row < stop]
            held.clear()
            held.update(moved)
        self._undo = []

    def _change(self, of_left: bool, put: bool, rows: Iterable[int]) -> None:
        held = self._left if of_left else self._rows
        for row in rows:
            if (row in held) != put:
                (held.add if put else held.remove)(row)
                self._undo.append((of_left, put, row))

    def settle(self, counts: tuple[int, int]) -> None:
        """Be as before the last write where that was taken back."""
        if self._counts == counts:
            undo, self._counts = self._undo, None
            for of_left, put, row in reversed(undo):
                self._change(of_left, not put, [row])


def pieces(rows: np.ndarray, capacity: int) -> list[tuple[int, int]]:
    """Rows, in the order of a write, as runs around the ring: the first row and the number of each."""
    rows = rows[np.diff(rows, prepend=-1) != 0]
    first = (
        np.flatnonzero(np.diff(rows, prepend=rows[:1] - 2) % capacity != 1) if capacity > 1 else np.arange(rows.size)
    )
    return list(zip(rows[first].tolist(), np.diff(first, append=rows.size).tolist(), strict=True))
