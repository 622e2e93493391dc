"""Trajectories whose items are written by turns: one step of each of several environments, and then the next."""

import numpy as np

_ROOM = 16  # items that a trajectory is given room for at first
_EMPTY = np.array([0, 0, -1])


def distinct_tail(ids: np.ndarray) -> np.ndarray:
    """The longest end of a sequence of ids that has none twice."""
    known: set[int] = set()
    for start in range(len(ids) - 1, -1, -1):
        if int(ids[start]) in known:
            return ids[start + 1 :]
        known.add(int(ids[start]))
    return ids


def takes_turns(tail: np.ndarray, ids: np.ndarray) -> bool:
    """Whether an item follows one of the same id with items of others, each of them once, in between.

    `tail` is the distinct tail of the ids before. Runs of one id after the other do not, also where ids come again later.
    """
    every = np.concatenate([tail, ids])
    changes = np.flatnonzero(every[1:] != every[:-1]) + 1
    if changes.size < 2:
        return False
    heads = every[np.concatenate([[0], changes])]
    if np.unique(heads).size == heads.size:
        return False
    seen: dict[int, None] = {}  # the distinct tail, in order
    for each in every.tolist():
        if each in seen:
            if next(reversed(seen)) != each:
                return True
            seen = {}
        seen[each] = None
    return False


class Interleaved:
    """Which items belong to one trajectory, where those of several are interleaved.

    Two items of one id belong to one trajectory if no other id came twice between them. Each trajectory has a run of places
    of its own, with room to grow; `rows[place]` is where the item is stored. So items of a trajectory have consecutive
    places, as in a storage that is not interleaved they have consecutive times. A new item costs O(1), amortized.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.rows = np.zeros(4 * _ROOM, np.int64)
        self.table = np.zeros((0, 3), np.int64)  # (0, first place, last place) of each trajectory; none: last < first
        self._stop = np.zeros(0, np.int64)  # where its room ends
        self._top = 0  # places given out
        self._free: list[int] = []  # entries of the table
        self._owner: np.ndarray = np.full(0, -1, np.int64)  # by row: which entry
        self._latest: dict[int, int] = {}  # entries of the ids of the distinct tail, in order

    def write(self, start: int, ids: np.ndarray, stored: int) -> None:
        """Items with these ids were written from row `start` on, around the ring, of which `stored` rows were in use."""
        need = min(start + len(ids), self._capacity)
        if need > len(self._owner):
            self._owner = np.append(
                self._owner, np.full(max(need, 2 * len(self._owner)) - len(self._owner), -1, np.int64)
            )
        for step, each in enumerate(ids.tolist()):
            row = (start + step) % self._capacity
            if row < stored or step >= self._capacity:
                self._drop(row)
            self._owner[row] = self._put(each, row)

    def close(self) -> None:
        """No trajectory goes on."""
        self._free += [entry for entry in self._latest.values() if self.table[entry, 1] > self.table[entry, 2]]
        self._latest = {}

    def _drop(self, row: int) -> None:
        """The oldest item of its trajectory goes."""
        entry = int(self._owner[row])
        self.table[entry, 1] += 1
        if self.table[entry, 1] > self.table[entry, 2] and entry not in self._latest.values():
            self._free.append(entry)

    def _put(self, each: int, row: int) -> int:
        entry = self._latest.get(each)
        if entry is None:
            entry = self._new()
        else:
            for known in list(self._latest):  # what came between had its turn
                closed = self._latest.pop(known)
                if known == each:
                    break
                if self.table[closed, 1] > self.table[closed, 2]:
                    self._free.append(closed)
        self._latest[each] = entry
        place = int(self.table[entry, 2]) + 1
        if place == self._stop[entry]:
            place = self._moved(entry)
        self.rows[place] = row
        self.table[entry, 2] = place
        return entry

    def _new(self) -> int:
        if not self._free:
            count = max(_ROOM, len(self.table))
            self._free = list(range(len(self.table) + count - 1, len(self.table) - 1, -1))
            self.table = np.concatenate([self.table, np.tile(_EMPTY, (count, 1))])
            self._stop = np.concatenate([self._stop, np.zeros(count, np.int64)])
        entry = self._free.pop()
        self._give(entry, _ROOM)
        self.table[entry, 1], self.table[entry, 2] = self._top - _ROOM, self._top - _ROOM - 1
        return entry

    def _give(self, entry: int, room: int) -> None:
        """Give a trajectory room at the top."""
        if self._top + room > len(self.rows):
            self.rows = np.append(self.rows, np.zeros(max(room, len(self.rows)), np.int64))
        self._top += room
        self._stop[entry] = self._top

    def _moved(self, entry: int) -> int:
        """Move a trajectory to where it has room for twice its items; the place of the next one."""
        _, first, last = self.table[entry].tolist()
        held = self.rows[first : last + 1].copy()
        if self._top > 8 * self._capacity + 64 * _ROOM:
            self._compact()
            return int(self.table[entry, 2]) + 1
        self._settle(entry, held)
        return int(self.table[entry, 2]) + 1

    def _settle(self, entry: int, held: np.ndarray) -> None:
        """Give a trajectory room for twice its items, and put them there."""
        room = 2 * max(len(held), _ROOM)
        self._give(entry, room)
        start = self._top - room
        self.rows[start : start + len(held)] = held
        self.table[entry, 1], self.table[entry, 2] = start, start + len(held) - 1

    def _compact(self) -> None:
        """Put all trajectories one after the other. O(items)."""
        old, self.rows, self._top = self.rows, np.zeros(len(self.rows), np.int64), 0
        going = set(self._latest.values())
        for entry, (_, first, last) in enumerate(self.table.tolist()):
            if first <= last or entry in going:
                self._settle(entry, old[first : last + 1])
            else:
                self.table[entry], self._stop[entry] = _EMPTY, 0

    def at_least(self, least: int) -> np.ndarray:
        """(0, first place, last place) of trajectories with at least so many items. O(trajectories)."""
        return self.table[self.table[:, 2] - self.table[:, 1] >= least - 1]

    def windows_from(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places of items in rows, lanes, and items up to `length` from them to the end of their trajectory. O(items)."""
        place: np.ndarray = np.zeros(len(self._owner), np.int64)
        for _, first, last in self.at_least(1).tolist():
            place[self.rows[first : last + 1]] = range(first, last + 1)
        last = self.table[self._owner[rows], 2]
        return place[rows], np.zeros_like(rows), np.minimum(last - place[rows] + 1, length)
