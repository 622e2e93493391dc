"""Where the trajectories in a storage start and stop: kept on the host, and brought up to date by reading new rows only.

The same knowledge as that of `fbuf.trajectories`, for storages that are written from outside of any program. Bookkeeping
of a few numbers costs less here than the dispatch of a program would.
"""

import weakref
from typing import Any

import numpy as np
from torch import Tensor

from interop.samplers.interleaved import Interleaved
from interop.samplers.markers import Markers, lanes_of
from interop.samplers.recent_ids import RecentIds
from interop.samplers.rings import grown, put
from interop.samplers.trajectory_table import NO_TRAJECTORIES, Table
from interop.storages import Storage, TensorStorage

_BEFORE, _NONE = np.array([-1]), np.zeros(0, np.int64)
_FEW = 4  # trajectories that are entered one by one


class Boundaries:
    """The trajectories of a storage. Time counts rows, the oldest stored one having time `oldest`.

    A storage that is full has its oldest row behind the one that was written last: there a trajectory ends for now, and
    another one is cut. `sync` costs O(rows written since); O(all rows) the first time, where markers were changed in
    place, and for storages whose `set` or `get` is the user's. Where trajectories are interleaved (see `Interleaved`)
    times are places instead, `oldest` is 0, and what is asked for costs O(trajectories).
    """

    def __init__(self, markers: Markers) -> None:
        self.markers = markers
        self.version = 0  # changes with the trajectories
        self.rebuilt = 0  # how often nothing that was known before holds any more
        self._storage: Any = None
        self._edits = self._written = 0  # of its ledger, as far as they are known here
        self._latest: np.ndarray = np.zeros(0, np.int64)  # the ids of the newest row
        self._seen: np.ndarray = np.zeros((0, 1))  # the markers of all rows
        self._watched: list[Tensor] = []  # the markers' memory, where torch counts the changes of it
        self._versions: list[int] = []

    def is_synced(self, storage: Storage) -> bool:
        """Whether nothing is to be taken in, of what can be seen at once."""
        if self._storage is None or self._storage() is not storage or not storage._notes_writes:
            return False
        ledger = storage._ledger
        same = ledger.written == self._written and ledger.edits == self._edits
        return same and [each._version for each in self._watched] == self._versions

    def sync(self, storage: Storage) -> None:
        """Take in what was written. RuntimeError or TypeError where the storage does not say where trajectories end."""
        ledger = storage._ledger
        if self._storage is None or self._storage() is not storage:
            self._rebuild(storage)
            return
        if not storage._notes_writes:
            if not self._is_as_read(storage):
                self._rebuild(storage)
            return
        count = ledger.written - self._written
        # All rows are read anew where all are new: a sync of as many that was broken off would not be seen by their number.
        misses = count >= self.capacity or (count and (self.now + self.origin + count - ledger.end) % self.capacity)
        if misses or (ledger.edits != self._edits and not self._unchanged(storage, count)):
            self._rebuild(storage)
        elif count:
            self._advance(storage, count)
            self._written = ledger.written
        if (versions := self._versions_now()) != self._versions:
            if self._is_as_seen(storage):
                self._versions = versions
            else:
                self._rebuild(storage)

    def _is_as_read(self, storage: Storage) -> bool:
        """Whether nothing changed in a storage that does not note its writes itself. O(all rows)."""
        ledger, filled = storage._ledger, len(storage) // self.lanes
        if (ledger.edits, ledger.written, filled) != (self._edits, self._written, self.filled):
            return False
        return self.markers.resolve(storage) == self.ids and self._is_as_seen(storage)

    def _is_as_seen(self, storage: Storage) -> bool:
        return np.array_equal(self.markers.read(storage, slice(0, self.filled)), self._seen[: self.filled])

    def _versions_now(self) -> list[int]:
        """They change where torch writes to the markers, as it does through a view that a user holds."""
        return [each._version for each in self._watched]

    def _unchanged(self, storage: Storage, new: int) -> bool:
        """Whether edits in place left the markers as they were, of all rows but the newest, which are yet to be read."""
        edited = storage._ledger.since(self._edits)
        if edited is None:
            return False
        for rows in edited:
            at = np.arange(*rows.indices(self.filled)) if isinstance(rows, slice) else np.atleast_1d(np.asarray(rows))
            at = at[(at < self.filled) & ((at - self.now - self.origin) % self.capacity >= new)]
            if at.size and not np.array_equal(self.markers.read(storage, at), self._seen[at]):
                return False
        self._edits = storage._ledger.edits
        return True

    def _rebuild(self, storage: Storage) -> None:
        self._storage = None
        self.ids = self.markers.resolve(storage)
        ledger, self.lanes, self._several_dims = storage._ledger, lanes_of(storage), storage.ndim > 1
        edits, written = ledger.edits, ledger.written
        self._watched = self.markers.watched(storage)
        self._versions = self._versions_now()
        self.filled = len(storage) // self.lanes
        self.capacity = storage._row_count if isinstance(storage, TensorStorage) else storage.max_size
        self._seen = np.zeros((0, self.lanes))
        full, self.now = self.filled == self.capacity, 0
        self.origin = ledger.end % self.capacity if full else 0
        self.rebuilt += 1
        self._begin()
        self._advance(storage, self.filled, self._seams(storage, self.filled))
        self._edits, self._written, self._storage = edits, written, weakref.ref(storage)

    def _seams(self, storage: Storage, filled: int) -> np.ndarray:
        """Which of the stored rows, counted from the oldest, do not follow from the one before: there writes began elsewhere
        than at the end of the ring, or stopped."""
        ledger = storage._ledger
        oldest = ledger.end if filled == self.capacity else 0
        places = np.array([(row - oldest) % self.capacity for row in (ledger.end, *ledger.seams())])
        return np.unique(places[(places > 0) & (places < filled)])

    def _begin(self) -> None:
        self._ring = np.array(self.origin), np.array(self.capacity)  # numbers that NumPy need not convert each time
        self._all = Table()
        self._long: dict[int, Table] = {}
        self._turns: Interleaved | None = None  # instead of all that, where trajectories are interleaved
        self._recent = RecentIds()
        self._asked: tuple[Any, np.ndarray] = None, NO_TRAJECTORIES  # what was asked for last, by version and length
        self.oldest = 0
        self._open = np.zeros(self.lanes, np.int64)  # when the latest trajectory of each lane began
        self._marks: np.ndarray | None = None  # `ends`, once they were asked for

    def of_flags(self, ends: np.ndarray, origin: int) -> None:
        """Take the boundaries from flags of a full storage that is never written, [rows]; its oldest row is `origin`."""
        self.ids, self.lanes, self.filled, self.capacity = False, 1, len(ends), len(ends)
        self.origin, self.now = origin, 0
        self._begin()
        self.now = len(ends)
        self._close(np.roll(ends, -origin).nonzero()[0], 0, len(ends))
        self.version += 1

    # ------------------------------------------------------------------ rows that are new

    def _advance(self, storage: Storage, count: int, seams: np.ndarray = _NONE) -> None:
        """Read rows; before those that `seams` count trajectories end."""
        self.version += 1
        if not count:
            return
        base = self.now
        self.now = base + count  # first: an index that a signal breaks off does not fit the ledger, and is made anew
        start = (base + self.origin) % self.capacity
        head = min(count, self.capacity - start)
        found = self.markers.read(storage, slice(start, start + head))
        if head < count:
            found = np.concatenate([found, self.markers.read(storage, slice(0, count - head))])
        if len(self._seen) < min(self.now, self.capacity):
            room = min(self.capacity, max(2 * len(self._seen), self.now))
            self._seen = grown(self._seen.astype(found.dtype, copy=False), room)
            self._marks = None if self._marks is None else grown(self._marks, room)
        put(self._seen, start, found)
        if self.lanes > 1:
            last, lane = self._last_of_lanes(found, base, seams)
            self._close(last, lane, count)
            return
        values = found[:, 0]
        last = (values[1:] != values[:-1]).nonzero()[0] if self.ids else values.nonzero()[0]
        if self.ids:
            if self._turns is not None or (not self._several_dims and self._recent.take_turns(values, last)):
                self._write_by_turns(storage, start, values)
                return
            if base and values[0] != self._latest[0]:
                last = np.concatenate([_BEFORE, last])
            self._latest = found[-1].copy()
        if seams.size:
            last = np.union1d(last, seams - 1)
        self._close(last + base, 0, count)

    def _last_of_lanes(self, found: np.ndarray, base: int, seams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The times and lanes at which trajectories end that new rows from time `base` on tell of."""
        if self.ids:
            ends = np.empty(found.shape, np.bool_)  # of the rows before them
            np.not_equal(found[0], self._latest if base else found[0], out=ends[0])
            np.not_equal(found[1:], found[:-1], out=ends[1:])
            self._latest = found[-1].copy()
            base -= 1
        else:
            ends = found.copy()
        if seams.size:
            ends[seams if self.ids else seams - 1] = True
        last, lane = ends.nonzero()
        last += base
        return last, lane

    def _write_by_turns(self, storage: Storage, start: int, ids: np.ndarray) -> None:
        """New rows, of trajectories that are interleaved; all of them end where others were written in between."""
        if self._turns is None:  # all that is stored, the oldest first
            self._turns, self.oldest = Interleaved(self.capacity), 0
            rows = (np.arange(max(0, self.now - self.capacity), self.now) + self.origin) % self.capacity
            seams = self._seams(storage, len(rows))
            breaks = np.union1d(seams, np.flatnonzero(np.diff(rows) < 0) + 1)
            for first, part in zip([0, *breaks], np.split(rows, breaks), strict=True):
                if first in seams:
                    self._turns.close()
                self._turns.write(int(part[0]), self._seen[part, 0], 0)
        else:
            self._turns.write(start, ids, self.filled)
        self.filled = min(self.now, self.capacity)

    def _close(self, last: np.ndarray, lane: Any, count: int) -> None:
        """`count` rows are new, and trajectories end at these times, in order, of lanes."""
        if self.lanes == 1 and last.size <= _FEW:
            for time in last.tolist():
                begun, self._open[0] = int(self._open[0]), time + 1
                self._all.push((0, begun, time))
                for least, table in self._long.items():
                    if time - begun >= least - 1:
                        table.push((0, begun, time))
        elif last.size:
            if self.lanes == 1:
                first = np.empty_like(last)
                first[0], first[1:] = self._open[0], last[:-1] + 1
                self._open[0] = last[-1] + 1
            else:
                first = self._begun(last, lane)
            closed = np.empty((last.size, 3), np.int64)
            closed[:, 0], closed[:, 1], closed[:, 2] = lane, first, last
            self._all.append(closed, self.lanes)
            for least, table in self._long.items():
                table.append(closed[last - first >= least - 1], self.lanes)
        self.oldest = max(0, self.now - self.capacity)
        self._all.drop_before(self.oldest)
        for least, table in self._long.items():  # also of lengths that nobody asks for any more
            table.drop_before(self.oldest + least - 1)
        self.filled = min(self.now, self.capacity)
        if self._marks is not None:
            put(self._marks, (self.now - count + self.origin) % self.capacity, np.zeros((count, 1), np.bool_))
            stored = last >= self.oldest
            self._marks[self.rows_at(last[stored]), lane if self.lanes == 1 else lane[stored]] = True

    def _begun(self, last: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """When trajectories that end at `last`, in order, began."""
        order = np.argsort(lane, kind="stable")
        of, ends = lane[order], last[order]
        first = np.empty_like(last)
        begun = np.empty_like(last)
        fresh = np.empty(of.shape, np.bool_)
        fresh[0], fresh[1:] = True, of[1:] != of[:-1]
        begun[1:] = ends[:-1] + 1
        begun[fresh] = self._open[of[fresh]]
        first[order] = begun
        final = np.append(fresh[1:], True)
        self._open[of[final]] = ends[final] + 1
        return first

    # ------------------------------------------------------------------ what is known

    def trajectories(self, least: int) -> np.ndarray:
        """(lane, first time, last time) of the stored trajectories of at least `least` stored rows.

        Where there are several lanes, a first time before `oldest` means that the trajectory was cut. Until the next
        `sync`; the going ones are last.
        """
        if self._asked[0] != (self.version, least):
            found = self._found(least) if self._turns is None else self._by_age(self._turns, least)
            self._asked = (self.version, least), found
        return self._asked[1]

    def _found(self, least: int) -> np.ndarray:
        """The same where they are not interleaved."""
        table = self._all
        if least > 1:
            if least not in self._long:
                for other in list(self._long)[:-3]:
                    del self._long[other]
                found = self._all.rows
                self._long[least] = Table()
                self._long[least].append(found[found[:, 2] - found[:, 1] >= least - 1], self.lanes)
                self._long[least].drop_before(self.oldest + least - 1)
            table = self._long[least]
        if self.lanes == 1:
            table.cut(self.oldest)
        return table.with_going(self._going(least))

    def _by_age(self, turns: Interleaved, least: int) -> np.ndarray:
        """Interleaved ones in the order of their newest items, which no history of reading changes."""
        found = turns.at_least(least)
        age = (turns.rows[found[:, 2]] - self.now - self.origin) % self.capacity
        return found[age.argsort()]

    def _going(self, least: int) -> Any:
        """The same of those that may go on."""
        if self.lanes == 1:
            first = max(int(self._open[0]), self.oldest)
            if self.now - first < least:
                return NO_TRAJECTORIES
            return ((0, first, self.now - 1),)
        lane = (self.now - np.maximum(self._open, self.oldest) >= least).nonzero()[0]
        found = np.empty((lane.size, 3), np.int64)
        found[:, 0], found[:, 1], found[:, 2] = lane, self._open[lane], self.now - 1
        return found

    @property
    def is_interleaved(self) -> bool:
        """Whether rows of several trajectories were found to take turns."""
        return self._turns is not None

    @property
    def end(self) -> int:
        """The row behind the newest one, around the ring."""
        return (self.now + self.origin) % self.capacity

    @property
    def ends(self) -> np.ndarray:
        """By row and lane, whether it is the last of its trajectory. O(rows) the first time."""
        if self._marks is None:
            self._marks = np.zeros((max(len(self._seen), self.filled), self.lanes), np.bool_)
            closed = self._all.rows
            self._marks[self.rows_at(closed[:, 2]), closed[:, 0]] = True
        return self._marks

    def windows_from(self, slots: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times, lanes and stored items up to `length` from items at slots to the end of their trajectory."""
        if self._turns is not None:
            return self._turns.windows_from(slots, length)
        rows, lane = slots // self.lanes, slots % self.lanes
        times = self._times_of(rows)
        steps = np.arange(length)
        ends = self.ends[self.rows_at(np.minimum(times[:, None] + steps, self.now - 1)), lane[:, None]]
        ends[:, -1] = True
        return times, lane, np.minimum(ends.argmax(1) + 1, self.now - times)

    def around(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many stored rows of its trajectory come before and after each row, of a single lane that does not take turns.

        O(rows * log trajectories).
        """
        times = self._times_of(rows)
        found = self._all.with_going(((0, max(self._open[0], self.oldest), self.now - 1),))
        found = found.take(found[:, 2].searchsorted(times), 0)
        return times - np.maximum(found[:, 1], self.oldest), found[:, 2] - times

    def _times_of(self, rows: np.ndarray) -> np.ndarray:
        """The times of stored rows."""
        newest = self.now - 1
        return newest - (newest + self.origin - rows) % self.capacity

    def lengths(self) -> np.ndarray:
        """Stored rows of each stored trajectory."""
        found = self.trajectories(1)
        return found[:, 2] - np.maximum(found[:, 1], self.oldest) + 1

    def order_of(self, found: np.ndarray) -> np.ndarray:
        """The order in which trajectories lie in the storage: lane by lane, by their oldest stored row."""
        return np.lexsort((self.rows_at(np.maximum(found[:, 1], self.oldest)), found[:, 0]))

    def runs_at(self, times: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Which rows have these times and those behind them: [times, steps], `steps` being the first whole numbers.

        And the first of each, where the others follow it in the storage; None where some do not.
        """
        if self._turns is not None:
            return self.rows_at(times[:, None] + steps), None
        if self.now <= self.capacity and not self.origin:  # times are rows
            return times[:, None] + steps, times
        begins = (times + self._ring[0]) % self._ring[1]
        rows: np.ndarray = begins[:, None] + steps
        if begins.size and begins.item(begins.argmax()) + len(steps) > self.capacity:
            rows %= self.capacity
            return rows, None
        return rows, begins

    def are_runs(self, slots: np.ndarray, length: int) -> bool:
        """Whether so many slots from each of these on, which are in range, are rows of their trajectory one after the other,
        if that goes on."""
        return self._turns is None and self.lanes == 1 and bool((slots <= self.capacity - length).all())

    def rows_at(self, times: np.ndarray) -> np.ndarray:
        """Which rows have these times; any for times behind the last."""
        if self._turns is not None:
            return self._turns.rows.take(times, mode="clip")
        return (times + self.origin) % self.capacity
