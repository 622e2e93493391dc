"""Where the items of a batch are stored: tells transforms which of them follow each other in time."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from interop.data.trajectory_keys import MASKS
from interop.postprocs.batch_trajectories import StepMarks

if TYPE_CHECKING:  # storages of ensembles hold chains
    from interop.sample_units import SampleUnit
    from interop.samplers import Sampler
    from interop.storages import Storage
    from interop.transforms.chain import Compose


class HasTransforms(Protocol):
    """A buffer."""

    @property
    def storage(self) -> "Storage": ...
    @property
    def sampler(self) -> "Sampler": ...
    @property
    def transform(self) -> "Compose": ...
    @property
    def dim_extend(self) -> int: ...
    @property
    def sample_unit(self) -> "SampleUnit | None": ...


class Order:
    """The slots of a batch, and the cursor at the time it was read. Made under the lock.

    Args:
        storage, sampler, sample_unit: of the buffer.
        index: slots or a tuple of coordinates that the sampler drew; without `info`, an index of `rb[...]`.
        info: of the sampler about the batch.
        dim_extend: of the buffer; needed without `info`.
    """

    def __init__(
        self,
        storage: "Storage",
        index: Any,
        info: dict[Any, Any] | None,
        sampler: "Sampler",
        dim_extend: int = 0,
        sample_unit: "SampleUnit | None" = None,
    ) -> None:
        self._storage = storage
        self._index = index
        self._info = info
        self._dim_extend = dim_extend
        self._shape = torch.Size(storage.shape or (len(storage),))
        self._end = storage.ring.cursor
        self._sampler = sampler
        self._runs: tuple[Tensor, Tensor] | None = None  # of which run each item is, and which step of it
        if info is not None:
            count = (index[0] if isinstance(index, tuple) else index).numel()
            self._runs = _windows(info, count) if sample_unit is not None else _slices(sampler, info, count)
            if getattr(sample_unit, "dilation", 1) != 1:
                self._runs = None

    @classmethod
    def of(cls, buffer: HasTransforms, index: Any, info: dict[Any, Any] | None = None) -> "Order | None":
        """The order of a batch of a buffer; None if it has no transforms."""
        if not len(buffer.transform):
            return None
        return cls(buffer.storage, index, info, buffer.sampler, buffer.dim_extend, buffer.sample_unit)

    @property
    def traj_key(self) -> Any:
        """The key of trajectory ids, if the sampler uses one."""
        return getattr(self._sampler, "traj_key", None)

    @property
    def mask(self) -> Tensor | None:
        """False for the padding of slices, [items]; None without any."""
        mask = (self._info or {}).get(MASKS[0])
        return mask.reshape(-1) if isinstance(mask, Tensor) else None

    def follows(self, batch_size: torch.Size, time: int) -> Tensor | None:
        """Whether each item comes right after the previous one, bool [..., T - 1], time last.

        The items of a slice or window do, in which the rows of its trajectory may have been stored with those of others in
        between. Other items do if they were stored one right after the other. The batch may be reshaped. None if this is
        unknown: other items, or items with a time dim of their own.
        """
        shape = self._shape
        slots = self._slots(shape)
        dims = slots.ndim
        if batch_size[:dims] != slots.shape:
            if batch_size.numel() != slots.numel():
                return None
            slots = slots.reshape(batch_size)
            dims = len(batch_size)
        elif time >= dims:
            return None
        if self._runs is not None:
            number, step = (run_part.reshape(batch_size[:dims]).movedim(time, -1) for run_part in self._runs)
            return (number[..., 1:] == number[..., :-1]) & (step[..., 1:] - step[..., :-1] == 1)
        lanes = shape[1:].numel()
        slots = slots.movedim(time, -1)
        rows = slots // lanes
        lane = slots % lanes
        capacity = self._storage.max_size // lanes
        follows = ((rows[..., 1:] - rows[..., :-1]) % capacity == 1) & (lane[..., 1:] == lane[..., :-1])
        follows &= rows[..., 1:] != self._end
        return follows

    def _slots(self, shape: torch.Size) -> Tensor:
        """The slot of each item in a flat storage."""
        if self._info is not None and not isinstance(self._index, tuple):
            return self._index
        if self._info is not None:
            slots = self._index[0]
            for size, coordinate in zip(shape[1:], self._index[1:], strict=True):
                slots = slots * size + coordinate
            return slots
        grid = torch.arange(shape.numel(), device="cpu").reshape(shape)
        return grid.transpose(0, self._dim_extend)[self._index]


def _slices(sampler: "Sampler", info: dict[Any, Any], count: int) -> tuple[Tensor, Tensor] | None:
    """The slice of each item, int64 [count], and its step there, by the last draw or the info; None for no slices.

    Padding is no part of a slice.
    """
    padding = torch.zeros(count, dtype=torch.bool, device="cpu")
    mask = info.get(MASKS[0])
    if isinstance(mask, Tensor) and mask.numel() == count:
        padding = ~mask.reshape(-1).cpu()
    begins = torch.zeros(count, dtype=torch.bool, device="cpu")
    begins[:1] = True
    lengths = sampler.draws.slice_lengths()
    ends = info.get(getattr(sampler, "truncated_key", None))
    if lengths is not None and lengths.sum() == count:
        begins[torch.from_numpy(lengths.cumsum() - lengths)] = True
    elif isinstance(ends, Tensor) and ends.numel() == count:  # of a sampler of a user
        begins[1:] = ends.reshape(-1)[:-1].cpu() | (padding[:-1] & ~padding[1:])
    else:
        return None
    number = begins.cumsum(0)
    place = torch.arange(count, device="cpu")
    step = place - place.where(begins, 0).cummax(0).values
    return number.where(~padding, -1 - place), step


def _windows(info: dict[Any, Any], count: int) -> tuple[Tensor, Tensor] | None:
    """The window of each item, int64 [count], and its step there; None without windows. Padding is no part of one."""
    entries = [info.get(key) for key in ("sequence_id", "step_in_sequence", "validity_mask")]
    flat = (entry.reshape(-1) if isinstance(entry, Tensor) and entry.numel() == count else None for entry in entries)
    number, step, valid = flat
    if number is None or step is None or valid is None:
        return None
    return number.where(valid, -1 - torch.arange(count, device="cpu")), step


_current: ContextVar[Order | None] = ContextVar("order", default=None)


@contextmanager
def in_order(order: Order | None) -> Iterator[None]:
    """Set the order for the transforms that run inside."""
    token = _current.set(order)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Order | None:
    """The order of the batch that a buffer is reading; None elsewhere."""
    return _current.get()


def follows_in_buffer(batch_size: torch.Size, time: int) -> Tensor | None:
    """`Order.follows` of the batch that a buffer is reading; None elsewhere."""
    order = current()
    return None if order is None else order.follows(batch_size, time)


def breaks_in_buffer(marks: StepMarks) -> np.ndarray | None:
    """Which steps of the batch that a buffer reads do not follow the one before them, bool [lanes, T]; None elsewhere."""
    follows = follows_in_buffer(marks.batch, marks.time)
    if follows is None:
        return None
    breaks = np.zeros((marks.lanes, marks.batch[marks.time]), np.bool_)
    breaks[:, 1:] = ~follows.reshape(marks.lanes, -1).numpy()
    return breaks


def refuse_several(name: str, batch_size: torch.Size, time: int) -> None:
    """ValueError if steps of a buffer along `time` do not follow each other."""
    follows = follows_in_buffer(batch_size, time)
    if follows is not None and not bool(follows.all()):
        raise ValueError(
            f"{name}: the steps along dim {time} of a batch size of {list(batch_size)} are not one sequence: give slices a "
            "dim of their own before, such as by lambda data: data.reshape(-1, slice_len)"
        )
