"""The stored trajectories of a replay buffer, in order."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.buffers import ReplayBuffer
from interop.buffers.collate import stack
from interop.data.arguments import class_of
from interop.data.keys import as_key, as_path, entries_below, known_keys
from interop.data.trajectory_keys import KeyPath, TrajectoryKeys
from interop.postprocs.gather import picked_items
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.stored_trajectories import StoredTrajectories
from interop.shared.storage_lock import locked
from interop.storages import Storage, TensorStorage, columns

Kind = tuple[torch.dtype | str, tuple[int, ...]]
"""The dtype and shape of an entry of one row; "text", "bytes", "ragged rows" or "values" for other than dense tensors."""


@contextlib.contextmanager
def stored_episodes(
    rb: ReplayBuffer,
    traj_key: NestedKey | None,
    end_keys: Sequence[NestedKey] | None,
    only_named_keys: bool = False,
    exclude: Collection[NestedKey] = (),
) -> Iterator["StoredEpisodes"]:
    """A context with the trajectories of a buffer of tensordicts, which is locked meanwhile.

    Raises: TypeError for an ensemble, and for a writer without write order; RuntimeError for an empty buffer, and for
    entries that mark no trajectory ends; KeyError for a key of `exclude` that is not stored.
    """
    if not isinstance(rb, ReplayBuffer):
        raise TypeError(f"a single ReplayBuffer is needed, got {class_of(rb)}: write members of an ensemble one by one")
    if not rb.writer.keeps_order:
        raise TypeError(f"a {type(rb.writer).__name__} does not keep the order of rows: there are no trajectories")
    with locked(rb):
        if not len(rb.storage):
            raise RuntimeError("the buffer is empty: there is nothing to write")
        yield StoredEpisodes(rb.storage, TrajectoryKeys.chosen(traj_key, end_keys, only_named_keys), exclude)


class StoredEpisodes:
    """Stored rows grouped by trajectory, in the order of trajectory ends, the oldest row of each first.

    Trajectories are those of `SliceSampler`: the cursor of a ring and the end of the storage also end one. Transforms are
    not applied.

    Args:
        storage: a non-empty storage, not written to while this object is used.
        keys: the entries that mark trajectories.
        exclude: the keys of entries that are left out.
    """

    def __init__(self, storage: Storage, keys: TrajectoryKeys, exclude: Collection[NestedKey] = ()) -> None:
        if isinstance(exclude, str):
            raise TypeError(f"exclude must be a list of keys, got {exclude!r}: pass [{exclude!r}]")
        self._storage = storage
        self._exclude = tuple(exclude)
        markers = BoundaryKeys(keys)
        self._index = StoredTrajectories(markers).of(storage)
        stored = self._index.stored()
        self._lane = stored[:, 0]
        self._first = self._index.first_stored(stored)
        self._stops = np.cumsum(self._index.lengths())  # positions in the new order
        self._starts = np.concatenate([[0], self._stops[:-1]])
        self.rows = int(self._stops[-1])
        """The number of all rows."""
        self.marked_by = markers.stored_keys.paths()
        """The entries that say where trajectories end."""
        self.id_path: KeyPath | None = None
        """The first entry of ids that differ from trajectory to trajectory."""
        self.ids: np.ndarray | None = None
        """The id of each trajectory in that entry."""
        first = self._index.slots_at(self._first, self._lane)
        for path in markers.stored_keys.ids:
            ids = columns.read(storage, as_key(path), first).reshape(-1).cpu().numpy()
            if self.ids is None and len(np.unique(ids)) == len(ids):
                self.id_path = path
                self.ids = ids
        item: Any = self._first_item()
        for key in self._exclude:
            path = as_path(key)
            inner = item
            for step in path:
                inner = inner.get(step, None) if isinstance(inner, TensorDictBase) else None
            if inner is None:
                raise KeyError(f"{key!r} of exclude is not stored; there are {known_keys(item)}")

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the keys, shapes and dtypes of the first, and no text or ragged rows."""
        storage = self._storage
        return isinstance(storage, TensorStorage) and not storage.table.packs

    def is_ever_set(self, path: KeyPath) -> bool:
        """Whether a tensor has a value other than zero in any row."""
        return bool((columns.whole(self._storage, path) != 0).any())

    def reaches(self, path: KeyPath, bound: int) -> bool:
        """Whether a tensor has a value beyond the bound, or the negative bound, in any row."""
        values = columns.whole(self._storage, path)
        return bool(((values > bound) | (values < -bound)).any())

    def __len__(self) -> int:
        return len(self._stops)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield the rows of each trajectory."""
        for start, stop in zip(self._starts.tolist(), self._stops.tolist(), strict=True):
            yield self.read(start, stop)

    def lengths(self) -> np.ndarray:
        """The number of rows of each trajectory."""
        return self._stops - self._starts

    def number(self, start: int, stop: int) -> np.ndarray:
        """The trajectory number of each row from `start` to `stop`."""
        return self._stops.searchsorted(np.arange(start, stop), "right")

    def read(self, start: int, stop: int) -> TensorDictBase:
        """A copy of the rows from `start` to `stop`, on the CPU.

        ValueError, naming the entry and the row, if they differ in keys, shapes or dtypes.
        """
        number = self.number(start, stop)
        rows = self._index.rows_at(self._first[number] + np.arange(start, stop) - self._starts[number])
        index: Any = torch.from_numpy(rows)
        if self._storage.ndim > 1:
            lanes = np.unravel_index(self._lane[number], tuple(self._storage.shape or ())[1:])
            index = index, *map(torch.from_numpy, lanes)
        drawn = self._storage.get(index)
        if isinstance(drawn, LazyStackedTensorDict):
            drawn = drawn.unbind(0)
        if isinstance(drawn, list | tuple):
            items = [self._without_excluded(item) for item in drawn]
            self._refuse_unlike(items, start)
            drawn = stack(items)
        if type(drawn) is not TensorDict:
            drawn = picked_items(drawn, torch.arange(stop - start))
        return self._without_excluded(drawn).cpu()

    def _without_excluded(self, rows: Any) -> Any:
        """Rows without the storage slots and the entries that are left out."""
        return rows.exclude("index", *self._exclude)

    def _first_item(self) -> Any:
        """One item, with all entries."""
        item = self._storage.get(0)
        return item[0] if self._storage.ndim > 1 else item

    def _refuse_unlike(self, items: Sequence[Any], start: int) -> None:
        """ValueError for items, rows of the export from `start` on, that differ from the first row."""
        first = {path: kind_of(value, 0) for path, value in entries_below(self._without_excluded(self._first_item()))}
        for row, item in enumerate(items, start):
            kinds = {path: kind_of(value, 0) for path, value in entries_below(item)}
            for path in first.keys() | kinds.keys():
                if first.get(path) != kinds.get(path):
                    key = path[0] if len(path) == 1 else path
                    raise ValueError(
                        f"{path} is {shown_kind(kinds.get(path))} in row {row} of the export, "
                        f"{shown_kind(first.get(path))} in another one: rows of one kind are needed, or leave it out by "
                        f"exclude=[{key!r}]"
                    )


def kind_of(value: Any, dims: int) -> Kind:
    """The kind of an entry with `dims` batch dims."""
    if isinstance(value, Tensor):
        return ("ragged rows", ()) if value.is_nested else (value.dtype, tuple(value.shape[dims:]))
    values = value.tolist() if dims else [getattr(value, "data", value)]
    kinds = {type(element) for element in values} if isinstance(values, list) else set()
    return ("text" if kinds == {str} else "bytes" if kinds == {bytes} else "values"), ()


def shown_kind(kind: Kind | None) -> str:
    """A kind for messages."""
    if kind is None:
        return "missing"
    return kind[0] if isinstance(kind[0], str) else f"{str(kind[0]).removeprefix('torch.')} {[*kind[1]]}"
