"""Sampled slices, and the flags that say where they end and begin and which of their items are padding."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from interop.data.keys import as_path
from interop.data.layout import Layout
from interop.host.runs import Runs
from interop.host.trajectories import Trajectories
from interop.storages import Storage, TensorStorage, columns

_MASK = ("collector", "mask")
_INIT = "is_init"


class Slices(NamedTuple):
    """Flat slots of slices, one slice after the other.

    Attributes:
        slots: int64 [n].
        length: slots of each slice, padding included, unless `lengths` says otherwise.
        begins: the rows where slices begin that are rows consecutive in memory; None where some are not.
        lengths: items of each slice, where they differ.
        mask: bool [n], which slots are no padding, where there is padding.
    """

    slots: np.ndarray
    length: int
    begins: np.ndarray | None = None
    lengths: np.ndarray | None = None
    mask: np.ndarray | None = None

    def row_counts(self) -> np.ndarray | None:
        """Slots of each slice, padding included; None where all have `length`."""
        return self.lengths if self.mask is None else None

    def first(self) -> np.ndarray:
        """The place of the first slot of each."""
        if (counts := self.row_counts()) is None:
            return np.arange(0, self.slots.size, self.length)
        return counts.cumsum() - counts

    def last(self) -> np.ndarray:
        """bool [n, 1], whether a slot is the last one of a slice that is no padding."""
        found = np.zeros((self.slots.size, 1), np.bool_)
        if self.lengths is None:
            found[self.length - 1 :: self.length] = True
        else:
            found[self.first() + self.lengths - 1] = True
        return found


def slices_at(
    index: Trajectories,
    start: np.ndarray,
    lane: np.ndarray,
    length: int,
    lengths: np.ndarray | None = None,
    pad: bool = False,
) -> Slices:
    """Slices from these times on in lanes, of `length` items or of `lengths`; with `pad` the last item is repeated."""
    if lengths is None or (lengths == length).all():
        slots, begins = index.windows(start, lane, length)
        return Slices(slots.reshape(-1), length, begins)
    steps = np.minimum(np.arange(length), lengths[:, None] - 1)
    slots, mask = index.slots_at(start[:, None] + steps, lane[:, None]), np.arange(length) < lengths[:, None]
    if not pad:
        return Slices(slots[mask], length, None, lengths)
    return Slices(slots.reshape(-1), length, None, lengths, mask.reshape(-1))


class SliceInfo:
    """Builds the truncated, done and terminated flags of sampled slices, the mask of padding and `is_init`."""

    def __init__(self, truncated_key: Any) -> None:
        parent, flags = as_path(truncated_key)[:-1], ("done", "terminated")
        self._truncated_key = truncated_key
        self._keys: list[Any] = [] if truncated_key is None else [(*parent, name) if parent else name for name in flags]
        self._paths = [as_path(key) for key in (*self._keys, _INIT)]
        self._places: tuple[Layout | None, list[int | None]] = None, []  # of these leaves in a layout
        self._ends: tuple[Any, np.ndarray] = None, np.zeros(0, np.bool_)

    def of(self, storage: Storage, slices: Slices, runs: Runs | None = None) -> dict[Any, Any]:
        """Flags by key, bool [n, 1]; [n, ...] where items have several. `runs` reads the rows of the storage. O(slots)."""
        info: dict[Any, Any] = {}
        found = None if runs is None or slices.begins is None else self._in_runs(storage, runs, slices)
        if found is None:
            found = self._at_slots(storage, slices.slots)
        if self._truncated_key is not None:
            ends, (done, terminated) = self._last(slices), found[:2]
            info[self._truncated_key] = torch.from_numpy(ends.copy())
            info[self._keys[0]] = torch.from_numpy(ends.copy()) if done is None else _tensor(_with(done, ends))
            info[self._keys[1]] = _tensor(np.zeros(ends.shape, np.bool_) if terminated is None else terminated)
        if slices.mask is not None:
            info[_MASK] = torch.from_numpy(slices.mask)
        if (begun := found[-1]) is not None:
            begun[slices.first()] = True
            info[_INIT] = _tensor(begun)
        return info

    def _last(self, slices: Slices) -> np.ndarray:
        """`slices.last()`, kept for slices of one length; not to be written to."""
        if slices.lengths is not None:
            return slices.last()
        size = slices.slots.size, slices.length
        if self._ends[0] != size:
            self._ends = size, slices.last()
        return self._ends[1]

    def _in_runs(self, storage: Storage, runs: Runs, slices: Slices) -> "list[Flags | None] | None":
        """The same as `_at_slots`, in half the time; None where flags are not stored as bool [rows, 1]."""
        assert isinstance(storage, TensorStorage) and storage.layout is not None and slices.begins is not None
        layout, places = self._places
        if layout is not storage.layout:
            layout = storage.layout
            places = [layout.places.get(path) for path in self._paths]
            self._places = layout, places
        found = list[Flags | None]()
        for place in places:
            flags = None if place is None else runs.one(place, slices.begins, slices.length)
            if place is not None and (
                flags is None or flags.dtype != np.bool_ or flags.ndim != 2 or flags.shape[1] != 1
            ):
                return None
            found.append(flags)
        return found

    def _at_slots(self, storage: Storage, slots: np.ndarray) -> "list[Flags | None]":
        """Copies of the entries of flags at flat slots, bool [n, ...], [n, 1] for ends; None for one that is not stored."""
        arrays, found = storage.host_columns(self._paths), list[Flags | None]()
        for at, path in enumerate(self._paths):
            held = None if arrays is None else arrays[at]
            flags: Any = None
            if held is not None:
                flags = held.take(slots, 0, mode="clip")  # other modes copy twice
                flags = flags if flags.dtype == np.bool_ else flags.astype(np.bool_)
            elif arrays is None and columns.has(storage, path):
                flags = columns.read(storage, path, slots).to(torch.bool)
            if flags is not None and flags.ndim != 2 and path != (_INIT,) and math.prod(flags.shape) == len(slots):
                flags = flags.reshape(-1, 1)
            found.append(flags)
        return found


Flags = np.ndarray | Tensor  # in NumPy where it can be: on few flags torch takes longer


def _with(flags: Flags, ends: np.ndarray) -> Flags:
    """Flags, True in the last item of each slice too."""
    more: Any = ends if flags.ndim == 2 else ends.reshape(-1, *(1 for _ in flags.shape[1:]))
    flags |= more if isinstance(flags, np.ndarray) else torch.from_numpy(more).to(flags.device)
    return flags


def _tensor(flags: Flags) -> Tensor:
    return torch.from_numpy(flags) if isinstance(flags, np.ndarray) else flags
