"""Runs of consecutive items of one trajectory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from fbuf.memory_plan import Share
from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions
from interop.data import randomness
from interop.data.arguments import whole
from interop.data.keys import as_key, checked_key
from interop.data.trajectory_keys import TrajectoryKeys
from interop.host.rows import TorchRows
from interop.host.trajectories import Trajectories
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.drawing import DrawingSampler, unravel
from interop.samplers.sampler import host_share
from interop.samplers.shares import ShardContents
from interop.samplers.slice_info import DrawnSlices, SliceInfo
from interop.samplers.stored_trajectories import GivenTrajectories, StoredTrajectories
from interop.storages import LazyStackStorage, ListStorage, Storage, TensorStorage
from interop.storages.batches import read_batch
from interop.writers import Writer


class SliceSampler(DrawingSampler):
    """Draws slices of trajectories: each trajectory that is long enough equally often, and each start in it.

    A batch has the slices one after the other, [num_slices * slice_len]. No slice crosses the end of a trajectory, the
    cursor of a full storage, or an edge of rows that `storage.set` has written elsewhere in this process; a slice may go on
    from the last row to the first. A draw costs O(batch), whatever is stored; the first one after a write also looks at the
    rows that were written. Needs a storage that is read as a tensordict, and a writer that keeps the order of items.

    Args:
        num_slices, slice_len: one of them; the other follows from the batch size, which must be a multiple.
        end_key: bool entry that is True in the last item of a trajectory.
        end_keys: several of them.
        traj_key: entry of numbers that is the same for all items of a trajectory. In a storage of one item dim the items of
            several trajectories may be interleaved, one of each at a time; the first draw after a write then takes
            O(stored items), which `ndim=2` avoids.
        only_named_keys: only the keys that are named here count.
        ends, trajectories: the same as tensors, for a storage of one item dim that is full and never written again; they
            need `cache_values`.
        cache_values: accepted; the index of trajectories is always kept and up to date.
        truncated_key: the entry of the batch for the ends of slices, with "done" and "terminated" beside it; None for none.
        strict_length: False also draws shorter trajectories, whole; the batch is then smaller.
        pad_output: fill these up by repeating their last item; ("collector", "mask") is False there.
        compile: accepted; there is nothing to compile.
        span: let slices begin before (left) or end behind (right) their trajectory, which cuts them: True, an int for at
            most so many items, or a pair of these.
        use_gpu: accepted; boundaries are kept on the host.

    A trajectory ends where any stored marker says so: where ("collector", "traj_ids"), "traj_ids" or "episode" changes,
    where ("next", "done"), ("next", "terminated") or ("next", "truncated") is true, before a true "is_init", and where
    ("collector", "mask") changes. Keys that are named here count besides these, unless `only_named_keys`. After the first
    draw `traj_key` and `end_key` are the first keys that were found, where none were named. An edit of a stored marker
    counts if it is made by `set_`, `update_` or `rb[...] =`, not through a view.
    """

    num_slices: int | None
    slice_len: int | None
    end_keys: list[Any] | None
    truncated_key: Any
    cache_values: bool
    strict_length: bool
    pad_output: bool
    compile: bool | dict[str, Any]
    use_gpu: Any
    span: tuple[bool | int, bool | int]
    only_named_keys: bool
    _end_key: Any
    _traj_key: Any
    _static_markers: tuple[Tensor | None, Tensor | None]  # ends and trajectories that were given
    _source: StoredTrajectories | GivenTrajectories
    _info: SliceInfo
    _last: DrawnSlices | None

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: NestedKey | None = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: Any = False,
        use_gpu: Any = False,
        only_named_keys: bool = False,
    ) -> None:
        if (num_slices is None) == (slice_len is None):
            raise TypeError(f"give one of num_slices and slice_len, got {num_slices} and {slice_len}")
        if end_key is not None and end_keys is not None:
            raise RuntimeError(f"give one of end_key and end_keys, got {end_key!r} and {end_keys!r}")
        if pad_output and strict_length:
            raise ValueError("pad_output=True needs strict_length=False, or there is nothing to pad")
        if not isinstance(compile, bool | dict):
            raise TypeError(f"compile must be a bool or a dict, got {type(compile).__name__}")
        self.num_slices = None if num_slices is None else whole("num_slices", num_slices)
        self.slice_len = None if slice_len is None else whole("slice_len", slice_len)
        self._end_key = checked_key("end_key", end_key)
        self._traj_key = checked_key("traj_key", traj_key)
        self.end_keys = None if end_keys is None else [checked_key("end_keys", key) for key in end_keys]
        self.truncated_key = checked_key("truncated_key", truncated_key)
        self.cache_values = bool(cache_values)
        self.strict_length = bool(strict_length)
        self.pad_output = bool(pad_output)
        self.compile = compile
        self.use_gpu = use_gpu
        self.span = _pair(span)
        if self.slice_len is not None:
            self._check_span(self.slice_len)
        self._static_markers = ends, trajectories
        self.only_named_keys = bool(only_named_keys)
        if self.is_static and not cache_values:
            raise RuntimeError("ends and trajectories are for static data: they need cache_values=True")
        if self.is_static and any(key is not None for key in (end_key, end_keys, traj_key)):
            raise RuntimeError("ends and trajectories say where trajectories end: give neither end_key nor traj_key")
        self._forget()

    def _forget(self) -> None:
        """Drop the index of trajectories and all else that was computed for a storage."""
        if self.is_static:
            self._source = GivenTrajectories(*self._static_markers)
        else:
            ends = self.end_keys if self._end_key is None else [self._end_key]
            keys = TrajectoryKeys.chosen(self._traj_key, ends, self.only_named_keys)
            self._source = StoredTrajectories(BoundaryKeys(keys))
        self._info = SliceInfo(self.truncated_key)
        self._last = None

    @property
    def draw_settings(self) -> tuple[Any, ...]:
        sizes = self.num_slices, self.slice_len, self.strict_length, self.pad_output, self.span
        return *super().draw_settings, *sizes

    def _empty(self) -> None:
        super()._empty()
        self._forget()

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        """RuntimeError for a list that is not read as a tensordict, TypeError for a writer that keeps no order."""
        if self.is_static:
            return
        if isinstance(storage, ListStorage) and not isinstance(storage, LazyStackStorage):
            raise RuntimeError(
                "Could not get a tensordict out of the storage, which is required to know where trajectories end: use a "
                f"LazyStackStorage or LazyTensorStorage, not a {type(storage).__name__}"
            )
        if not writer.keeps_order:
            raise TypeError(
                f"slices follow the order of writing, which a {type(writer).__name__} does not keep: write whole "
                "trajectories as items, and draw items"
            )

    @property
    def is_static(self) -> bool:
        """Whether `ends` or `trajectories` were given, for a storage that is not written any more."""
        return any(marker is not None for marker in self._static_markers)

    @property
    def traj_key(self) -> Any:
        """The entry of trajectory ids: the named one, or the one that the last draw found; None for none."""
        keys = self.boundary_keys
        if self._traj_key is not None or keys is None or not keys.stored_keys.ids:
            return self._traj_key
        return as_key(keys.stored_keys.ids[0])

    @property
    def end_key(self) -> Any:
        """The entry that marks ends: the named one, or the one that the last draw found; None for none."""
        keys = self.boundary_keys
        if self._end_key is not None or self.end_keys is not None or keys is None or not keys.stored_keys.ends:
            return self._end_key
        return as_key(keys.stored_keys.ends[0])

    @property
    def boundary_keys(self) -> BoundaryKeys | None:
        """The entries that mark trajectories; None where trajectories were given."""
        return self._source.keys if isinstance(self._source, StoredTrajectories) else None

    def trajectories(self, storage: Storage) -> Trajectories:
        """The stored trajectories. The lock of the storage is held.

        RuntimeError for an empty storage; RuntimeError or TypeError where the storage does not say where trajectories end.
        O(rows written since the last draw).
        """
        return self._source.of(storage)

    # ------------------------------------------------------------------ draws

    def _draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Tensor, dict[Any, Any]]:
        self._last = slices = self._slices(storage, *self._shape(batch_size), key)
        return torch.from_numpy(slices.slots), self._info.of(storage, slices)

    def draw_slots(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray
    ) -> tuple[Tensor, dict[Any, Any], list[Tensor]]:
        return *self._draw(storage, batch_size, key), []  # not that of another base of a subclass

    def draw_batch(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray, marks: bool
    ) -> tuple[Any, dict[Any, Any]] | None:
        rows = storage.table.rows
        if not isinstance(rows, TorchRows) or rows.runs is None:
            return None
        self._last = slices = self._slices(storage, *self._shape(batch_size), key)
        info = self._info.of(storage, slices, rows.runs)
        slots = torch.from_numpy(slices.slots)
        info["index"] = self.index_of(slots, storage)
        return read_batch(storage, slots, (slices.begins, slices.length), info, marks)

    def _slices(self, storage: Storage, count: int, length: int, key: np.ndarray) -> DrawnSlices:
        """`count` slices of this length."""
        index = self._source.of(storage)
        trajectories = self._candidates(index, length)
        shares = randomness.generator_of(key).random(2 * count)
        chosen = trajectories.take((shares[:count] * len(trajectories)).astype(np.int64), 0)
        return self._within(index, chosen, shares[count:], length)

    def share(self, storage: Storage, batch_size: int) -> ShardContents:
        """The trajectories that slices of a batch of this size can be drawn from."""
        _, length = self._shape(batch_size)
        return ShardContents(len(storage), float(self._eligible(storage, length)), unit=length)

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        return [host_share("where trajectories start and stop", None)]

    def slice_lengths(self) -> np.ndarray | None:
        if self._last is None:
            return None
        lengths = self._last.row_counts()
        return np.full(self._last.slots.size // self._last.length, self._last.length) if lengths is None else lengths

    def _eligible(self, storage: Storage, length: int) -> int:
        """How many trajectories are long enough."""
        return len(self.trajectories(storage).stored(length if self.strict_length else 1)) if len(storage) else 0

    def _shape(self, batch_size: int) -> tuple[int, int]:
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

    def _check_span(self, length: int) -> None:
        if any(most is not True and most >= length for most in self.span):
            raise ValueError(f"span={self.span} must be less than the length of slices, {length}")

    def _candidates(self, index: Trajectories, length: int) -> np.ndarray:
        """(lane, first, last) of each trajectory that can be drawn; RuntimeError for none."""
        trajectories = index.stored(length if self.strict_length else 1)
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
        if self.span == (False, False):
            starts = last - first - (length - 2)  # how many whole slices there are
            if self.strict_length or starts.item(starts.argmin()) > 0:
                slots, begins = index.windows(first + (shares * starts).astype(np.int64), lane, length)
                return DrawnSlices(slots.reshape(-1), length, begins)
        left, right = (length - 1 if most is True else int(most) for most in self.span)
        room = np.minimum(np.maximum(last - first - (length - 1), 0) + right, last - first)
        start = first + (shares * (room + (left + 1))).astype(np.int64) - left
        begin = np.maximum(start, first)
        lengths = np.minimum(start + length, last + 1) - begin
        return DrawnSlices.at(index, begin, lane, length, lengths, self.pad_output)

    def index_of(self, slots: Tensor, storage: Storage) -> tuple[Tensor, ...]:
        coordinates: tuple[Tensor, ...] = (slots,) if storage.ndim == 1 else unravel(slots, storage)
        return coordinates

    # ------------------------------------------------------------------ checkpoints: the index is built anew

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            if "slices" in entries:  # parameters, in checkpoints of earlier versions
                entries.any("slices")
            rest = super().with_state(entries, options)

            def put() -> None:
                self._forget()
                rest()

            return put

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key not in ("_source", "_last")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_slices={self.num_slices}, slice_len={self.slice_len}, end_key={self.end_key}, "
            f"traj_key={self.traj_key}, truncated_key={self.truncated_key}, strict_length={self.strict_length})"
        )


def _pair(span: Any) -> tuple[bool | int, bool | int]:
    if isinstance(span, tuple | list) and len(span) != 2:
        raise ValueError(f"span must be a bool, an int, or a pair of these, got {span!r}")
    left, right = span if isinstance(span, tuple | list) else (span, span)
    for most in (left, right):
        if not isinstance(most, bool):
            whole("span", most, least=0)
    return left, right
