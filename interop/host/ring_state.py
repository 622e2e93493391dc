"""Where the ring of a storage stands, as plain values, and how far its rows follow each other."""

from typing import NamedTuple

import numpy as np


class RingState(NamedTuple):
    """The position of a ring of rows at one moment.

    Attributes:
        capacity: rows at most.
        lanes: items in a row.
        filled: rows that are stored.
        end: the row behind the newest one.
        written: rows ever written one after the other around the ring.
        edits: writes of any other kind.
        breaks: rows other than `end` that do not continue the row before them.
        tracked: whether all writes are in `written` and `edits`; not so where a user's class overrides them.
    """

    capacity: int
    lanes: int
    filled: int
    end: int
    written: int
    edits: int
    breaks: tuple[int, ...]
    tracked: bool

    def around(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many stored rows precede and follow each row without a discontinuity. O(rows * log breaks)."""
        filled, breaks = self.filled, {row for row in (self.end, *self.breaks) if row < self.filled}
        if filled == self.capacity:
            first = np.array(sorted(breaks))
            behind = first.searchsorted(rows, "right")
            return (rows - first[behind - 1]) % filled, (first[behind % first.size] - 1 - rows) % filled
        first = np.array(sorted({0, filled, *breaks}))
        behind = first.searchsorted(rows, "right")
        return rows - first[behind - 1], first[behind] - 1 - rows
