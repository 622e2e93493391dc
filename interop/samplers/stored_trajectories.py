"""The trajectories of a storage: an index that reads only the rows written since its last use."""

import weakref
from typing import Any

import numpy as np
import torch

from interop.host import markers
from interop.host.markers import Markers, RecentItems
from interop.host.trajectories import Trajectories
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.slot_draws import stored
from interop.samplers.trajectory_source import TrajectorySource
from interop.storages import Storage


class StoredTrajectories(TrajectorySource):
    """Keeps the index of the trajectories of one storage up to date.

    A trajectory ends where the entries of `keys` say so by the rule of `interop.host.markers`, at the newest row, and at
    other discontinuities of the ring. An update costs O(rows written since); O(all rows) the first time, after markers were
    edited, where trajectories are interleaved in one item dim, and for storages with a user's `set`.
    """

    keys: BoundaryKeys

    def __init__(self, keys: BoundaryKeys) -> None:
        super().__init__()
        self.keys = keys
        self._counts = 0, 0, 0  # of the ring at the last update
        self._capacity = 1  # rows at most
        self._filled = 0  # rows stored at the last update
        self._markers = Markers.empty(0, 1, 0)
        self._now = 0  # rows read; the row of time t is t % capacity
        self._recent = RecentItems()
        self._layout: Any = None  # of the items at the last update: other entries may mark trajectories

    def anew(self) -> "StoredTrajectories":
        """An index of the same keys that has read nothing."""
        return StoredTrajectories(BoundaryKeys(self.keys.keys))

    def of(self, storage: Storage) -> Trajectories:
        """The index, up to date. The lock of the storage is held.

        RuntimeError for an empty storage; RuntimeError or TypeError where it does not say where trajectories end.
        """
        same = self._of is not None and self._of() is storage
        counts = storage.ring.counts
        layout = storage.contents.layout
        same = same and layout is self._layout
        if same and counts == self._counts and (storage.contents.tracks_writes or self._is_as_read(storage)):
            return self.index
        size = stored(storage)
        filled = storage.contents.filled_rows
        capacity = storage.row_capacity(None)
        lanes = size // filled
        count = counts[0] - self._counts[0]
        same = same and storage.contents.tracks_writes and (capacity, lanes) == (self._capacity, self.index.lanes)
        follows = same and self._only_continued(storage, count) and self._has_the_same_keys(storage)
        self._of = None  # an update that raises is made anew by the next call
        self._counts = counts
        self._filled = filled
        if not follows:
            self.keys.find(storage)
            self._now = storage.contents.oldest_row
            self.index = Trajectories(capacity, lanes, self._now)
            self._capacity = capacity
            self._markers = Markers.empty(0, lanes, len(self.keys.stored_keys.ids))
            self._recent = RecentItems()
            self._layout = layout
            self._read(storage, filled, True)
        elif count:
            self._read(storage, count, False)
        self._of = weakref.ref(storage)
        return self.index

    def _only_continued(self, storage: Storage, count: int) -> bool:
        """Whether `count` rows behind the newest known one were written, and no marker of another row has changed."""
        ring = storage.ring
        version = self._counts[2]
        if count >= self._capacity or (count and (self._now + count - ring.cursor) % self._capacity):
            return False
        edited = [] if ring.version == version else ring.since(version)
        return edited is not None and all(self._has_markers(storage, rows, count) for rows in edited)

    def _has_the_same_keys(self, storage: Storage) -> bool:
        """Whether the entries that mark trajectories are those of the last update. Items of a list may differ."""
        if storage.contents.layout is not None:
            return True
        before = self.keys.stored_keys
        self.keys.find(storage)
        return self.keys.stored_keys == before

    def _has_markers(self, storage: Storage, rows: Any, count: int = 0) -> bool:
        """Whether the known rows among these, without the next `count` ones, have the markers that were read."""
        filled = self._filled
        at = np.arange(*rows.indices(filled)) if isinstance(rows, slice) else np.atleast_1d(np.asarray(rows))
        at = at[(at < filled) & ((at - self._now) % self._capacity >= count)]
        return not at.size or self.keys.read(storage, at, self.index.lanes).equals(self._markers.at(at))

    def _is_as_read(self, storage: Storage) -> bool:
        """Whether the markers of all rows are unchanged. O(all rows)."""
        before = self._filled, self.keys.stored_keys
        self.keys.find(storage)
        return (storage.contents.filled_rows, self.keys.stored_keys) == before and self._has_markers(
            storage, slice(None)
        )

    def _read(self, storage: Storage, count: int, first: bool) -> None:
        """Enter the next `count` rows; `first` says that these are all rows."""
        now = self._now
        capacity = self._capacity
        lanes = self.index.lanes
        start = now % capacity
        stop = now % capacity + count
        rows = slice(start, stop) if stop <= capacity else np.arange(start, stop) % capacity
        new_markers = self.keys.read(storage, rows, lanes)
        if (size := len(self._markers.flags)) < (need := min(stop, capacity)):
            self._markers = self._markers.resized(min(max(need, 2 * size), capacity))
        if first:
            starts = markers.starts(new_markers)
            starts[self._breaks(storage)] = True
        else:
            before = (start - 1) % capacity
            starts = markers.starts(new_markers, self._markers.at(slice(before, before + 1)))
        self._markers.put(rows, new_markers)
        self._now = now + count
        self.version += 1
        interleaved = self.index.is_interleaved
        if self.keys.stored_keys.ids and storage.ndim == 1 and not interleaved:
            interleaved = self._recent.interleave(new_markers, int(np.count_nonzero(starts)))
        if not interleaved:
            self.index.written(starts)
            return
        rows = np.arange(self._now - self._filled, self._now) % capacity
        all_markers = self._markers.at(rows)
        breaks = self._breaks(storage)
        last = markers.previous(all_markers, breaks)
        if ((last >= 0) & (last < np.arange(-1, len(last) - 1))).any():
            self.index = Trajectories.interleaved(rows, all_markers, last)
            return
        # The interleaved rows were overwritten.
        starts = markers.starts(all_markers)
        starts[breaks] = True
        self.index = Trajectories(capacity, 1, self._now - self._filled)
        self.index.written(starts)
        self._recent = RecentItems()
        self._recent.interleave(all_markers, int(np.count_nonzero(starts)))

    def _breaks(self, storage: Storage) -> np.ndarray:
        """The stored rows, counted from the oldest, that do not continue the row before them."""
        ring = storage.ring
        oldest = storage.contents.oldest_row
        steps = (np.array([ring.cursor, *ring.discontinuities()]) - oldest) % self._capacity
        return np.unique(steps[(steps > 0) & (steps < self._filled)])


class GivenTrajectories(TrajectorySource):
    """Trajectories that the user gives, of a full storage of one item dim that is not written any more.

    Args:
        ends: bool [items], whether a trajectory ends with an item; or
        trajectories: integers or floats [items], the id of the trajectory of each item. The last item may be followed by
            the first.
    """

    version = 1

    def __init__(self, ends: Any, trajectories: Any) -> None:
        super().__init__()
        self._given = ends, trajectories
        column = torch.as_tensor(trajectories if ends is None else ends, device="cpu").detach()
        if (ends is not None and trajectories is not None) or column.ndim != 1 or not column.numel():
            raise RuntimeError(f"give one of ends and trajectories, of shape [items], got shape {list(column.shape)}")
        if column.is_complex() or (ends is not None and column.dtype != torch.bool):
            raise TypeError(f"ends must be bool and trajectories integers, got {column.dtype}")
        values = (column.double() if column.is_floating_point() else column).numpy()
        last = values if ends is not None else values != np.roll(values, -1)
        start = int(last.nonzero()[0][-1] + 1) % len(last) if last.any() else 0
        self.index = Trajectories(len(last), 1, start)
        self.index.written(np.roll(last, 1 - start)[:, None])
        self._written: tuple[int, int] | None = None  # rows written, and cursor, at the first use

    def anew(self) -> "GivenTrajectories":
        """The same index, for a storage that was not read yet."""
        return GivenTrajectories(*self._given)

    def of(self, storage: Storage) -> Trajectories:
        """The index. RuntimeError for another number of items, and where rows were written since the first call."""
        size = stored(storage)
        ring = storage.ring
        many = self.index.capacity
        if size != many or storage.ndim > 1:
            raise RuntimeError(
                f"ends and trajectories are of {many} items of one dim, {size} of {storage.ndim} dims are stored: they are "
                "for a storage that is full and not written any more"
            )
        written = ring.written, ring.cursor
        if self._written not in (None, written):
            raise RuntimeError(
                "the storage was written to after ends and trajectories were given, which are for static data: give "
                "end_key or traj_key instead"
            )
        self._written = written
        return self.index

    def refresh(self) -> bool:
        """As for `StoredTrajectories`."""
        return True
