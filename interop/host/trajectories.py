"""Which stored rows of a ring make which trajectories: an index in NumPy, updated by the rows that are written.

The counterpart of `fbuf.trajectories`: for a few numbers NumPy takes less time than the dispatch of a program.
"""

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from interop.host import markers
from interop.host.markers import Markers

_TABLES = 4  # least lengths for which a table is kept
_FEW = 4  # starts in one write up to which Python is faster than NumPy


class Trajectories:
    """The stored trajectories of a ring of rows with `lanes` items each.

    The row of time t is t % capacity; the times from `oldest` to `now` - 1 are stored. A trajectory is (lane, first time,
    last time). A first time before `oldest` says that the first rows were overwritten. In the index of interleaved
    trajectories a time is a place in an order in which the rows of each trajectory lie side by side; it is never written.
    """

    def __init__(self, capacity: int, lanes: int = 1, start: int = 0) -> None:
        self.capacity, self.lanes = capacity, lanes
        self.now = self.oldest = start
        self._open = np.full((lanes, 3), start)  # the latest trajectory of each lane, which may go on
        self._open[:, 0], self._open[:, 2] = np.arange(lanes), start - 1
        self._tables = {1: _Table()}  # by least length: the trajectories that have ended, in the order of their ends
        self._found: dict[int, np.ndarray] = {}  # results of `stored` since the last write
        self._rows: np.ndarray | None = None  # by place, where trajectories are interleaved
        self._places: np.ndarray | None = None  # the place of each of these rows, once it was asked for
        self._by_lane: tuple[np.ndarray, np.ndarray] | None = None  # of `stored` since the last write

    @classmethod
    def interleaved(cls, rows: np.ndarray, items: Markers, last: np.ndarray) -> "Trajectories":
        """The index of rows whose trajectories alternate; cost as that of `markers.grouped`.

        Args:
            rows: int64 [n], the rows of the ring in the order of writing.
            items: the markers of these rows.
            last: the result of `markers.previous` for them.
        """
        order = markers.grouped(items, last)
        first = (last[order] < 0).nonzero()[0]  # of each trajectory, in this order
        count = np.diff(first, append=len(last))
        by_end = order[first + count - 1].argsort()
        first, count = first[by_end], count[by_end]
        stop = count.cumsum()
        starts = np.zeros(len(last), np.bool_)
        starts[stop - count] = True
        return cls.ordered(rows[order[np.arange(len(last)) + np.repeat(first + count - stop, count)]], starts)

    @classmethod
    def ordered(cls, rows: np.ndarray, starts: np.ndarray) -> "Trajectories":
        """The index of rows in this order, int64 [n]; `starts`, bool [n], marks those that begin a trajectory. O(n)."""
        index = cls(len(rows))
        index.written(starts[:, None])
        index._rows = rows
        return index

    @property
    def is_interleaved(self) -> bool:
        """Whether the rows of several trajectories of one lane alternate."""
        return self._rows is not None

    def written(self, starts: np.ndarray) -> None:
        """Enter rows behind the newest one; `starts`, bool [n, lanes], marks those that begin a trajectory. O(n)."""
        base, self.now = self.now, self.now + len(starts)
        self.oldest = max(self.oldest, self.now - self.capacity)
        self._found, self._by_lane = {}, None
        row = starts[:, 0].nonzero()[0] if self.lanes == 1 else None
        if row is not None and row.size <= _FEW:
            times = [self._open.item(0, 1), *(row + base).tolist()]
            self._open[0, 1] = times[-1]
            for first, stop in itertools.pairwise(times):
                for least, table in self._tables.items():
                    if stop - first >= least:
                        table.append([(0, first, stop - 1)])
        elif starts.any():
            row, lane = starts.nonzero()
            begun = np.where(starts, np.arange(base, self.now)[:, None], self._open[:, 1])
            np.maximum.accumulate(begun, 0, out=begun)
            closed = np.empty((row.size, 3), np.int64)
            closed[:, 0], closed[:, 2] = lane, row + (base - 1)
            closed[:, 1] = np.where(row > 0, begun[row - 1, lane], self._open[lane, 1])
            self._open[:, 1] = begun[-1]
            for least, table in self._tables.items():
                table.append(closed[closed[:, 2] - closed[:, 1] >= least - 1])
        self._open[:, 2] = self.now - 1
        for least, table in self._tables.items():
            table.drop_before(self.oldest + least - 1)

    def stored(self, least: int = 1) -> np.ndarray:
        """(lane, first time, last time) of trajectories of at least `least` stored rows; the open ones come last.

        With one lane no first time is before `oldest`. A view until the next write. O(lanes) after a write.
        """
        found = self._found.get(least)
        if found is None:
            table = self._tables.get(least)
            if table is None:
                for unused in list(self._tables)[1 : 2 - _TABLES]:
                    del self._tables[unused]
                table = self._tables[least] = _Table()
                table.append(self._long(self._tables[1].rows, least))
            found = self._found[least] = table.with_open(self._long(self._open, least))
            if self.lanes == 1 and len(found) and found.item(0, 1) < self.oldest:  # only the first one may begin before
                found[0, 1] = self.oldest
        return found

    def first_stored(self, found: np.ndarray) -> np.ndarray:
        """The first stored time of each of these trajectories, [n, 3] as of `stored`, int64 [n]."""
        times: np.ndarray = np.maximum(found[:, 1], self.oldest)
        return times

    def _long(self, found: np.ndarray, least: int) -> np.ndarray:
        """The trajectories of at least `least` stored rows."""
        if len(found) == 1:
            return found if found.item(0, 2) - max(found.item(0, 1), self.oldest) >= least - 1 else found[:0]
        return found[found[:, 2] - self.first_stored(found) >= least - 1]

    def lengths(self) -> np.ndarray:
        """Stored rows of each stored trajectory."""
        found = self.stored()
        return found[:, 2] - self.first_stored(found) + 1

    def located(self, rows: np.ndarray, lane: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The times of stored items, and the first and the last stored time of the trajectory of each.

        With one lane `lane` may be None. O(items * log trajectories); with several lanes also O(trajectories) after a write.
        """
        times, found = self.times_of(rows), self.stored()
        if self.lanes == 1:
            found = found.take(found[:, 2].searchsorted(times), 0)
        else:
            if self._by_lane is None:
                order = np.argsort(found[:, 0], kind="stable")  # those of one lane stay in the order of their ends
                self._by_lane = order, self._ordinal(found[order, 0], found[order, 2])
            order, ends = self._by_lane
            found = found.take(order[ends.searchsorted(self._ordinal(lane, times))], 0)
        return times, self.first_stored(found), found[:, 2]

    def _ordinal(self, lane: np.ndarray | None, times: np.ndarray) -> np.ndarray:
        """Numbers of stored times in lanes, in the order of lanes."""
        assert lane is not None
        ordinal: np.ndarray = lane * (self.capacity + 1) + (times - self.oldest)
        return ordinal

    def ends(self) -> np.ndarray:
        """bool [stored rows, lanes], the oldest first: whether another trajectory follows. O(rows)."""
        found = np.zeros((self.now - self.oldest, self.lanes), np.bool_)
        closed = self._tables[1].rows
        found[closed[:, 2] - self.oldest, closed[:, 0]] = True
        return found

    def times_of(self, rows: np.ndarray) -> np.ndarray:
        """The times of stored rows. Where trajectories are interleaved the first call after a write is O(stored rows)."""
        if self._rows is None:
            return self.now - 1 - (self.now - 1 - rows) % self.capacity
        if self._places is None:
            self._places = np.empty(len(self._rows), np.int64)
            self._places[self._rows] = np.arange(len(self._rows))
        return self._places[rows]

    def rows_at(self, times: np.ndarray) -> np.ndarray:
        """The rows of stored times."""
        return times % self.capacity if self._rows is None else self._rows[times]

    def slots_at(self, times: np.ndarray, lane: np.ndarray | None) -> np.ndarray:
        """The flat slots of stored times in lanes; with one lane `lane` may be None."""
        rows = self.rows_at(times)
        if self.lanes == 1:
            return rows
        assert lane is not None
        return rows * self.lanes + lane

    def windows(self, times: np.ndarray, lane: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The flat slots of `length` stored rows from each time on in a lane, [n, length]; and the first row of each.

        None in place of the first rows where the rows of a window are not consecutive in memory.
        """
        if self.lanes == 1 and self._rows is None:
            if self.now <= self.capacity:
                return times[:, None] + _steps(length), times
            begins = times % self.capacity
            if begins.item(begins.argmax()) <= self.capacity - length:
                return begins[:, None] + _steps(length), begins
        return self.slots_at(times[:, None] + _steps(length), lane[:, None]), None


def lanes_of(coordinates: Sequence[np.ndarray], shape: Sequence[int]) -> np.ndarray | None:
    """The lanes of items at coordinates in a shape, whose first dim is that of rows; None without further dims."""
    if len(coordinates) == 1:
        return None
    lane = coordinates[1]
    for size, each in zip(shape[2:], coordinates[2:], strict=True):
        lane = lane * size + each
    return lane


@functools.lru_cache(64)
def _steps(length: int) -> np.ndarray:
    return np.arange(length)


class _Table:
    """Rows of (lane, first time, last time) in the order of last times: appended behind, dropped from the front."""

    def __init__(self) -> None:
        # Memory, and where the rows in it start and stop: one object, so that an interrupt leaves all of it or none.
        self._held = np.empty((64, 3), np.int64), 0, 0

    @property
    def rows(self) -> np.ndarray:
        """A view of all rows."""
        memory, start, stop = self._held
        return memory[start:stop]

    def append(self, rows: np.ndarray | list[tuple[int, int, int]]) -> None:
        """Amortized O(rows)."""
        self._held = self._behind(rows)

    def _behind(self, rows: np.ndarray | list[tuple[int, int, int]]) -> tuple[np.ndarray, int, int]:
        """Memory with the rows and others behind them."""
        memory, start, stop = self._held
        if stop + len(rows) > len(memory):
            live = memory[start:stop]
            size = len(live) + len(rows)
            memory = np.empty((4 * size if 2 * size > len(memory) else len(memory), 3), np.int64)
            memory[: len(live)] = live
            start, stop = 0, len(live)
            self._held = memory, start, stop
        memory[stop : stop + len(rows)] = rows
        return memory, start, stop + len(rows)

    def drop_before(self, time: int) -> None:
        """Drop the rows whose last time is before."""
        memory, start, stop = self._held
        last = memory[start:stop, 2]
        if last.size and last.item(0) < time:  # most often it is one
            start += 1 if last.size == 1 or last.item(1) >= time else int(last.searchsorted(time))
            self._held = memory, start, stop

    def with_open(self, rows: np.ndarray) -> np.ndarray:
        """A view of all rows and of others behind them, which are not kept."""
        memory, start, stop = self._behind(rows)
        return memory[start:stop]
