"""Trajectories whose items are anywhere in a storage: numbers of steps say which items follow each other."""

import weakref

import numpy as np
from tensordict.utils import NestedKey

from interop.host import markers
from interop.host.trajectories import Trajectories
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.slot_draws import stored
from interop.samplers.trajectory_source import TrajectorySource
from interop.storages import Storage, columns


class FragmentedTrajectories(TrajectorySource):
    """The index of the trajectories of one storage by ids and numbers of steps. Writes and edits make it anew.

    Items with the same ids and consecutive steps are a trajectory, unless a marker of `keys` divides them. Making the index
    takes O(items * log).

    Args:
        keys: the entries of ids, and other markers.
        step_key: the entry with the number of a step.
    """

    keys: BoundaryKeys

    def __init__(self, keys: BoundaryKeys, step_key: NestedKey) -> None:
        super().__init__()
        self.keys = keys
        self._step_key = step_key
        self._counts: tuple[tuple[int, int, int], int] | None = None

    def anew(self) -> "FragmentedTrajectories":
        """An index of the same keys that has read nothing."""
        return FragmentedTrajectories(BoundaryKeys(self.keys.keys), self._step_key)

    def of(self, storage: Storage) -> Trajectories:
        """The index, up to date. The lock of the storage is held.

        RuntimeError for an empty storage, several item dims, items without ids, or a step that is stored twice; KeyError,
        TypeError or ValueError where the numbers of steps are not stored, no integers, or negative.
        """
        counts = storage.ring.counts, len(storage)
        if self._of is not None and self._of() is storage and counts == self._counts and storage.contents.tracks_writes:
            return self.index
        self._of = None  # an update that raises is made anew by the next call
        size = stored(storage)
        if storage.ndim > 1:
            raise RuntimeError(f"fragmented=True is for storages of one item dim, this one has ndim={storage.ndim}")
        self.keys.find(storage)
        ids = self.keys.stored_keys.ids
        if not ids:
            raise RuntimeError(
                "fragmented=True needs an id for each item, under traj_key: marks of ends alone do not say which items "
                "belong together"
            )
        items = self.keys.read(storage, slice(0, size), 1)
        steps = self._steps(storage, size)
        order = np.lexsort((steps, *items.ids[:, 0].T))
        items, steps = items.at(order), steps[order]
        starts = markers.starts(items)[:, 0]
        same = (items.ids[1:, 0] == items.ids[:-1, 0]).all(1)
        twice = (same & (steps[1:] == steps[:-1])).nonzero()[0]
        if twice.size:
            at = int(twice[0])
            raise RuntimeError(
                f"step {steps[at]} of a trajectory is stored twice, at {order[at]} and {order[at + 1]}: {self._step_key!r} "
                f"and {ids} must be different for each item. A collector that is started anew begins with the same ids "
                "again: empty the buffer before, or give its trajectories other ids"
            )
        starts[1:] |= ~(same & (steps[1:] == steps[:-1] + 1))
        self.index = Trajectories.ordered(order, starts)
        self.version += 1
        self._of = weakref.ref(storage)
        self._counts = counts
        return self.index

    def _steps(self, storage: Storage, size: int) -> np.ndarray:
        """The number of the step of each item, int64 [items]."""
        values = columns.read(storage, self._step_key, np.arange(size))
        if values.is_floating_point() or values.is_complex() or values.numel() != size:
            raise TypeError(
                f"{self._step_key!r} must be one integer an item, the number of its step; it is {values.dtype} with items "
                f"of shape {list(values.shape[1:])}"
            )
        steps: np.ndarray = values.reshape(-1).cpu().numpy().astype(np.int64)
        if steps.min() < 0:
            raise ValueError(f"numbers of steps are at least 0, got {steps.min()} under {self._step_key!r}")
        return steps
