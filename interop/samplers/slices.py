"""Runs of consecutive items of one trajectory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import Fields
from fbuf.memory_plan import Share as MemoryShare
from interop.checkpoint.state import Entries, LoadOptions, a_key, key_of, some_keys
from interop.data import randomness
from interop.data.numbers import whole
from interop.host.rows import TorchRows
from interop.host.trajectories import Trajectories
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.drawing import DrawingSampler, unravel
from interop.samplers.sampler import host_share
from interop.samplers.shares import Share
from interop.samplers.slice_info import SliceInfo, Slices, slices_at
from interop.samplers.stored_trajectories import GivenTrajectories, StoredTrajectories
from interop.storages import LazyStackStorage, ListStorage, Storage, TensorStorage
from interop.storages.batches import read_batch
from interop.writers import Writer


class SliceSampler(DrawingSampler):
    """Draws slices of trajectories: each trajectory that is long enough equally often, and each start in it.

    A batch is the slices one after the other, [num_slices * slice_len]. None crosses the end of a trajectory or the place
    where a full storage is written next, nor an edge of rows that `storage.set` has written elsewhere in this process; one
    may go from the last row on to the first. Draws cost O(batch), whatever is stored: what was written since the last one
    is looked at, once. Needs a storage that is read as a tensordict, and a writer that keeps the order of items.

    Args:
        num_slices, slice_len: one of them; the other follows from the batch size, which must be a multiple.
        end_key: bool entry that is True in the last item of a trajectory.
        end_keys: several of them, taken together.
        traj_key: integer entry that is the same for all items of a trajectory; counts before `end_key`. In a storage of
            one item dim the items of several trajectories may be interleaved, one of each at a time; the first draw after a
            write then takes O(stored items), which `ndim=2` avoids.
        ends, trajectories: the same as tensors for a storage that is full and never written again, of one item dim; they
            need `cache_values`.
        cache_values: accepted; what is known of the trajectories is always kept, and brought up to date.
        truncated_key: the entry of the batch for the ends of slices, with "done" and "terminated" beside it; None for none.
        strict_length: False lets shorter trajectories come out whole, in a batch that is smaller.
        pad_output: fill these up by repeating their last item; ("collector", "mask") is False there.
        compile: accepted; there is nothing to compile.
        span: let slices begin before (left) or end behind (right) their trajectory, which cuts them: True, an int for at
            most so many items, or a pair of these.
        use_gpu: accepted; boundaries are kept on the host.

    An edit of a stored marker counts if it is made by `set_`, `update_` or `rb[...] =`, not through a view. Without a key
    `("collector", "traj_ids")`, "episode" and ("next", "done") are looked for.
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: Any = False,
        use_gpu: Any = False,
    ) -> None:
        if (num_slices is None) == (slice_len is None):
            raise TypeError(f"give one of num_slices and slice_len, got {num_slices} and {slice_len}")
        if end_key is not None and end_keys is not None:
            raise RuntimeError(f"give one of end_key and end_keys, got {end_key!r} and {end_keys!r}")
        if pad_output and strict_length:
            raise ValueError(
                "pad_output=True needs strict_length=False: without shorter trajectories nothing is padded"
            )
        if not isinstance(compile, bool | dict):
            raise TypeError(f"compile must be a bool or a dict, got {type(compile).__name__}")
        self.num_slices = None if num_slices is None else whole("num_slices", num_slices)
        self.slice_len = None if slice_len is None else whole("slice_len", slice_len)
        self.end_key, self.traj_key = _a_key("end_key", end_key), _a_key("traj_key", traj_key)
        self.end_keys = None if end_keys is None else [_a_key("end_keys", each) for each in end_keys]
        self.cache_values = bool(cache_values)
        self.truncated_key = _a_key("truncated_key", truncated_key)
        self.strict_length = bool(strict_length)
        self.pad_output = bool(pad_output)
        self.compile, self.use_gpu = compile, use_gpu
        self.span = _pair(span)
        for each in self.span:
            if self.slice_len is not None and each is not True and each >= self.slice_len:
                raise ValueError(f"span={span!r} must be less than slice_len={self.slice_len}")
        self._given: GivenTrajectories | None = None
        if ends is not None or trajectories is not None:
            self._given = GivenTrajectories(ends, trajectories)
            if not cache_values:
                raise RuntimeError("ends and trajectories are for static data: they need cache_values=True")
            if any(each is not None for each in (end_key, end_keys, traj_key)):
                raise RuntimeError(
                    "ends and trajectories say where trajectories end: give neither end_key nor traj_key"
                )
        self._forget()

    def _forget(self) -> None:
        """Forget what is known of a storage."""
        keys = self.end_keys if self.end_key is None else [self.end_key]
        if self._given is not None:
            self._given.forget()
        self._source = self._given or StoredTrajectories(BoundaryKeys(self.traj_key, keys))
        self._info = SliceInfo(self.truncated_key)
        self._lengths: np.ndarray | None = None

    def _empty(self) -> None:
        super()._empty()
        self._forget()

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        """RuntimeError for a list that is not read as a tensordict, TypeError for a writer that keeps no order."""
        if self._given is not None:
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
        return self._given is not None

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
        slices, weights = self._slices(storage, batch_size, key)
        return torch.from_numpy(slices.slots), {**self._info.of(storage, slices), **weights}

    def draw_slots(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray
    ) -> tuple[Tensor, dict[Any, Any], list[jax.Array]]:
        return *self._draw(storage, batch_size, key), []  # not that of another base of a subclass

    def draw_batch(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray, marks: bool
    ) -> tuple[Any, dict[Any, Any]] | None:
        rows = storage.rows
        if not isinstance(rows, TorchRows) or rows.runs is None:
            return None
        slices, weights = self._slices(storage, batch_size, key)
        slots = torch.from_numpy(slices.slots)
        info = self._info.of(storage, slices, rows.runs)
        info.update(weights)
        info["index"] = self.index_of(slots, storage)
        return read_batch(storage, slots, (slices.begins, slices.length), info, marks)

    def _slices(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Slices, dict[Any, Any]]:
        """Slices, and entries of the info that do not follow from them."""
        slices, weights = self._drawn(storage, *self._shape(batch_size), key)
        self._lengths = slices.row_counts()
        return slices, weights

    def _drawn(self, storage: Storage, count: int, length: int, key: np.ndarray) -> tuple[Slices, dict[Any, Any]]:
        index = self.trajectories(storage)
        found = self._candidates(index, length)
        shares = randomness.generator_of(key).random(2 * count)
        chosen = found.take((shares[:count] * len(found)).astype(np.int64), 0)
        return self._within(index, chosen, shares[count:], length), {}

    def share(self, storage: Storage, batch_size: int) -> Share:
        """The trajectories that slices of a batch of this size can be drawn from."""
        _, length = self._shape(batch_size)
        return Share(len(storage), float(self._eligible(storage, length)), unit=length)

    def memory_shares(self, storage: Storage, capacity: int) -> list[MemoryShare]:
        return [host_share("where trajectories start and stop", None)]

    @property
    def lengths_drawn(self) -> np.ndarray | None:
        """How many items each slice of the last draw has in the batch, padding included; None where all have as many."""
        return self._lengths

    def _eligible(self, storage: Storage, length: int) -> int:
        """How many trajectories are long enough."""
        return len(self.trajectories(storage).stored(self._least(length))) if len(storage) else 0

    def _shape(self, batch_size: int) -> tuple[int, int]:
        """How many slices of which length. RuntimeError where the batch cannot be made of them."""
        if self.num_slices is not None:
            if batch_size % self.num_slices:
                raise RuntimeError(f"batch_size={batch_size} is not a multiple of num_slices={self.num_slices}")
            count, length = self.num_slices, batch_size // self.num_slices
        else:
            assert self.slice_len is not None
            if batch_size % self.slice_len:
                raise RuntimeError(f"batch_size={batch_size} is not a multiple of slice_len={self.slice_len}")
            count, length = batch_size // self.slice_len, self.slice_len
        for each in self.span:
            if each is not True and each >= length:
                raise ValueError(f"span={self.span} must be less than the slices' length, {length}")
        return count, length

    def _least(self, length: int) -> int:
        """Stored items that a trajectory must have."""
        return length if self.strict_length else 1

    def _candidates(self, index: Trajectories, length: int) -> np.ndarray:
        """(lane, first, last) of each trajectory that can be drawn; RuntimeError for none."""
        found = index.stored(self._least(length))
        if not len(found):
            known = index.lengths()
            raise RuntimeError(
                f"no stored trajectory is long enough: their lengths are {known.min()} to {known.max()}, slices need "
                f"{length}. Use shorter slices, or strict_length=False"
            )
        return found

    def _within(self, index: Trajectories, chosen: np.ndarray, shares: np.ndarray, length: int) -> Slices:
        """Slices within trajectories, one in each; `shares` of [0, 1) say where."""
        lane, first, last = chosen[:, 0], chosen[:, 1], chosen[:, 2]
        if index.lanes > 1:
            first = np.maximum(first, index.oldest)
        if self.span == (False, False):
            starts = last - first - (length - 2)  # where slices can begin that are whole
            if self.strict_length or starts.item(starts.argmin()) > 0:
                slots, begins = index.windows(first + (shares * starts).astype(np.int64), lane, length)
                return Slices(slots.reshape(-1), length, begins)
        left, right = (length - 1 if each is True else int(each) for each in self.span)
        room = np.minimum(np.maximum(last - first - (length - 1), 0) + right, last - first)
        start = first + (shares * (room + (left + 1))).astype(np.int64) - left
        begin = np.maximum(start, first)
        lengths = np.minimum(start + length, last + 1) - begin
        return slices_at(index, begin, lane, length, lengths, self.pad_output)

    def index_of(self, slots: Tensor, storage: Storage) -> tuple[Tensor, ...]:
        coordinates: tuple[Tensor, ...] = (slots,) if storage.ndim == 1 else unravel(slots, storage)
        return coordinates

    # ------------------------------------------------------------------ checkpoints: what is known is read anew

    def saved_state(self) -> dict[str, Any]:
        choices = {name: key_of(getattr(self, name)) for name in _CHOICES}
        return {**super().saved_state(), "slices": {**choices, "static": self.is_static}}

    def state_dict(self) -> dict[str, Any]:
        """The state of the base class: that of slices are parameters."""
        return {name: value for name, value in super().state_dict().items() if name != "slices"}

    def with_state(self, entries: Entries, options: LoadOptions) -> Callable[[], None]:
        found = _choices(entries.fields("slices")) if "slices" in entries else {}
        if found.pop("static", self.is_static) != self.is_static:
            entries.refuse("only one of the two was given the ends of trajectories")
        for name, value in found.items():
            entries.parameter(name, value, getattr(self, name))
        rest = super().with_state(entries, options)

        def put() -> None:
            self.__dict__.update(found)
            self._forget()
            rest()

        return put

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key not in _NOT_KEPT}

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
    for each in (left, right):
        if not isinstance(each, bool):
            whole("span", each, least=0)
    return left, right


_NOT_KEPT = ("_source", "_lengths")
_KEYS = ("end_key", "traj_key", "truncated_key")
_CHOICES = ("num_slices", "slice_len", *_KEYS, "end_keys", "strict_length", "pad_output", "span")


def _choices(fields: Fields) -> dict[str, Any]:
    """What a sampler of slices was made with. CheckpointCorrupt for what the constructor would refuse."""
    found: dict[str, Any] = {name: a_key(fields, name) for name in _KEYS}
    found["end_keys"] = some_keys(fields, "end_keys")
    found |= {name: fields.flag(name) for name in ("strict_length", "pad_output", "static")}
    span = fields.items("span", 2)
    for name in ("num_slices", "slice_len"):
        found[name] = None if fields.any(name) is None else fields.whole(name, least=1)
    given = {name: found[name] for name in _CHOICES if name != "span"}
    try:
        found["span"] = SliceSampler(**given, span=tuple(span)).span
    except (TypeError, ValueError, RuntimeError) as error:
        raise fields.wrong("span", f"what goes together ({error})", span) from error
    return found


def _a_key(name: str, key: Any) -> Any:
    """TypeError for what is no key: a name, or a tuple of names."""
    names = key if isinstance(key, tuple) else (key,)
    if key is None or (names and all(isinstance(each, str) for each in names)):
        return key
    raise TypeError(f"{name} must be a name or a tuple of names, got {key!r}")
