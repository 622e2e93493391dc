"""What rows say about trajectories, and which row continues which: the one rule that all of the library uses."""

from typing import NamedTuple

import numpy as np

END, FIRST, PADDING = np.uint8(1), np.uint8(2), np.uint8(4)
_REMEMBERED = 65_536  # items in which interleaved ids are looked for


class Markers(NamedTuple):
    """The markers of rows in the order of writing.

    Attributes:
        ids: int64 [rows, lanes, k]: the k ids of each item. Items of one trajectory agree in all of them.
        flags: uint8 [rows, lanes]: END for the last item of a trajectory, FIRST for the first one, PADDING for padding,
            which is a trajectory of its own.
    """

    ids: np.ndarray
    flags: np.ndarray

    @classmethod
    def empty(cls, rows: int, lanes: int, ids: int) -> "Markers":
        """Room for the markers of rows."""
        return cls(np.zeros((rows, lanes, ids), np.int64), np.zeros((rows, lanes), np.uint8))

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        ids: list[np.ndarray],
        ends: list[np.ndarray],
        firsts: list[np.ndarray],
        masks: list[np.ndarray],
    ) -> "Markers":
        """The markers in entries of one value an item, each of the size of `shape`, [rows, lanes].

        Ids may be of any real dtype and are compared exactly. Flags are true unless zero; a mask is true for what is no
        padding.
        """
        found = np.empty((*shape, len(ids)), np.int64)
        for place, column in enumerate(ids):
            found[..., place] = as_ids(column).reshape(shape)
        flags = np.zeros(shape, np.uint8)
        for column in ends:
            flags |= as_bools(column).view(np.uint8).reshape(shape)
        for column in firsts:
            flags |= as_bools(column).view(np.uint8).reshape(shape) << 1
        for column in masks:
            flags |= (~as_bools(column)).view(np.uint8).reshape(shape) << 2
        return cls(found, flags)

    def at(self, rows: np.ndarray | slice | int) -> "Markers":
        """The markers of some rows."""
        return Markers(self.ids[rows], self.flags[rows])

    def lane(self, lane: int) -> "Markers":
        """The markers of one lane, [rows, 1]."""
        return Markers(self.ids[:, lane : lane + 1], self.flags[:, lane : lane + 1])

    def put(self, rows: np.ndarray | slice, markers: "Markers") -> None:
        """Set the markers of some rows."""
        self.ids[rows], self.flags[rows] = markers

    def equals(self, other: "Markers") -> bool:
        """Whether all markers are the same."""
        return np.array_equal(self.flags, other.flags) and np.array_equal(self.ids, other.ids)

    def resized(self, rows: int) -> "Markers":
        """The same with room for more rows."""
        made = Markers.empty(rows, *self.ids.shape[1:])
        made.put(slice(len(self.flags)), self)
        return made


def as_ids(column: np.ndarray) -> np.ndarray:
    """Ids as int64 that differ where the ids differ: floats by the bits of their float64."""
    if column.dtype.kind == "f":
        return (column.astype(np.float64) + 0.0).view(np.int64)  # -0.0 becomes 0.0
    return column.view(np.int64) if column.dtype == np.uint64 else column.astype(np.int64, copy=False)


def as_bools(column: np.ndarray) -> np.ndarray:
    """Flags as bool, in memory of their own shape."""
    return np.ascontiguousarray(column if column.dtype == np.bool_ else column != 0)


def starts(markers: Markers, before: Markers | None = None) -> np.ndarray:
    """bool [rows, lanes]: whether an item does not continue the one before it in its lane.

    `before` has the markers of the row before the first one, [1, lanes]; without it the first row begins trajectories.
    """
    if before is not None and len(markers.flags):
        ids, flags = np.concatenate([before.ids, markers.ids[:-1]]), np.concatenate([before.flags, markers.flags[:-1]])
        return _breaks(Markers(ids, flags), markers)
    found = np.ones(markers.flags.shape, np.bool_)
    found[1:] = _breaks(markers.at(slice(-1)), markers.at(slice(1, None)))
    return found


def _breaks(earlier: Markers, later: Markers) -> np.ndarray:
    """Whether items do not continue earlier ones of their lanes."""
    broken = _flags_break(earlier.flags, later.flags)
    if earlier.ids.shape[-1] == 1:  # np.any over one column takes as long as the rest
        broken |= earlier.ids[..., 0] != later.ids[..., 0]
    elif earlier.ids.shape[-1]:
        broken |= (earlier.ids != later.ids).any(-1)
    return broken


def _flags_break(earlier: np.ndarray, later: np.ndarray) -> np.ndarray:
    """Whether flags say that items do not continue earlier ones."""
    broken: np.ndarray = _BROKEN[earlier * _FLAGS | later]
    return broken


_FLAGS = np.uint8(8)
_EARLIER, _LATER = np.divmod(np.arange(64, dtype=np.uint8), _FLAGS)
_BROKEN = (_EARLIER & END | _LATER & FIRST | (_EARLIER ^ _LATER) & PADDING) != 0  # by the flags of both


def codes(ids: np.ndarray) -> np.ndarray:
    """One number for each item of [items, k] ids, equal where all of the k are. O(items); O(items * log items) for k > 1."""
    if ids.shape[1] == 1:
        return ids[:, 0]
    found = np.zeros(len(ids), np.int64)
    for column in ids.T:
        _, number = np.unique(column, return_inverse=True)
        _, found = np.unique(found * (int(number.max(initial=0)) + 1) + number, return_inverse=True)
    return found


def previous(markers: Markers, breaks: np.ndarray | None = None) -> np.ndarray:
    """Which earlier item each item of one lane continues, int64 [items]; -1 for those that begin a trajectory. O(items).

    An item continues the last one with its ids, with others in between, unless another trajectory had two items in
    between, an end or first item divides them, only one is padding, or one of the places `breaks` is in between. So the
    ids `0, 1, 0, 1` are two interleaved trajectories, and `0, 0, 1, 1, 0, 0` are three.
    """
    ids, flags = codes(markers.ids[:, 0]), markers.flags[:, 0]
    if markers.ids.shape[-1]:
        last = _last_of_same(ids)
    else:
        last = np.arange(-1, len(flags) - 1)
    since = np.zeros(len(flags), np.int64)
    if breaks is not None and breaks.size:
        since[breaks] = breaks
        last[last < np.maximum.accumulate(since)] = -1
    has = (last >= 0).nonzero()[0]
    last[has[_flags_break(flags[last[has]], flags[has])]] = -1
    return last


def _last_of_same(ids: np.ndarray) -> np.ndarray:
    """The last earlier item of the same id, -1 for none, and where another id came twice in between."""
    order = by_id(ids)
    of_one, last = ids[order[1:]] == ids[order[:-1]], np.full(len(ids), -1)
    last[order[1:][of_one]] = order[:-1][of_one]
    # Another id came twice since `last` if and only if a previous item has a later `last`.
    last[1:][last[1:] <= np.maximum.accumulate(last)[:-1]] = -1
    return last


def closings(markers: Markers) -> np.ndarray:
    """For each item of one lane the place of the first item from which on no new one can continue it, int64 [items].

    The number of items where one that follows these may. An item that ends a trajectory closes itself; another one is
    closed by the next item of its id, or by the second of another id. O(items).
    """
    count, ends = len(markers.flags), (markers.flags[:, 0] & END).nonzero()[0]
    following = np.full(count, count)
    if markers.ids.shape[-1]:
        ids = codes(markers.ids[:, 0])
        order = by_id(ids)
        of_one = ids[order[1:]] == ids[order[:-1]]
        following[order[:-1][of_one]] = order[1:][of_one]
    else:
        following[:-1] = np.arange(1, count)
    found: np.ndarray = np.minimum.accumulate(following[::-1])[::-1].copy()
    found[ends] = ends
    return found


def grouped(markers: Markers, last: np.ndarray) -> np.ndarray:
    """The order of items in which those of one trajectory are side by side, the trajectories by their first items.

    `last` is the result of `previous` for the markers. O(items + trajectories * log trajectories) where ids are within 2^16
    of each other, O(items * log items) otherwise.
    """
    order = by_id(
        codes(markers.ids[:, 0])
    )  # the items of one id, and so those of each of its trajectories, side by side
    starts = (last[order] < 0).nonzero()[0]
    counts = np.diff(starts, append=len(order))
    by_first = order[starts].argsort()
    starts, counts = starts[by_first], counts[by_first]
    return order[np.arange(len(order)) + np.repeat(starts + counts - counts.cumsum(), counts)]


def by_id(ids: np.ndarray) -> np.ndarray:
    """Places in the order of ids, equal ones in their own order."""
    if ids.size and int(ids.max()) - int(low := ids.min()) < 2**16:
        ids = (ids - low).astype(np.uint16)  # NumPy sorts these in O(n)
    return np.argsort(ids, kind="stable")


class RecentItems:
    """Detects interleaved trajectories by the newest items: those since one id came twice in a row, 65,536 at most."""

    def __init__(self) -> None:
        self._known: Markers | None = None

    def interleave(self, markers: Markers, runs: int) -> bool:
        """Whether one of the next items [n, 1] continues a trajectory with others in between. O(items) where ids only rise.

        `runs` is the number of trajectories that begin in these if none are interleaved.
        """
        known = 0 if self._known is None else len(self._known.flags)
        ids = markers.ids
        if runs + known < 3 and len(ids) > 1 and (ids[-1] == ids[-2]).all():
            self._known = Markers(ids[-1:].copy(), markers.flags[-1:].copy())
            return False
        every = markers
        if self._known is not None:
            every = Markers(np.concatenate([self._known.ids, ids]), np.concatenate([self._known.flags, markers.flags]))
        found = codes(every.ids[:, 0])
        if (found[1:] < found[:-1]).any():  # otherwise no id comes again later
            last = previous(every)
            if ((last >= 0) & (last < np.arange(-1, len(found) - 1))).any():
                return True
        again = (found[1:] == found[:-1]).nonzero()[0]
        first = max(again[-1] + 1 if again.size else 0, len(found) - _REMEMBERED)
        self._known = every.at(np.arange(first, len(found)))  # a copy
        return False
