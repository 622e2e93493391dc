"""Where the next row goes and how many there are: the counters of a storage, and writes that did not go around the ring."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from interop.host.discontinuities import Discontinuities, pieces

CELLS = 8  # int64 in the block of counters
_SIZE, _CURSOR, _WRITTEN, _VERSION, _COUNT, EMPTIED, _DRAWN, _UNCOUNTED = range(8)
_LARGEST = 2**63 - 2**40  # valid counters of a file are below, so that they cannot overflow
_REMEMBERED = 64  # edits whose rows are kept
_PIECES = 16  # of one write, up to which discontinuities are noted


def _counter(place: int, meaning: str) -> property:
    def read(ring: "Ring") -> int:
        found: int = ring.cells[place]
        return found

    def write(ring: "Ring", value: int) -> None:
        ring.cells[place] = value

    return property(read, write, doc=meaning)


class Ring:
    """The counters of a storage, its edits and its discontinuities.

    The counters are one block of int64, which may be in shared memory or in a file: see `use`. Edits and discontinuities
    are known only to the process that made them.
    """

    size = _counter(_SIZE, "Rows in use, always 0 to size - 1; of storages with preallocated rows.")
    cursor = _counter(_CURSOR, "The row behind the last one written: the next write takes it.")
    written = _counter(
        _WRITTEN, "Rows ever written one after the other around the ring. Never falls but by `restored`."
    )
    version = _counter(_VERSION, "How often rows were written otherwise, or replaced as a whole.")
    count = _counter(_COUNT, "Rows ever written by writers.")
    emptied = _counter(EMPTIED, "How often the storage was emptied.")
    uncounted = _counter(_UNCOUNTED, "Items that a rate limiter counts as written, beside those of `count`.")

    def __init__(self) -> None:
        self.cells: Any = np.zeros(CELLS, np.int64).data
        self._edits: deque[tuple[int, Any]] = deque(maxlen=_REMEMBERED)  # version, rows
        self._broken: Discontinuities | None = None  # once there was one

    def use(self, cells: memoryview, *, copy: bool) -> None:
        """Keep the counters in this block from now on; with `copy` it starts with the present counts."""
        if copy:
            cells[:] = self.cells
        self.cells = cells

    def fits(self, rows: int) -> bool:
        """Whether the counters are valid for a storage of `rows` rows."""
        positions = 0 <= self.size <= rows and 0 <= self.cursor < max(rows, 1)
        return positions and all(0 <= count < _LARGEST for count in self.cells[_WRITTEN : EMPTIED + 1])

    def put_back(self, cells: bytes) -> None:
        """Have these counters again. What is known of later edits and discontinuities is dropped at the next look."""
        for place, value in enumerate(np.frombuffer(cells, np.int64).tolist()):
            self.cells[place] = value

    @property
    def is_limited(self) -> bool:
        """Whether a rate limiter has set its counters: `sampled` and `uncounted`."""
        return bool(self.cells[_DRAWN])

    @property
    def sampled(self) -> int:
        """Items ever drawn, as a rate limiter counts them."""
        return max(self.cells[_DRAWN] - 1, 0)  # the cell is 0 as long as there was no limiter

    @sampled.setter
    def sampled(self, value: int) -> None:
        self.cells[_DRAWN] = value + 1

    @property
    def counts(self) -> tuple[int, int, int]:
        """`written`, `cursor` and `version`. They differ after any write."""
        cells = self.cells
        return cells[_WRITTEN], cells[_CURSOR], cells[_VERSION]

    def wrote_run(self, start: int, count: int, capacity: int) -> None:
        """Rows were written from `start` on, around the ring."""
        if start != self.cursor or self._broken:
            if not count:
                return
            self._part(start, count, capacity, self._settled())
        self.cursor = (start + count) % capacity
        self.written += count

    def wrote_rows(self, rows: np.ndarray, capacity: int) -> None:
        """Rows were written in this order, anywhere.

        Of more than 16 pieces only the end of the last is noted: such a writer, for example one that keeps the items of
        highest rank, makes no stream of rows.
        """
        counts, parts = self._settled(), pieces(rows, capacity)
        if len(parts) > _PIECES:
            parts = []
            self.cursor = (int(rows[-1]) + 1) % capacity
        for start, count in parts:
            self._part(start, count, capacity, counts)
            self.cursor = (start + count) % capacity
        self.edited(None)

    def wrote_elsewhere(self, rows: range | np.ndarray, capacity: int, grew: bool) -> None:
        """Rows were written without the writer. The cursor stays, or moves behind rows that were added."""
        cursor, written = self.cursor, self.written
        if isinstance(rows, np.ndarray):
            self.wrote_rows(rows, capacity)
        else:
            self.wrote_run(rows.start, len(rows), capacity)
        if not grew and len(rows) and rows[0] != cursor:
            self.go_on_at(cursor, capacity)
            self.written = written

    def go_on_at(self, cursor: int, capacity: int) -> None:
        """Move the cursor after a write elsewhere."""
        if cursor != self.cursor:
            self._part(cursor, 0, capacity, self._settled())
            self.cursor = cursor

    def close(self) -> None:
        """The next write at the cursor does not continue the row before it."""
        self._settled()
        self._broken = Discontinuities() if self._broken is None else self._broken
        self._broken.close(self.cursor)
        self.edited(None)

    def replaced(self, start: int, stop: int, count: int, capacity: int) -> None:
        """`count` rows replaced those from `start` to `stop`, and the rows behind them moved."""
        counts, cursor, by = self._settled(), self.cursor, count - (stop - start)
        if self._broken is not None:
            self._broken.move(start, stop, by)
        if cursor > start:
            self.cursor = cursor + by if cursor >= stop else start + count
        self._part(start, count, capacity, counts)
        self.cursor = (start + count) % capacity
        self.edited(None)

    def edited(self, rows: Any) -> None:
        """Rows were changed in place; None if it is not known which."""
        self.version += 1
        self._edits.append((self.version, rows))

    def renewed(self, cursor: int) -> None:
        """All rows were replaced or removed."""
        self.edited(None)
        self.cursor, self._broken = cursor, None

    def restored(self, written: int, cursor: int) -> None:
        """All rows were replaced by those of a saved state with these counters."""
        self.renewed(cursor)
        self.written = written

    def since(self, version: int) -> list[Any] | None:
        """The rows of every edit after this version; None if those of one edit are not known."""
        edits = [(number, each) for number, each in self._edits if number > version]
        known = [number for number, _ in edits] == list(range(version + 1, self.version + 1))  # not if one was undone
        rows = [each for _, each in edits]
        return rows if known and all(each is not None for each in rows) else None

    def slots_edited_since(self, version: int | None, stored: int, length: int) -> tuple[int, np.ndarray]:
        """The present version, and the flat slots of rows that were edited after `version`, the oldest row first.

        All slots if `version` is None, or if it is not known any more which rows were edited. `stored` rows have `length`
        items.
        """
        if self.version == version or not length:
            return self.version, np.zeros(0, np.int64)
        edits = None if version is None else self.since(version)
        changed = np.full(stored, edits is None)
        for rows in edits or ():
            changed[rows] = True
        places = (np.flatnonzero(np.roll(changed, -self.cursor)) + self.cursor) % stored
        lanes = length // stored
        return self.version, (places[:, None] * lanes + np.arange(lanes)).reshape(-1)

    def discontinuities(self) -> Iterable[int]:
        """Rows, other than the cursor, that do not continue the row before them. Known for writes of this process."""
        self._settled()
        return () if self._broken is None else self._broken

    def around(self, rows: np.ndarray, filled: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """How many of `filled` rows precede and follow each row without a discontinuity. O(rows * log discontinuities)."""
        breaks = {row for row in (self.cursor, *self.discontinuities()) if row < filled}
        if filled == capacity:
            first = np.array(sorted(breaks))
            behind = first.searchsorted(rows, "right")
            return (rows - first[behind - 1]) % filled, (first[behind % first.size] - 1 - rows) % filled
        first = np.array(sorted({0, filled, *breaks}))
        behind = first.searchsorted(rows, "right")
        return rows - first[behind - 1], first[behind] - 1 - rows

    def _settled(self) -> tuple[int, int]:
        """Drop the discontinuities of writes that were rolled back. Returns the counts of writes and edits."""
        counts = self.written, self.version
        if self._broken is not None:
            self._broken.settle(counts)
        return counts

    def _part(self, start: int, count: int, capacity: int, counts: tuple[int, int]) -> None:
        if start != self.cursor:
            self.edited(None)
            self._broken = Discontinuities() if self._broken is None else self._broken
        if self._broken is not None and not self._broken.write(start, count, self.cursor, capacity, counts):
            self.edited(None)

    def __getstate__(self) -> dict[str, Any]:
        return {"counters": self.cells.tolist(), "broken": self._broken}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        for place, value in enumerate(state["counters"]):
            self.cells[place] = value
        self._broken = state["broken"]
