"""The trajectories of a storage, which only reads what was written since they were asked for last."""

import weakref
from typing import Any

import numpy as np
import torch

from interop.host.ring_state import RingState
from interop.host.trajectories import RecentIds, Trajectories
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.drawing import stored
from interop.storages import Storage

_NOTHING = RingState(1, 1, 0, 0, 0, 0, (), False)
_NONE = np.zeros(0, np.int64)
_AT_ONCE = 1 << 20  # items whose markers are read


class StoredTrajectories:
    """Keeps the index of the trajectories of one storage up to date.

    A trajectory ends where the entries of `keys` say so, at the newest row, and at other discontinuities of the ring. The
    index costs O(rows written since); O(all rows) the first time, where markers were edited, where trajectories are
    interleaved in one item dim, and for storages whose `set` is the user's.
    """

    def __init__(self, keys: BoundaryKeys) -> None:
        self.keys = keys
        self.version = 0  # another one after trajectories have changed
        self.index = Trajectories(1)
        self._of: weakref.ref[Storage] | None = None
        self._ring, self._counts = _NOTHING, (-1, 0, 0)
        self._markers: np.ndarray = np.zeros((0, 1))  # of all rows
        self._now = 0  # rows read; the one of time t is t % capacity
        self._recent = RecentIds()
        self._interleaved = False

    def of(self, storage: Storage) -> Trajectories:
        """The index, up to date. The lock of the storage is held.

        RuntimeError for an empty storage; RuntimeError or TypeError where it does not say where trajectories end.
        """
        counts, known = storage.write_counts, self._ring
        same = self._of is not None and self._of() is storage
        if same and counts == self._counts and (known.tracked or self._are_as_read(storage)):
            return self.index
        stored(storage)
        ring = storage.ring_state()
        count = ring.written - known.written
        follows = same and ring.tracked and self._follow(storage, ring, count)
        self._of = None  # an update that is interrupted is made anew
        self._ring, self._counts = ring, counts
        if not follows:
            self._begin(storage)
            self._read(storage, ring.filled, self._breaks())
        elif count:
            self._read(storage, count, _NONE)
        self._of = weakref.ref(storage)
        return self.index

    def refresh(self) -> bool:
        """Bring the index up to date with the storage that was asked for last; whether that could be done."""
        storage = None if self._of is None else self._of()
        if storage is None:
            return False
        try:
            self.of(storage)
        except (KeyError, TypeError, RuntimeError):
            return False
        return True

    def _follow(self, storage: Storage, ring: RingState, count: int) -> bool:
        """Whether all that happened is that `count` rows were written behind the newest one that is known."""
        known = self._ring
        if (ring.capacity, ring.lanes) != (known.capacity, known.lanes) or count >= ring.capacity:
            return False
        if count and (self._now + count - ring.end) % ring.capacity:
            return False
        edited = [] if ring.edits == known.edits else storage.edited_since(known.edits)
        return edited is not None and all(self._is_as_before(storage, rows, count) for rows in edited)

    def _is_as_before(self, storage: Storage, rows: Any, count: int) -> bool:
        """Whether the markers of edited rows are unchanged, except those of the `count` rows that are not read yet."""
        ring = self._ring
        at = np.arange(*rows.indices(ring.filled)) if isinstance(rows, slice) else np.atleast_1d(np.asarray(rows))
        at = at[(at < ring.filled) & ((at - self._now) % ring.capacity >= count)]
        return not at.size or np.array_equal(self.keys.read(storage, at, ring.lanes), self._markers[at])

    def _are_as_read(self, storage: Storage) -> bool:
        """Whether the markers of all rows are unchanged. O(all rows)."""
        found, ids = self.keys.found, self.keys.are_ids
        self.keys.find(storage)
        rows = np.arange(self._ring.filled)
        if storage.ring_state() != self._ring:
            return False
        return (found, ids) == (self.keys.found, self.keys.are_ids) and self._is_as_before(storage, rows, 0)

    def _begin(self, storage: Storage) -> None:
        ring = self._ring
        self.keys.find(storage)
        self._now = ring.end if ring.filled == ring.capacity else 0
        self.index = Trajectories(ring.capacity, ring.lanes, self._now)
        self._markers = np.zeros((0, ring.lanes), np.int64 if self.keys.are_ids else np.bool_)
        self._recent, self._interleaved = RecentIds(), False

    def _breaks(self) -> np.ndarray:
        """Which stored rows, counted from the oldest, do not continue the row before them."""
        ring = self._ring
        oldest = ring.end if ring.filled == ring.capacity else 0
        steps = (np.array([ring.end, *ring.breaks]) - oldest) % ring.capacity
        return np.unique(steps[(steps > 0) & (steps < ring.filled)])

    def _read(self, storage: Storage, count: int, breaks: np.ndarray) -> None:
        """Enter the next rows; of all stored ones those at `breaks` begin a trajectory."""
        ring, step, stop = self._ring, max(_AT_ONCE // self._ring.lanes, 1), self._now + count
        self.version += 1
        breaks = breaks + self._now
        while self._now < stop:
            self._enter(storage, min(step, stop - self._now), breaks)
        if self._interleaved:
            rows = np.arange(stop - ring.filled, stop) % ring.capacity
            self.index = Trajectories.interleaved(self._markers[rows, 0], rows, self._breaks())

    def _enter(self, storage: Storage, count: int, breaks: np.ndarray) -> None:
        ring, ids, now = self._ring, self.keys.are_ids, self._now
        start, stop = now % ring.capacity, now % ring.capacity + count
        rows = slice(start, stop) if stop <= ring.capacity else np.arange(start, stop) % ring.capacity
        found = self.keys.read(storage, rows, ring.lanes)
        if len(self._markers) < (need := min(stop, ring.capacity)):
            more = min(max(need, 2 * len(self._markers)), ring.capacity) - len(self._markers)
            self._markers = np.concatenate([self._markers, np.zeros((more, ring.lanes), found.dtype)])
        starts = np.empty(found.shape, np.bool_)
        if now == self.index.oldest:  # the first row of all
            starts[0] = True
        else:
            before = self._markers[start - 1] if start else self._markers[-1]
            starts[0] = found[0] != before if ids else before
        starts[1:] = found[1:] != found[:-1] if ids else found[:-1]
        if breaks.size:
            starts[breaks[(breaks >= now) & (breaks < now + count)] - now] = True
        self._markers[rows], self._now = found, now + count
        if ids and storage.ndim == 1 and not self._interleaved:
            self._interleaved = self._recent.interleave(found[:, 0], int(np.count_nonzero(starts)))
        if not self._interleaved:
            self.index.written(starts)


class GivenTrajectories:
    """Trajectories as the user gives them, of a full storage of one item dim that is not written any more.

    Args:
        ends: bool [items], whether a trajectory ends with an item; or
        trajectories: integers [items], the id of the trajectory of each item. The last item may be followed by the first.
    """

    version = 1

    def __init__(self, ends: Any, trajectories: Any) -> None:
        if ends is not None and trajectories is not None:
            raise RuntimeError("ends and trajectories exclude each other")
        given = torch.as_tensor(ends if ends is not None else trajectories, device="cpu").detach()
        if given.ndim != 1 or given.numel() == 0:
            raise RuntimeError(f"ends and trajectories must be [items], got shape {list(given.shape)}")
        if given.is_floating_point() or given.is_complex() or (ends is not None and given.dtype != torch.bool):
            raise TypeError(f"ends must be bool and trajectories integers, got {given.dtype}")
        values = given.numpy()
        last = values if ends is not None else values != np.roll(values, -1)
        start = int(last.nonzero()[0][-1] + 1) % len(last) if last.any() else 0
        self.index = Trajectories(len(last), 1, start)
        self.index.written(np.roll(last, 1 - start)[:, None])
        self._written: tuple[int, int] | None = None  # of the storage, when it was first used

    def of(self, storage: Storage) -> Trajectories:
        """The index. RuntimeError for another number of items, and where rows were written since the first call."""
        size, many, ring = stored(storage), self.index.capacity, storage.ring_state()
        if size != many or storage.ndim > 1:
            raise RuntimeError(
                f"ends and trajectories tell of {many} items of one dim, {size} of {storage.ndim} dims are stored: they are "
                "for a storage that is full and not written any more"
            )
        written = ring.written, ring.end
        if self._written not in (None, written):
            raise RuntimeError(
                "the storage was written to, which ends and trajectories know nothing of: they are for static data. Give "
                "end_key or traj_key instead"
            )
        self._written = written
        return self.index

    def refresh(self) -> bool:
        """As for `StoredTrajectories`."""
        return True

    def forget(self) -> None:
        """Accept the storage that is used next as it is then."""
        self._written = None
