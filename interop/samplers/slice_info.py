"""Sampled slices, and their info: flags of where they end and begin, and the mask of padding."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path
from interop.host.runs import Runs
from interop.host.trajectories import Trajectories
from interop.storages import Storage, TensorStorage, columns

_MASK = ("collector", "mask")


class DrawnSlices(NamedTuple):
    """Flat slots of slices, one slice after the other.

    Attributes:
        slots: int64 [n].
        length: slots of each slice, padding included, unless `lengths` says otherwise.
        begins: the first row of each slice; None where the rows of some are not consecutive in memory.
        lengths: items of each slice, where they differ.
        mask: bool [n], False for padding; None without padding.
        weights: the importance weight of each slot, for starts that are drawn by priority.
    """

    slots: np.ndarray
    length: int
    begins: np.ndarray | None = None
    lengths: np.ndarray | None = None
    mask: np.ndarray | None = None
    weights: Tensor | None = None

    @classmethod
    def at(
        cls, index: Trajectories, start: np.ndarray, lane: np.ndarray, length: int, lengths: np.ndarray, pad: bool
    ) -> "DrawnSlices":
        """Slices of `lengths`, at most `length`, from these times on in lanes; with `pad` the last item is repeated."""
        if (lengths == length).all():
            slots, begins = index.windows(start, lane, length)
            return cls(slots.reshape(-1), length, begins)
        steps = np.minimum(np.arange(length), lengths[:, None] - 1)
        slots = index.slots_at(start[:, None] + steps, lane[:, None])
        mask = np.arange(length) < lengths[:, None]
        if not pad:
            return cls(slots[mask], length, None, lengths)
        return cls(slots.reshape(-1), length, None, lengths, mask.reshape(-1))

    def row_counts(self) -> np.ndarray | None:
        """Slots of each slice, padding included; None where all have `length`."""
        return self.lengths if self.mask is None else None

    def first(self) -> np.ndarray:
        """The place of the first slot of each slice."""
        counts = self.row_counts()
        return np.arange(0, self.slots.size, self.length) if counts is None else counts.cumsum() - counts

    def last(self) -> np.ndarray:
        """bool [n, 1]: the last slot of each slice that is no padding."""
        if self.lengths is None:
            return _ends(self.slots.size, self.length).copy()
        flags = np.zeros((self.slots.size, 1), np.bool_)
        flags[self.first() + self.lengths - 1] = True
        return flags


@functools.lru_cache(16)
def _ends(size: int, length: int) -> np.ndarray:
    flags = np.zeros((size, 1), np.bool_)
    flags[length - 1 :: length] = True
    return flags


class SliceInfo:
    """Builds the info of slices: flags "truncated", "done" and "terminated", the mask, first steps and weights."""

    def __init__(self, truncated_key: NestedKey | None, init_key: NestedKey | None = "is_init") -> None:
        self._truncated = truncated_key
        parent = as_path(truncated_key)[:-1]
        self._done, self._terminated = ((*parent, name) if parent else name for name in ("done", "terminated"))
        ends = [] if truncated_key is None else [self._done, self._terminated]
        self._init_key = init_key
        self._paths = [as_path(key) for key in (*ends, *([] if init_key is None else [init_key]))]

    def of(self, storage: Storage, slices: DrawnSlices, runs: Runs | None = None) -> dict[Any, Any]:
        """Flags by key, bool [n, 1]; [n, ...] where items have several. `runs` reads the rows of the storage. O(slots)."""
        info: dict[Any, Any] = {}
        columns = self._stored(storage, slices, runs)
        if self._truncated is not None:
            last = slices.last()
            done = columns[0]
            terminated = columns[1]
            if done is None:
                done = last.copy()
            else:
                done |= last if done.ndim == 2 else last.reshape(-1, *(1 for _ in done.shape[1:]))
            info[self._truncated] = torch.from_numpy(last)
            info[self._done] = torch.from_numpy(done)
            info[self._terminated] = torch.from_numpy(
                np.zeros(last.shape, np.bool_) if terminated is None else terminated
            )
        if slices.mask is not None:
            info[_MASK] = torch.from_numpy(slices.mask)
        if self._init_key is not None and (begun := columns[-1]) is not None:
            begun[slices.first()] = True
            info[self._init_key] = torch.from_numpy(begun)
        if slices.weights is not None:
            info["priority_weight"] = slices.weights
        return info

    def _stored(self, storage: Storage, slices: DrawnSlices, runs: Runs | None) -> list[np.ndarray | None]:
        """Copies of the stored flags of the slots, bool [n, ...], [n, 1] for ends; None for flags that are not stored."""
        slots = slices.slots
        stored_flags = list[Any]()
        if runs is not None and slices.begins is not None:  # half the time of a gather
            assert isinstance(storage, TensorStorage) and storage.table.layout is not None
            places = storage.table.layout.places
            for path in self._paths:
                place = places.get(path)
                stored_flags.append(None if place is None else runs.one(place, slices.begins, slices.length, slots))
        elif (arrays := storage.contents.host_columns(self._paths)) is not None:
            # Other modes of `take` copy twice.
            stored_flags += [None if array is None else array.take(slots, 0, mode="clip") for array in arrays]
        else:
            for path in self._paths:
                stored = columns.has(storage, path)
                stored_flags.append(columns.read(storage, path, slots).to(torch.bool).cpu().numpy() if stored else None)
        for at, flags in enumerate(stored_flags):
            if flags is not None and (flags.ndim != 2 or flags.dtype != np.bool_):
                flags = flags.astype(np.bool_)
                is_single = self._paths[at] != as_path(self._init_key) and math.prod(flags.shape) == len(slots)
                stored_flags[at] = flags.reshape(-1, 1) if is_single else flags
        return stored_flags
