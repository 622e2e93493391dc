"""Draws of runs of consecutive items of one trajectory."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data import randomness
from interop.host.rows import TorchRows
from interop.host.trajectories import Trajectories
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.draws import host_share
from interop.samplers.shares import ShardContents
from interop.samplers.slice_info import DrawnSlices, SliceInfo
from interop.samplers.slice_shape import SliceShape
from interop.samplers.slot_draws import SlotDraws
from interop.samplers.stored_trajectories import GivenTrajectories, StoredTrajectories
from interop.storages import Storage, TensorStorage
from interop.storages.batches import read_batch

Source = StoredTrajectories | GivenTrajectories


class SliceDraws(SlotDraws):
    """Draws slices of trajectories: each trajectory that is long enough equally often, and each start in it.

    Args:
        source: the index of trajectories, for one storage.
        shape: of the slices.
    """

    def __init__(self, source: Source, shape: SliceShape) -> None:
        self.source = source
        self.shape = shape
        self._info = SliceInfo(shape.truncated_key)
        self._last: DrawnSlices | None = None

    @property
    def settings(self) -> tuple[Any, ...]:
        shape = self.shape
        return shape.num_slices, shape.slice_len, shape.strict_length, shape.pad_output, shape.span

    @property
    def boundary_keys(self) -> BoundaryKeys | None:
        """The entries that mark trajectories; None where trajectories were given."""
        return self.source.keys if isinstance(self.source, StoredTrajectories) else None

    def trajectories(self, storage: Storage) -> Trajectories:
        """The stored trajectories. The lock of the storage is held.

        RuntimeError for an empty storage; RuntimeError or TypeError where the storage does not say where trajectories end.
        O(rows written since the last draw).
        """
        return self.source.of(storage)

    def clear(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the index of trajectories and all else that was computed for a storage."""
        self.source = self.source.anew()
        self._info = SliceInfo(self.shape.truncated_key)
        self._last = None

    # ------------------------------------------------------------------ draws

    def slots(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Tensor, dict[Any, Any]]:
        self._last = slices = self._slices(storage, *self.shape.of(batch_size), key)
        return torch.from_numpy(slices.slots), self._info.of(storage, slices)

    def batch(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray, marks: bool
    ) -> tuple[Any, dict[Any, Any]] | None:
        rows = storage.table.rows
        if not isinstance(rows, TorchRows) or rows.runs is None:
            return None
        self._last = slices = self._slices(storage, *self.shape.of(batch_size), key)
        info = self._info.of(storage, slices, rows.runs)
        slots = torch.from_numpy(slices.slots)
        info["index"] = self.index_of(slots, storage)
        return read_batch(storage, slots, (slices.begins, slices.length), info, marks)

    def index_of(self, slots: Tensor, storage: Storage) -> tuple[Tensor, ...]:
        index: Tensor | tuple[Tensor, ...] = super().index_of(slots, storage)
        return index if isinstance(index, tuple) else (index,)

    def _slices(self, storage: Storage, count: int, length: int, key: np.ndarray) -> DrawnSlices:
        """`count` slices of this length."""
        index = self.source.of(storage)
        trajectories = self._candidates(index, length)
        shares = randomness.generator_of(key).random(2 * count)
        chosen = trajectories.take((shares[:count] * len(trajectories)).astype(np.int64), 0)
        return self._within(index, chosen, shares[count:], length)

    def slice_lengths(self) -> np.ndarray | None:
        if self._last is None:
            return None
        lengths = self._last.row_counts()
        return np.full(self._last.slots.size // self._last.length, self._last.length) if lengths is None else lengths

    def share(self, storage: Storage, batch_size: int) -> ShardContents | None:
        """The trajectories that slices of a batch of this size can be drawn from."""
        _, length = self.shape.of(batch_size)
        return ShardContents(len(storage), float(self._eligible(storage, length)), unit=length)

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        return [host_share("where trajectories start and stop", None)]

    def _eligible(self, storage: Storage, length: int) -> int:
        """How many trajectories are long enough."""
        return len(self.trajectories(storage).stored(length if self.shape.strict_length else 1)) if len(storage) else 0

    def _candidates(self, index: Trajectories, length: int) -> np.ndarray:
        """(lane, first, last) of each trajectory that can be drawn; RuntimeError for none."""
        trajectories = index.stored(length if self.shape.strict_length else 1)
        if not len(trajectories):
            lengths = index.lengths()
            raise RuntimeError(
                f"no stored trajectory is long enough: their lengths are {lengths.min()} to {lengths.max()}, slices need "
                f"{length}. Use shorter slices, or strict_length=False"
            )
        return trajectories

    def _within(self, index: Trajectories, chosen: np.ndarray, shares: np.ndarray, length: int) -> DrawnSlices:
        """Slices within trajectories, one in each; `shares` of [0, 1) say where."""
        lane, first, last = chosen.T
        if index.lanes > 1:
            first = np.maximum(first, index.oldest)
        if self.shape.span == (False, False):
            starts = last - first - (length - 2)  # how many whole slices there are
            if self.shape.strict_length or starts.item(starts.argmin()) > 0:
                slots, begins = index.windows(first + (shares * starts).astype(np.int64), lane, length)
                return DrawnSlices(slots.reshape(-1), length, begins)
        left, right = (length - 1 if most is True else int(most) for most in self.shape.span)
        room = np.minimum(np.maximum(last - first - (length - 1), 0) + right, last - first)
        start = first + (shares * (room + (left + 1))).astype(np.int64) - left
        begin = np.maximum(start, first)
        lengths = np.minimum(start + length, last + 1) - begin
        return DrawnSlices.at(index, begin, lane, length, lengths, self.shape.pad_output)

    def __getstate__(self) -> dict[str, Any]:  # the index is built anew
        return {**self.__dict__, "source": self.source.anew(), "_last": None}
