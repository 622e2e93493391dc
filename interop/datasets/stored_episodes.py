"""The stored trajectories of a replay buffer, in order."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.buffers import ReplayBuffer
from interop.buffers.collate import stack
from interop.data.arguments import class_of
from interop.data.keys import as_key
from interop.data.trajectory_keys import Path, TrajectoryKeys
from interop.postprocs.gather import picked_items
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.stored_trajectories import StoredTrajectories
from interop.shared.storage_lock import locked
from interop.storages import Storage, columns
from interop.writers import TensorDictMaxValueWriter


@contextlib.contextmanager
def stored_episodes(
    rb: ReplayBuffer, traj_key: NestedKey | None, end_keys: Sequence[NestedKey] | None, only_named_keys: bool = False
) -> Iterator["StoredEpisodes"]:
    """A context with the trajectories of a buffer of tensordicts, which is locked meanwhile.

    Raises: TypeError for an ensemble, and for a writer without write order; RuntimeError for an empty buffer, and for
    entries that mark no trajectory ends.
    """
    if not isinstance(rb, ReplayBuffer):
        raise TypeError(f"a single ReplayBuffer is needed, got {class_of(rb)}: write members of an ensemble one by one")
    if isinstance(rb.writer, TensorDictMaxValueWriter):
        raise TypeError(f"a {type(rb.writer).__name__} does not keep the order of rows: there are no trajectories")
    with locked(rb):
        if not len(rb.storage):
            raise RuntimeError("the buffer is empty: there is nothing to write")
        yield StoredEpisodes(rb.storage, TrajectoryKeys.chosen(traj_key, end_keys, only_named_keys))


class StoredEpisodes:
    """Stored rows grouped by trajectory, in the order of trajectory ends, the oldest row of each first.

    Trajectories are those of `SliceSampler`: the cursor of a ring and the end of the storage also end one. Transforms are
    not applied.

    Args:
        storage: a non-empty storage, not written to while this object is used.
        keys: the entries that mark trajectories.
    """

    def __init__(self, storage: Storage, keys: TrajectoryKeys) -> None:
        self._storage = storage
        markers = BoundaryKeys(keys)
        self._index = StoredTrajectories(markers).of(storage)
        self._lane, first, last = self._index.stored().T
        self._first = np.maximum(first, self._index.oldest)
        self._stops = np.cumsum(last - self._first + 1)  # positions in the new order
        self._starts = np.concatenate([[0], self._stops[:-1]])
        self.rows = int(self._stops[-1])
        """The number of all rows."""
        self.marked_by = markers.found.paths()
        """The entries that say where trajectories end."""
        self.id_path: Path | None = None
        """The first entry of ids that differ from trajectory to trajectory."""
        self.ids: np.ndarray | None = None
        """The id of each trajectory in that entry."""
        first = self._index.slots_at(self._first, self._lane)
        for path in markers.found.ids:
            ids = columns.read(storage, as_key(path), first).reshape(-1).cpu().numpy()
            if self.ids is None and len(np.unique(ids)) == len(ids):
                self.id_path, self.ids = path, ids

    def __len__(self) -> int:
        return len(self._stops)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield the rows of each trajectory."""
        for start, stop in zip(self._starts.tolist(), self._stops.tolist(), strict=True):
            yield self.read(start, stop)

    def number(self, start: int, stop: int) -> np.ndarray:
        """The trajectory number of each row from `start` to `stop`."""
        return self._stops.searchsorted(np.arange(start, stop), "right")

    def read(self, start: int, stop: int) -> TensorDictBase:
        """A copy of the rows from `start` to `stop`, on the CPU. ValueError if they differ in keys or shapes."""
        number = self.number(start, stop)
        rows = self._index.rows_at(self._first[number] + np.arange(start, stop) - self._starts[number])
        index: Any = torch.from_numpy(rows)
        if self._storage.ndim > 1:
            lanes = np.unravel_index(self._lane[number], tuple(self._storage.shape or ())[1:])
            index = index, *map(torch.from_numpy, lanes)
        found = self._storage.get(index)
        found = stack(found) if isinstance(found, list) else found
        if type(found) is not TensorDict:
            found = picked_items(found, torch.arange(stop - start))
        return found.exclude("index").cpu()  # drop storage slots


def plain(value: Any, path: tuple[Any, ...]) -> np.ndarray | list[str]:
    """Convert an entry of rows to an array or a list of text. TypeError names an entry of another kind."""
    if isinstance(value, Tensor):
        try:
            return value.numpy()
        except TypeError as error:
            raise TypeError(f"{path} is {value.dtype}, which NumPy does not know: cast it") from error
    texts = value.tolist()
    if not isinstance(texts, list) or not all(type(each) is str for each in texts):
        raise TypeError(f"{path} holds neither tensors nor text: leave it out")
    return texts
