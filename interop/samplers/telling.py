"""What is told about slices: where they end and begin, and which of their items are padding."""

from typing import Any

import numpy as np
import torch

from interop.data.keys import as_path
from interop.samplers.flags import flags_at
from interop.storages import Storage, TensorStorage

_MASK = ("collector", "mask")
_INIT = "is_init"


class Slices:
    """Flat slots of slices, one slice after the other.

    Args:
        slots: int64 [n].
        length: of each slice.
        begins: the rows where they begin, if each is a run of rows, all of `length`.
        lengths: of each, where they differ.
        mask: which slots are no padding, where there is some: each slice has `length` slots then.
    """

    __slots__ = ("begins", "length", "lengths", "mask", "slots")

    def __init__(
        self,
        slots: np.ndarray,
        length: int,
        begins: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        mask: np.ndarray | None = None,
    ) -> None:
        self.slots, self.length, self.begins, self.lengths, self.mask = slots, length, begins, lengths, mask

    def row_counts(self) -> np.ndarray | None:
        """How many slots each slice has, padding included; None where all have `length`."""
        return self.lengths if self.mask is None else None

    def stops(self) -> np.ndarray | None:
        """The place behind the last slot of each, padding included; None where all have `length`."""
        if self.lengths is None:
            return None
        return self.lengths.cumsum() if self.mask is None else np.arange(1, len(self.lengths) + 1) * self.length


class Telling:
    """Tells under a key, if there is one, and "done" and "terminated" beside it, where slices end."""

    def __init__(self, truncated_key: Any) -> None:
        parent = truncated_key[:-1] if isinstance(truncated_key, tuple) else ()
        beside = [(*parent, name) if parent else name for name in ("done", "terminated")]
        self._keys: Any = None if truncated_key is None else (truncated_key, *beside)
        self._paths = [as_path(key) for key in beside]
        self._ends_of_slices: tuple[Any, np.ndarray] | None = None

    def of(self, storage: Storage, slices: Slices) -> dict[Any, Any]:
        """What is told about slices of a storage."""
        told: dict[Any, Any] = {}
        stops, slots = slices.stops(), slices.slots
        if self._keys is not None:
            ends = self._ends(slices, stops)
            truncated_key, done_key, terminated_key = self._keys
            told[truncated_key] = torch.from_numpy(ends.copy())
            done = flags_at(storage, done_key, slots, also=ends)
            told[done_key] = torch.from_numpy(ends.copy()) if done is None else done
            terminated = flags_at(storage, terminated_key, slots)
            if terminated is None:
                terminated = torch.from_numpy(_no_flags(ends))
            told[terminated_key] = terminated
        if slices.mask is not None:
            told[_MASK] = torch.from_numpy(slices.mask)
        begun = flags_at(storage, _INIT, slots, dims=0)
        if begun is not None:
            starts = np.arange(0, slots.size, slices.length)
            if stops is not None and slices.lengths is not None and slices.mask is None:
                starts = stops - slices.lengths
            begun[torch.from_numpy(starts)] = True
            told[_INIT] = begun
        return told

    def of_runs(self, storage: TensorStorage, runs: Any, slices: Slices) -> dict[Any, Any]:
        """The same of a storage whose leaves `runs` reads, with less overhead where it can."""
        assert storage._layout is not None
        places = storage._layout.places
        if slices.begins is None or self._keys is None or (_INIT,) in places:
            return self.of(storage, slices)
        truncated_key, done_key, terminated_key = self._keys
        ends = self._ends(slices, None)
        done, terminated = map(places.get, self._paths)
        flags = ends.copy() if done is None else runs.one(done, slices.begins, slices.length)
        others = _no_flags(ends) if terminated is None else runs.one(terminated, slices.begins, slices.length)
        for each in (flags, others):
            if each is None or each.dtype != ends.dtype or each.shape != ends.shape:
                return self.of(storage, slices)
        flags |= ends
        return {
            truncated_key: torch.from_numpy(ends.copy()),
            done_key: torch.from_numpy(flags),
            terminated_key: torch.from_numpy(others),
        }

    def _ends(self, slices: Slices, stops: np.ndarray | None) -> np.ndarray:
        """bool [n, 1], not to be written to: True in the last item of each slice."""
        size, length = slices.slots.size, slices.length
        if stops is None or slices.lengths is None:
            known = self._ends_of_slices
            if known is None or known[0] != (size, length):
                ends = _no_flags(slices.slots)
                ends[length - 1 :: length] = True
                known = self._ends_of_slices = (size, length), ends
            return known[1]
        ends = _no_flags(slices.slots)
        ends[stops - 1 if slices.mask is None else stops - length + slices.lengths - 1] = True
        return ends


def _no_flags(slots: np.ndarray) -> np.ndarray:
    return np.zeros((slots.size, 1), np.bool_)
