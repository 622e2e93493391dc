"""Which stored rows of a ring make which trajectories: an index on the host, updated by the rows that are written.

The counterpart of `fbuf.trajectories` for storages that are written outside of programs, where a few numbers in NumPy
cost less than the dispatch of a program.
"""

import functools

import numpy as np

Entries = np.ndarray | list[tuple[int, int, int]]  # (lane, first time, last time)

_FEW = 4  # trajectories that are entered one by one
_TABLES = 4  # least lengths for which a table is kept


class Trajectories:
    """The stored trajectories of a ring of rows with `lanes` items each.

    The row of time t is t % capacity; stored are the rows of times from `oldest` to `now` - 1. A trajectory is (lane, first
    time, last time); a first time before `oldest` says that its first rows were overwritten. In an index of interleaved
    trajectories, which is never written, times are places in which the rows of each lie side by side.
    """

    def __init__(self, capacity: int, lanes: int = 1, start: int = 0) -> None:
        self.capacity, self.lanes = capacity, lanes
        self.now = self.oldest = start
        self._open = np.full(lanes, start)  # when the latest trajectory of each lane began
        self._tables = {
            1: _Table()
        }  # by least length: trajectories that another one followed, in the order of their ends
        self._found: dict[int, np.ndarray] = {}  # what `stored` returned since the last write
        self._rows: np.ndarray | None = None  # by place, where trajectories are interleaved

    @classmethod
    def interleaved(cls, ids: np.ndarray, rows: np.ndarray, breaks: np.ndarray) -> "Trajectories":
        """The index of rows in the order of writing with these ids; none continues one before a break. O(rows)."""
        last, since = continued(ids), np.zeros(len(ids), np.int64)
        since[breaks] = breaks
        last[last < np.maximum.accumulate(since)] = -1
        order = _by_id(ids)
        first = (last[order] < 0).nonzero()[0]  # of each trajectory, in this order
        count = np.diff(first, append=len(ids))
        by_end = order[first + count - 1].argsort()
        first, count = first[by_end], count[by_end]
        stop = count.cumsum()
        index, starts = cls(len(ids)), np.zeros((len(ids), 1), np.bool_)
        starts[stop - count] = True
        index.written(starts)
        index._rows = rows[order[np.arange(len(ids)) + np.repeat(first + count - stop, count)]]
        return index

    @property
    def is_interleaved(self) -> bool:
        """Whether the rows of several trajectories of one lane alternate."""
        return self._rows is not None

    def written(self, starts: np.ndarray) -> None:
        """Enter rows that follow the newest one; `starts`, bool [n, lanes], marks those that begin a trajectory. O(n)."""
        base, self.now = self.now, self.now + len(starts)
        self.oldest = max(self.oldest, self.now - self.capacity)
        self._found = {}
        row, lane = starts.nonzero()
        if self.lanes == 1 and row.size <= _FEW:  # the usual write of one episode or row: a third of the time
            for last in (row + (base - 1)).tolist():
                first, self._open[0] = int(self._open[0]), last + 1
                for least, table in self._tables.items():
                    if last - first >= least - 1:
                        table.append([(0, first, last)])
        elif row.size:
            closed = np.empty((row.size, 3), np.int64)
            closed[:, 0], closed[:, 2] = lane, row + (base - 1)
            if self.lanes == 1:
                closed[0, 1], closed[1:, 1] = self._open[0], closed[:-1, 2] + 1
                self._open = closed[-1:, 2] + 1
            else:
                begun = np.maximum.accumulate(np.where(starts, np.arange(base, self.now)[:, None], self._open), 0)
                closed[:, 1] = np.where(row > 0, begun[row - 1, lane], self._open[lane])
                self._open = begun[-1].copy()
            for least, table in self._tables.items():
                table.append(closed[closed[:, 2] - closed[:, 1] >= least - 1])
        for least, table in self._tables.items():
            table.drop_before(self.oldest + least - 1)

    def stored(self, least: int = 1) -> np.ndarray:
        """(lane, first time, last time) of trajectories of at least `least` stored rows, those that may go on last.

        With one lane no first time is before `oldest`. A view until the next write. O(lanes) after a write.
        """
        if least not in self._found:
            open_: Entries
            if self.lanes == 1:
                first = max(int(self._open[0]), self.oldest)
                open_ = [(0, first, self.now - 1)] if self.now - first >= least else []
            else:
                open_ = np.empty((self.lanes, 3), np.int64)
                open_[:, 0], open_[:, 1], open_[:, 2] = _steps(self.lanes), self._open, self.now - 1
                open_ = self._long(open_, least)
            found = self._found[least] = self._table(least).with_open(open_)
            if self.lanes == 1 and len(found) and found.item(0, 1) < self.oldest:  # the only one that may begin before
                found[0, 1] = self.oldest
        return self._found[least]

    def _table(self, least: int) -> "_Table":
        if least not in self._tables:
            for other in list(self._tables)[1 : 2 - _TABLES]:
                del self._tables[other]
                self._found.pop(other, None)
            table = self._tables[least] = _Table()
            table.append(self._long(self._tables[1].rows, least))
        return self._tables[least]

    def _long(self, found: np.ndarray, least: int) -> np.ndarray:
        """Those of at least `least` stored rows."""
        return found[found[:, 2] - np.maximum(found[:, 1], self.oldest) >= least - 1]

    def lengths(self) -> np.ndarray:
        """Stored rows of each stored trajectory."""
        found = self.stored()
        return found[:, 2] - np.maximum(found[:, 1], self.oldest) + 1

    def around(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many stored rows of its trajectory precede and follow each row of an index of one lane.

        O(rows * log trajectories).
        """
        times, found = self.times_of(rows), self.stored()
        found = found.take(found[:, 2].searchsorted(times), 0)
        return times - np.maximum(found[:, 1], self.oldest), found[:, 2] - times

    def ends(self) -> np.ndarray:
        """bool [stored rows, lanes], the oldest first: whether another trajectory follows. O(rows)."""
        found = np.zeros((self.now - self.oldest, self.lanes), np.bool_)
        closed = self._tables[1].rows
        found[closed[:, 2] - self.oldest, closed[:, 0]] = True
        return found

    def times_of(self, rows: np.ndarray) -> np.ndarray:
        """The times of stored rows. O(stored rows) where trajectories are interleaved."""
        if self._rows is None:
            return self.now - 1 - (self.now - 1 - rows) % self.capacity
        places: np.ndarray = np.empty(len(self._rows), np.int64)
        places[self._rows] = np.arange(len(places))
        return places[rows]

    def rows_at(self, times: np.ndarray) -> np.ndarray:
        """The rows of stored times."""
        return times % self.capacity if self._rows is None else self._rows[times]

    def slots_at(self, times: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """The flat slots of stored times in lanes."""
        rows = self.rows_at(times)
        return rows if self.lanes == 1 else rows * self.lanes + lane

    def windows(self, times: np.ndarray, lane: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The flat slots of `length` stored rows from each of these times on, in lanes: [n, length].

        And the first of each, where all lie in memory one behind the other; None where some do not.
        """
        steps = _steps(length)
        if self.lanes == 1 and self._rows is None:
            begins = times if self.now <= self.capacity else times % self.capacity
            if begins.item(begins.argmax()) <= self.capacity - length:
                return begins[:, None] + steps, begins
        return self.slots_at(times[:, None] + steps, lane[:, None]), None


@functools.lru_cache(64)
def _steps(length: int) -> np.ndarray:
    return np.arange(length)


class _Table:
    """Rows of (lane, first time, last time) in the order of last times: appended behind, dropped from the front."""

    def __init__(self) -> None:
        self._rows = np.empty((64, 3), np.int64)
        self._head = self._tail = 0

    def append(self, rows: Entries) -> None:
        """Amortized O(rows)."""
        stop = self._tail + len(rows)
        if stop > len(self._rows):
            live = self.rows
            if 2 * (len(live) + len(rows)) > len(self._rows):
                self._rows = np.empty((4 * (len(live) + len(rows)), 3), np.int64)
            self._rows[: len(live)] = live  # NumPy copies overlapping memory as if it were apart
            self._head, self._tail, stop = 0, len(live), len(live) + len(rows)
        if len(rows) == 1:
            self._rows[self._tail] = rows[0]
        elif len(rows):
            self._rows[self._tail : stop] = rows
        self._tail = stop

    def drop_before(self, time: int) -> None:
        """Drop those whose last time is before."""
        if self._head < self._tail and self._rows.item(self._head, 2) < time:
            self._head += int(self.rows[:, 2].searchsorted(time))

    def with_open(self, rows: Entries) -> np.ndarray:
        """A view of all, and of some behind them that are not kept."""
        self.append(rows)
        found = self.rows
        self._tail -= len(rows)
        return found

    @property
    def rows(self) -> np.ndarray:
        """A view of all."""
        return self._rows[self._head : self._tail]


# ------------------------------------------------------------------ interleaved trajectories


def continued(ids: np.ndarray) -> np.ndarray:
    """Which earlier item each item continues, -1 for none: the last one of its id, unless another id came twice in between.

    So `0, 1, 0, 1` are two trajectories, one step of each by turns, and `0, 0, 1, 1, 0, 0` are three. O(items).
    """
    order = _by_id(ids)
    of_one, last = ids[order[1:]] == ids[order[:-1]], np.full(len(ids), -1)
    last[order[1:][of_one]] = order[:-1][of_one]
    # Another id came twice since `last` if and only if a previous item has a later `last`.
    last[1:][last[1:] <= np.maximum.accumulate(last)[:-1]] = -1
    return last


def _by_id(ids: np.ndarray) -> np.ndarray:
    """Places in the order of ids, equal ones in their own order."""
    if ids.size and int(ids.max()) - int(low := ids.min()) < 2**16:
        ids = (ids - low).astype(np.uint16)  # which NumPy sorts in O(n)
    return np.argsort(ids, kind="stable")


class RecentIds:
    """Notices that trajectories are interleaved, by the ids since one came twice in a row, up to 4,096 of them."""

    def __init__(self) -> None:
        self._ids: np.ndarray = np.zeros(0, np.int64)

    def interleave(self, ids: np.ndarray, runs: int) -> bool:
        """Whether one of the next ids continues a trajectory with others in between. O(ids) where ids only rise.

        `runs` of equal ids begin with one of them.
        """
        if runs + len(self._ids) < 3 and len(ids) > 1 and ids[-1] == ids[-2]:
            self._ids = ids[-1:].copy()
            return False
        every = np.concatenate([self._ids, ids])
        if not (every[1:] >= every[:-1]).all():  # otherwise none comes again later
            last = continued(every)
            if ((last >= 0) & (last < np.arange(-1, len(every) - 1))).any():
                return True
        again = (every[1:] == every[:-1]).nonzero()[0]
        self._ids = every[again[-1] + 1 if again.size else 0 :][-4096:].copy()
        return False
