"""Slots are drawn as runs of consecutive items of one trajectory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fbuf.memory_plan import Share
from fbuf.samplers import Chances, Reason
from interop.data import randomness
from interop.data.arguments import whole
from interop.data.trajectory_keys import TrajectoryKeys
from interop.host.rows import TorchRows
from interop.host.trajectories import Trajectories
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.draws import host_share
from interop.samplers.shares import ShardContents
from interop.samplers.slice_info import DrawnSlices, SliceInfo
from interop.samplers.slice_law import SliceLaw
from interop.samplers.slot_draws import SlotDraws, unravel
from interop.samplers.trajectory_source import TrajectorySource
from interop.storages import Storage, TensorStorage
from interop.storages.batches import read_batch


@dataclass(slots=True)
class SliceShape:
    """How many slices of which length a batch has, and how they lie in their trajectories.

    The parameters of `SliceSampler` with the same names; they may be set between draws.

    ValueError for a span that is no pair of bools and integers, or not shorter than a slice.
    """

    num_slices: int | None
    slice_len: int | None
    strict_length: bool
    pad_output: bool
    span: tuple[bool | int, bool | int]
    truncated_key: Any
    init_key: Any = "is_init"

    def __post_init__(self) -> None:
        self.span = _pair(self.span)
        if self.slice_len is not None:
            self._check_span(self.slice_len)

    def of(self, batch_size: int) -> tuple[int, int]:
        """How many slices of which length. RuntimeError where the batch cannot be made of them."""
        if self.slice_len is not None:
            if batch_size % self.slice_len:
                raise RuntimeError(f"batch_size={batch_size} is not a multiple of slice_len={self.slice_len}")
            return batch_size // self.slice_len, self.slice_len
        assert self.num_slices is not None
        if batch_size % self.num_slices:
            raise RuntimeError(f"batch_size={batch_size} is not a multiple of num_slices={self.num_slices}")
        length = batch_size // self.num_slices
        if self.span != (False, False):
            self._check_span(length)
        return self.num_slices, length

    def length(self, batch_size: int | None) -> int | None:
        """The length of slices in a batch of this size; None if it depends on one that is not known."""
        if self.slice_len is not None or batch_size is None:
            return self.slice_len
        return self.of(batch_size)[1]

    def spans(self, length: int) -> tuple[int, int]:
        """How many rows slices of this length may begin before their trajectory, and reach behind it."""
        left, right = (length - 1 if most is True else int(most) for most in self.span)
        return left, right

    def least(self, length: int) -> int:
        """Stored rows that a trajectory must have."""
        return length if self.strict_length else 1

    def _check_span(self, length: int) -> None:
        if any(most is not True and most >= length for most in self.span):
            raise ValueError(f"span={self.span} must be less than the length of slices, {length}")


class SliceDraws(SlotDraws):
    """Draws slices of trajectories: each trajectory that is long enough equally often, and each start in it.

    Args:
        source: the index of trajectories, for one storage.
        shape: of the slices.
    """

    def __init__(self, source: TrajectorySource, shape: SliceShape) -> None:
        self.source = source
        self.shape = shape
        self._info = SliceInfo(shape.truncated_key, shape.init_key)
        self._last: DrawnSlices | None = None

    @property
    def settings(self) -> tuple[Any, ...]:
        shape = self.shape
        return shape.num_slices, shape.slice_len, shape.strict_length, shape.pad_output, shape.span

    @property
    def boundary_keys(self) -> BoundaryKeys | None:
        """The entries that mark trajectories; None where trajectories were given."""
        return self.source.keys

    @property
    def trajectory_keys(self) -> TrajectoryKeys | None:
        keys = self.boundary_keys
        return None if keys is None else keys.keys

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
        self._info = SliceInfo(self.shape.truncated_key, self.shape.init_key)
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
        coordinates: tuple[Tensor, ...] = (slots,) if storage.ndim == 1 else unravel(slots, storage)
        return coordinates

    def _slices(self, storage: Storage, count: int, length: int, key: np.ndarray) -> DrawnSlices:
        """`count` slices of this length."""
        shares = randomness.generator_of(key).random(2 * count)
        index = self.source.of(storage)
        trajectories = index.stored(self.shape.least(length))
        if not len(trajectories):
            raise self._too_short(index, length)
        chosen = trajectories.take((shares[:count] * len(trajectories)).astype(np.int64), 0)
        return self._within(index, chosen, shares[count:], length)

    def slice_lengths(self) -> np.ndarray | None:
        if self._last is None:
            return None
        lengths = self._last.row_counts()
        return np.full(self._last.slots.size // self._last.length, self._last.length) if lengths is None else lengths

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        length = self.shape.length(batch_size)
        if not len(storage):
            return Chances(np.zeros(0), np.zeros(0, np.uint8), np.zeros(0))
        return Chances.unknown(len(storage)) if length is None else self._law(storage, length, batch_size)

    def _law(self, storage: Storage, length: int, batch_size: int | None) -> Chances:
        """The law of slices of this length."""
        law = SliceLaw(self.source.of(storage))
        is_long = law.lengths >= self.shape.least(length)
        reason = np.where(is_long, np.uint8(Reason.NONE), np.uint8(Reason.TOO_SHORT))
        return law.evenly(is_long / max(is_long.sum(), 1), reason, length, *self.shape.spans(length))

    def starts_that_reach(self, storage: Storage, slot: int, batch_size: int | None = None) -> np.ndarray | None:
        length = self.shape.length(batch_size)
        if length is None:
            return None
        law = SliceLaw(self.source.of(storage))
        return law.reached_from(slot, length, self.shape.spans(length)[1], self.shape.least(length))

    def slice_rows(self, batch_size: int | None = None) -> tuple[int, int] | None:
        length = self.shape.length(batch_size)
        return None if length is None else (length, self.shape.least(length))

    def share(self, storage: Storage, batch_size: int) -> ShardContents | None:
        """The trajectories that slices of a batch of this size can be drawn from."""
        _, length = self.shape.of(batch_size)
        return ShardContents(len(storage), float(self._eligible(storage, length)), unit=length)

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        return [host_share("where trajectories start and stop", None)]

    def _eligible(self, storage: Storage, length: int) -> int:
        """How many trajectories are long enough."""
        return len(self.trajectories(storage).stored(self.shape.least(length))) if len(storage) else 0

    def _candidates(self, index: Trajectories, length: int) -> np.ndarray:
        """(lane, first, last) of each trajectory that can be drawn; RuntimeError for none."""
        trajectories = index.stored(self.shape.least(length))
        if not len(trajectories):
            raise self._too_short(index, length)
        return trajectories

    def _too_short(self, index: Trajectories, length: int) -> RuntimeError:
        lengths = index.lengths()
        return RuntimeError(
            f"no stored trajectory is long enough: their lengths are {lengths.min()} to {lengths.max()}, slices need "
            f"{length}. Use shorter slices, or strict_length=False"
        )

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
        left, right = self.shape.spans(length)
        room = np.minimum(np.maximum(last - first - (length - 1), 0) + right, last - first)
        start = first + (shares * (room + (left + 1))).astype(np.int64) - left
        begin = np.maximum(start, first)
        lengths = np.minimum(start + length, last + 1) - begin
        return DrawnSlices.at(index, begin, lane, length, lengths, self.shape.pad_output)

    def __getstate__(self) -> dict[str, Any]:  # the index is built anew
        return {**self.__dict__, "source": self.source.anew(), "_last": None}


def _pair(span: Any) -> tuple[bool | int, bool | int]:
    if isinstance(span, tuple | list) and len(span) != 2:
        raise ValueError(f"span must be a bool, an int, or a pair of these, got {span!r}")
    left, right = span if isinstance(span, tuple | list) else (span, span)
    for most in (left, right):
        if not isinstance(most, bool):
            whole("span", most, least=0)
    return left, right
