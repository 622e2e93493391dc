"""Trajectories that have ended, in the order of their ends."""

from typing import Any

import numpy as np

NO_TRAJECTORIES = np.zeros((0, 3), np.int64)
_FEW = 4  # that are looked at one by one before a search


class Table:
    """Closed trajectories in the order of their ends: rows of (lane, first time, last time). First in, first out."""

    def __init__(self) -> None:
        self._rows = np.empty((64, 3), np.int64)
        self._head = self._tail = 0

    def append(self, rows: np.ndarray, room: int) -> None:
        """Put rows at the end, and have room for more behind them. Amortized O(rows)."""
        stop = self._tail + len(rows)
        if stop + room > len(self._rows):
            live = self._rows[self._head : self._tail]
            if 2 * (len(live) + len(rows) + room) > len(self._rows):
                self._rows = np.empty((4 * (len(live) + len(rows) + room), 3), np.int64)
            self._rows[: len(live)] = live  # NumPy copies overlapping memory as if it were apart
            self._head, self._tail, stop = 0, len(live), len(live) + len(rows)
        self._rows[self._tail : stop] = rows
        self._tail = stop

    def push(self, row: tuple[int, int, int]) -> None:
        """Put one at the end, and have room for another one behind it."""
        if self._tail + 2 > len(self._rows):
            self.append(np.array([row]), 1)
        else:
            self._rows[self._tail] = row
            self._tail += 1

    def drop_before(self, time: int) -> None:
        """Take those from the front whose last time is before."""
        for _ in range(_FEW):
            if self._head == self._tail or self._rows.item(self._head, 2) >= time:
                return
            self._head += 1
        self._head += int(self._rows[self._head : self._tail, 2].searchsorted(time))

    def cut(self, time: int) -> None:
        """Have the one at the front, the only one that begins before this time, begin there."""
        if self._head < self._tail and self._rows.item(self._head, 1) < time:
            self._rows[self._head, 1] = time

    def with_going(self, rows: Any) -> np.ndarray:
        """A view of all, and of rows (lane, first time, last time) that are not kept, behind them."""
        stop = self._tail + len(rows)
        if stop > len(self._rows):
            self.append(NO_TRAJECTORIES, len(rows))
            stop = self._tail + len(rows)
        if len(rows) == 1:
            self._rows[self._tail] = rows[0]
        else:
            self._rows[self._tail : stop] = rows
        return self._rows[self._head : stop]

    @property
    def rows(self) -> np.ndarray:
        """A view of all."""
        return self._rows[self._head : self._tail]
