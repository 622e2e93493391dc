"""A replay buffer of tensordicts, which carry their index and priorities along."""

import warnings
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from interop.buffers.replay_buffer import ReplayBuffer
from interop.codec import shallow
from interop.pytrees import swapped
from interop.samplers import PrioritizedSampler
from interop.writers import TensorDictRoundRobinWriter, Writer


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of tensordicts: samples have an "index" and what else the sampler says.

    Args:
        priority_key: the entry that `extend` and `update_tensordict_priority` take priorities from.
        **kwargs: as for `ReplayBuffer`; the writer is a `TensorDictRoundRobinWriter` by default.
    """

    def __init__(self, *, priority_key: Any = "td_error", **kwargs: Any) -> None:
        self.priority_key = priority_key
        super().__init__(**kwargs)

    @staticmethod
    def _default_writer() -> Writer:
        return TensorDictRoundRobinWriter()

    def _to_store(self, data: Any, lift: bool = False) -> Any:
        if isinstance(data, TensorDictBase) and not len(self._transform):
            return shallow(data)  # the writer adds "index" to this one
        return super()._to_store(data, lift=False)

    def _add(self, data: Any) -> Any:
        stored = self._to_store(data)
        if stored is None and len(self._transform):
            return torch.zeros(0, self._storage.ndim, dtype=torch.int64)
        priority = None
        if isinstance(self._sampler, PrioritizedSampler) and isinstance(stored, TensorDictBase):
            priority = stored.get(self.priority_key, None)
        if priority is not None:
            lanes = stored.shape[: self._storage.ndim - 1].numel()
            priority = self._checked(self._reduced(priority.reshape(lanes, -1)))
        index = self._writer.add(stored)
        self._tell(index)
        self._sampler.add(index)
        if priority is not None:
            self._sampler.update_priority(index, priority, storage=self._storage)
        return index

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """Write a batch; where it has `priority_key`, with these priorities unless `update_priority=False`.

        ValueError for what is not a tensordict; RuntimeError where the priorities do not fit one for each item: nothing
        is written then.
        """
        if not isinstance(tensordicts, TensorDictBase):
            raise ValueError(
                f"{type(self).__name__}.extend() takes a TensorDict, got {type(tensordicts).__name__}; "
                "ReplayBuffer takes other data"
            )
        with self._locked():
            stored = self._to_store(tensordicts)
            if stored is None:
                return torch.zeros(0, self._storage.ndim, dtype=torch.int64)
            priority = self._priorities_of(stored) if update_priority is not False else None
            index = self._write(stored)
            if priority is not None:
                self._sampler.update_priority(index, priority, storage=self._storage)
            return index

    def _priorities_of(self, data: TensorDictBase) -> Tensor | None:
        """One priority an item, in the order in which items are stored; None where data has none."""
        priority = data.get(self.priority_key, None)
        if priority is None or not isinstance(self._sampler, PrioritizedSampler):
            return None if priority is None else priority.reshape(-1)
        dims = data.shape[: self._storage.ndim]
        if priority.numel() != dims.numel():
            found = f"it has {priority.numel()} values of shape {list(priority.shape)} for {dims.numel()} items"
            raise RuntimeError(_no_priority(self.priority_key, found))
        return self._checked(swapped(priority.reshape(dims), self.dim_extend).reshape(-1))

    def _checked(self, priority: Tensor) -> Tensor:
        """The priorities; RuntimeError for values that would be refused after the rows are written."""
        if priority.is_complex() or not bool(((priority >= 0) & torch.isfinite(priority)).all()):
            raise RuntimeError(_no_priority(self.priority_key, "it has values that are negative or not finite"))
        return priority

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Draw a batch with its "index" and what else the sampler says; with `return_info` also that as a dict."""
        if include_info is not None:
            warnings.warn("include_info is deprecated: the info is in the sample", UserWarning, stacklevel=2)
        data, info = super().sample(batch_size, return_info=True)
        if include_info is not False:
            self._include(data, info)
        return (data, info) if return_info else data

    def _include(self, data: Any, info: dict[Any, Any]) -> None:
        if not isinstance(data, TensorDictBase) and not hasattr(data, "_tensordict"):
            raise RuntimeError(
                f"Cannot include info in non-tensordict data: a transform made it a {type(data).__name__}"
            )
        locked = data.is_locked
        if locked:
            data.unlock_()
        shape = data.batch_size
        for key, value in info.items():
            if isinstance(value, tuple):
                value = torch.stack(value, -1)
            if isinstance(value, Tensor):
                value = value.to(data.device) if data.device is not None else value
                if value.ndim < len(shape) and value.shape == shape[: value.ndim]:
                    value = value.reshape(*value.shape, *(1 for _ in shape[value.ndim :])).expand(shape)
            try:
                data.set(key, value)
            except RuntimeError as error:
                raise RuntimeError(
                    f"Failed to set the metadata {key!r} in a sample of batch size {list(shape)}"
                ) from error
        if locked:
            data.lock_()

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the items of a sample the priorities under `priority_key`; several values an item are reduced to one.

        Without the entry they get the default priority. Nothing happens where the sampler has no priorities.
        """
        if not isinstance(self._sampler, PrioritizedSampler):
            return
        with self._locked():
            index = data.get("index", None)
            if index is None:
                raise KeyError('the sample has no "index": pass one that came from sample(), with its index')
            ndim = self._storage.ndim
            if ndim > 1:
                index = index.reshape(-1, ndim)
                rows = index.shape[0]
            else:
                rows = data.shape[0] if data.ndim else 1
                index = index.reshape(rows, -1)[:, 0]
            priority = data.get(self.priority_key, None)
            if priority is None:
                values: Any = self._sampler.default_priority
            else:
                values = self._reduced(priority.reshape(rows, -1))
            self._sampler.update_priority(index, values, storage=self._storage)

    def _reduced(self, priority: Tensor) -> Tensor:
        """One value a row. [rows, k] to [rows]."""
        if priority.shape[-1] == 1:
            return priority[:, 0]
        reduction = getattr(self._sampler, "reduction", "max")
        if reduction == "max":
            return priority.amax(-1)
        if reduction == "min":
            return priority.amin(-1)
        if reduction == "mean":
            return priority.mean(-1)
        if reduction == "median":
            return priority.median(-1).values
        if reduction == "sum":
            return priority.sum(-1)
        raise NotImplementedError(f"unknown reduction {reduction!r}: use 'max', 'min', 'mean', 'median' or 'sum'")


def _no_priority(key: Any, reason: Any) -> str:
    return f"the priorities under {key!r} cannot be used: {reason}. Pass update_priority=False to write without them"
