"""The trajectories of a storage, which only reads what was written since they were asked for last."""

import weakref
from typing import Any

import numpy as np
import torch

from interop.host.trajectories import RecentIds, Trajectories
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.drawing import stored
from interop.storages import Storage

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
        self._counts = 0, 0, 0  # of the ring, when it was read last
        self._capacity, self._lanes, self._filled = (
            1,
            1,
            0,
        )  # rows at most, items in each, and rows that were stored then
        self._markers: np.ndarray = np.zeros((0, 1))  # of all rows
        self._now = 0  # rows read; the one of time t is t % capacity
        self._recent = RecentIds()
        self._interleaved = False

    def of(self, storage: Storage) -> Trajectories:
        """The index, up to date. The lock of the storage is held.

        RuntimeError for an empty storage; RuntimeError or TypeError where it does not say where trajectories end.
        """
        same, counts = self._of is not None and self._of() is storage, storage.ring.counts
        if same and counts == self._counts and (storage.tracks_writes or self._are_as_read(storage)):
            return self.index
        size, filled, capacity = stored(storage), storage.filled_rows, storage.row_capacity(None)
        lanes, count = size // filled, counts[0] - self._counts[0]
        same = same and storage.tracks_writes and (capacity, lanes) == (self._capacity, self._lanes)
        follows = same and self._only_continued(storage, count, capacity)
        self._of = None  # an update that is interrupted is made anew
        self._counts, self._filled = counts, filled
        if not follows:
            self._begin(storage, capacity, lanes)
            self._read(storage, filled, self._breaks(storage))
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

    def _only_continued(self, storage: Storage, count: int, capacity: int) -> bool:
        """Whether all that happened is that `count` rows were written behind the newest one that is known."""
        ring, known = storage.ring, self._counts[2]
        if count >= capacity or (count and (self._now + count - ring.cursor) % capacity):
            return False
        edited = [] if ring.version == known else ring.since(known)
        return edited is not None and all(self._is_as_before(storage, rows, count) for rows in edited)

    def _is_as_before(self, storage: Storage, rows: Any, count: int) -> bool:
        """Whether the markers of edited rows are unchanged, except those of the `count` rows that are not read yet."""
        filled, capacity, lanes = self._filled, self._capacity, self._lanes
        at = np.arange(*rows.indices(filled)) if isinstance(rows, slice) else np.atleast_1d(np.asarray(rows))
        at = at[(at < filled) & ((at - self._now) % capacity >= count)]
        return not at.size or np.array_equal(self.keys.read(storage, at, lanes), self._markers[at])

    def _are_as_read(self, storage: Storage) -> bool:
        """Whether the markers of all rows are unchanged. O(all rows)."""
        found, ids = self.keys.found, self.keys.are_ids
        self.keys.find(storage)
        same = storage.filled_rows == self._filled and (found, ids) == (self.keys.found, self.keys.are_ids)
        return same and self._is_as_before(storage, slice(None), 0)

    def _begin(self, storage: Storage, capacity: int, lanes: int) -> None:
        self.keys.find(storage)
        self._now = storage.ring.cursor if self._filled == capacity else 0
        self.index, self._capacity, self._lanes = Trajectories(capacity, lanes, self._now), capacity, lanes
        self._markers = np.zeros((0, lanes), np.int64 if self.keys.are_ids else np.bool_)
        self._recent, self._interleaved = RecentIds(), False

    def _breaks(self, storage: Storage) -> np.ndarray:
        """Which stored rows, counted from the oldest, do not continue the row before them."""
        ring, capacity = storage.ring, self._capacity
        oldest = ring.cursor if self._filled == capacity else 0
        steps = (np.array([ring.cursor, *ring.discontinuities()]) - oldest) % capacity
        return np.unique(steps[(steps > 0) & (steps < self._filled)])

    def _read(self, storage: Storage, count: int, breaks: np.ndarray) -> None:
        """Enter the next rows; of all stored ones those at `breaks` begin a trajectory."""
        step, stop = max(_AT_ONCE // self._lanes, 1), self._now + count
        self.version += 1
        breaks = breaks + self._now
        while self._now < stop:
            self._enter(storage, min(step, stop - self._now), breaks)
        if self._interleaved:
            rows = np.arange(stop - self._filled, stop) % self._capacity
            self.index = Trajectories.interleaved(self._markers[rows, 0], rows, self._breaks(storage))

    def _enter(self, storage: Storage, count: int, breaks: np.ndarray) -> None:
        ids, now, capacity, lanes = self.keys.are_ids, self._now, self._capacity, self._lanes
        start, stop = now % capacity, now % capacity + count
        rows = slice(start, stop) if stop <= capacity else np.arange(start, stop) % capacity
        found = self.keys.read(storage, rows, lanes)
        if len(self._markers) < (need := min(stop, capacity)):
            more = min(max(need, 2 * len(self._markers)), capacity) - len(self._markers)
            self._markers = np.concatenate([self._markers, np.zeros((more, lanes), found.dtype)])
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
        size, many, ring = stored(storage), self.index.capacity, storage.ring
        if size != many or storage.ndim > 1:
            raise RuntimeError(
                f"ends and trajectories are of {many} items of one dim, {size} of {storage.ndim} dims are stored: they are "
                "for a storage that is full and not written any more"
            )
        written = ring.written, ring.cursor
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
