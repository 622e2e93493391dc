"""Where the items of a batch are stored: tells transforms which of them follow each other in time."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:  # storages of ensembles hold chains
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


class Order:
    """The slots of a batch, and the cursor at the time it was read. Made under the lock.

    Args:
        storage, sampler: of the buffer.
        index: slots or a tuple of coordinates that the sampler drew; without `info`, an index of `rb[...]`.
        info: of the sampler about the batch.
        dim_extend: of the buffer; needed without `info`.
    """

    def __init__(
        self, storage: "Storage", index: Any, info: dict[Any, Any] | None, sampler: "Sampler", dim_extend: int = 0
    ) -> None:
        self._storage, self._index, self._info, self._dim_extend = storage, index, info, dim_extend
        self._shape, self._end = torch.Size(storage.shape or (len(storage),)), storage.ring.cursor
        self._sampler = sampler

    @classmethod
    def of(cls, buffer: HasTransforms, index: Any, info: dict[Any, Any] | None = None) -> "Order | None":
        """The order of a batch of a buffer; None if it has no transforms."""
        if not len(buffer.transform):
            return None
        return cls(buffer.storage, index, info, buffer.sampler, buffer.dim_extend)

    @property
    def traj_key(self) -> Any:
        """The key of trajectory ids, if the sampler uses one."""
        return getattr(self._sampler, "traj_key", None)

    def follows(self, batch_size: torch.Size, time: int) -> Tensor | None:
        """Whether each item was stored right after the previous one, bool [..., T - 1], time last.

        The batch may be reshaped. None if this is unknown: other items, or items with a time dim of their own.
        """
        shape = self._shape
        slots, info = self._slots(shape), self._info or {}
        ends = info.get(getattr(self._sampler, "truncated_key", None))
        if batch_size[: slots.ndim] != slots.shape:
            if batch_size.numel() != slots.numel():
                return None
            slots = slots.reshape(batch_size)
        elif time >= slots.ndim:
            return None
        lanes = shape[1:].numel()
        slots = slots.movedim(time, -1)
        rows, lane = slots // lanes, slots % lanes
        capacity = self._storage.max_size // lanes
        follows = ((rows[..., 1:] - rows[..., :-1]) % capacity == 1) & (lane[..., 1:] == lane[..., :-1])
        follows &= rows[..., 1:] != self._end
        if ends is not None and ends.numel() == slots.numel():
            follows &= ~ends.reshape(batch_size[: slots.ndim]).movedim(time, -1)[..., :-1]
        return follows

    def _slots(self, shape: torch.Size) -> Tensor:
        """The slot of each item in a flat storage."""
        if self._info is not None and not isinstance(self._index, tuple):
            return self._index
        if self._info is not None:
            found = self._index[0]
            for size, each in zip(shape[1:], self._index[1:], strict=True):
                found = found * size + each
            return found
        grid = torch.arange(shape.numel(), device="cpu").reshape(shape)
        return grid.transpose(0, self._dim_extend)[self._index]


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


def refuse_several(name: str, batch_size: torch.Size, time: int) -> None:
    """ValueError if steps of a buffer along `time` do not follow each other."""
    follows = follows_in_buffer(batch_size, time)
    if follows is not None and not bool(follows.all()):
        raise ValueError(
            f"{name}: the steps along dim {time} of a batch size of {list(batch_size)} are not one sequence: give slices a "
            "dim of their own before, such as by lambda data: data.reshape(-1, slice_len)"
        )
