"""A replay buffer of tensordicts, which carry their index and priorities along."""

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from interop.buffers import collate
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.turn import turn
from interop.data.keys import as_path
from interop.data.pytrees import swapped
from interop.data.reductions import REDUCTIONS
from interop.sample_units import of_anchors
from interop.samplers.assembly import Told
from interop.writers import TensorDictRoundRobinWriter, Writer


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of tensordicts: samples have an "index" and what else the sampler says.

    Args:
        priority_key: the entry that `extend` and `update_tensordict_priority` take priorities from.
        **kwargs: as for `ReplayBuffer`; the writer is a `TensorDictRoundRobinWriter` by default.
    """

    marks_samples = True

    def __init__(self, *, priority_key: Any = "td_error", **kwargs: Any) -> None:
        self.priority_key = priority_key
        super().__init__(**kwargs)

    @staticmethod
    def _default_writer(compilable: bool) -> Writer:
        return TensorDictRoundRobinWriter(compilable)

    def _check_data(self, call: str, data: Any) -> None:
        if type(data) is not TensorDict and not isinstance(data, TensorDictBase):
            raise ValueError(
                f"{type(self).__name__}.{call}() takes a TensorDict, got {type(data).__name__}; "
                "ReplayBuffer takes other data"
            )

    def _to_store(self, data: Any, lift: bool = False) -> Any:
        return super()._to_store(data, lift=lift and self._transform.keeps)

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """Write a batch; where it has `priority_key`, with these priorities unless `update_priority=False`.

        ValueError for what is not a tensordict; RuntimeError where the priorities do not fit one for each item: nothing
        is written then.
        """
        self._check_data("extend", tensordicts)
        slots: Tensor = self._store(tensordicts, many=True, with_priorities=update_priority is not False)
        return slots

    def _priority_in(self, stored: Any, many: bool) -> Any:
        """The priorities under `priority_key` as the sampler takes them. RuntimeError for what it would refuse."""
        plain = type(stored) is TensorDict or isinstance(stored, TensorDictBase)
        priority = _entry(stored, self.priority_key) if plain else None
        if priority is None:
            return None
        if not self._sampler.takes_priorities:
            if many:
                self._sampler.update_priority(None, priority)  # warns, while nothing is written
            return None
        dims = stored.shape[: self._storage.ndim - (not many)]
        try:
            values = _numbers(priority)
            arranged = self._one_each(values, dims) if many else self._reduced(values, dims.numel())
            return self._sampler.checked(arranged)
        except NotImplementedError:  # an unknown reduction
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise RuntimeError(
                f"the priorities under {self.priority_key!r} cannot be used: {error}. "
                "Pass update_priority=False to extend() to write without them"
            ) from error

    def _one_each(self, priority: Tensor, dims: torch.Size) -> Tensor:
        """One priority an item, in the order in which items are stored."""
        if priority.numel() != dims.numel():
            raise RuntimeError(f"there are {priority.numel()} of shape {list(priority.shape)} for {dims.numel()} items")
        return swapped(priority.reshape(dims), self.dim_extend).reshape(-1)

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Draw a batch with its "index" and what else the sampler says; with `return_info` also that as a dict."""
        if include_info is not None:
            warnings.warn("include_info is deprecated: the info is in the sample", UserWarning, stacklevel=2)
        data, info = self._next_batch(self._size_of_batch(batch_size))
        if include_info is not False:
            self._include(data, info, apart=return_info)
        elif type(info) is Told and info.lies_in(data):
            stored = self._storage.layout.places  # type: ignore[attr-defined]  # it was built with
            for key in info:
                if as_path(key) not in stored:
                    del data[key]
        return (data, self._info(info)) if return_info else data

    def _revision(self, info: dict[Any, Any], key: np.ndarray) -> Callable[[Any], Any] | None:
        super()._revision(info, key)
        return partial(_with_flags, info=info) if len(self._transform) else None

    def _include(self, data: Any, info: dict[Any, Any], apart: bool) -> None:
        """Set what is in info in the data, with memory of its own if `apart`."""
        if not apart and type(info) is Told and self._collate_fn is collate.identity and info.lies_in(data):
            return
        include(data, info, apart)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the items of a sample the priorities under `priority_key`; several values an item are reduced to one.

        Without the entry they get the default priority. Nothing happens where the sampler has no priorities. Of rows that
        a sample unit put around drawn items, only these get a priority: the highest of their valid rows.
        """
        if not self._sampler.takes_priorities:
            return
        with turn(self):
            ndim = self._storage.ndim
            anchors = data.get("anchor_index", None) if self._unit is not None else None
            index = _entry(data, "index") if anchors is None else anchors
            if index is None:
                raise KeyError('the sample has no "index": pass one that came from sample(), with its index')
            shape, size = index.shape, data.batch_size
            if 0 in shape:
                return
            if ndim > 1:
                index = index.reshape(-1, ndim)
            elif anchors is not None:
                index = index.reshape(-1)
            elif len(shape) != 1 or shape[0] != (size[0] if size else 1):
                index = index.reshape(size[0] if size else 1, -1)[:, 0]
            rows, priority = index.shape[0], _entry(data, self.priority_key)
            values: Any = (
                self._sampler.default_priority if priority is None else self._reduced(_numbers(priority), rows)
            )
            if anchors is not None:
                valid = data.get("validity_mask", None)
                values = torch.as_tensor(values, device=index.device).expand(rows)
                index, values = of_anchors(index, None if valid is None else valid.reshape(-1), values)
            self._sampler.update_priority(index, values, storage=self._storage)

    def refuse_priorities(self, priority: Any, count: int) -> None:
        if priority is not None:
            self._sampler.checked(priority)
            self._sampler.checked(self._reduced(priority, count))

    def _reduced(self, priority: Tensor, rows: int) -> Tensor:
        """One value for each of the rows."""
        shape = priority.shape
        if len(shape) == 1 and shape[0] == rows > 0:
            return priority
        if priority.numel() == 0 or priority.numel() % rows:
            raise RuntimeError(f"there are {priority.numel()} of shape {list(priority.shape)} for {rows} items")
        values = priority.reshape(rows, -1)
        if values.shape[-1] == 1:
            return values[:, 0]
        reduction = getattr(self._sampler, "reduction", "max")
        if reduction not in REDUCTIONS:
            raise NotImplementedError(f"unknown reduction {reduction!r}: use one of {', '.join(REDUCTIONS)}")
        return REDUCTIONS[reduction](values)


def _with_flags(data: Any, info: dict[Any, Any]) -> Any:
    """The data with what the info says of stored entries, and of where slices end: transforms are to see that."""
    told = {key: value for key, value in info.items() if isinstance(value, Tensor) and key != "index"}
    if not isinstance(data, TensorDictBase):
        return data
    data = data.copy()
    for key, value in told.items():
        nested = isinstance(key, tuple) and len(key) > 1
        if (nested or key in data.keys()) and value.shape[:1] == data.batch_size[:1]:  # noqa: SIM118
            data.set(key, value if data.device is None else value.to(data.device))
    return data


def _put_as_is(data: Any, key: Any, value: Tensor | None, shape: torch.Size) -> bool:
    """Put a value that fits as it is into a plain tensordict of batch size `shape`, unless that very memory is there; False
    for any other, and then nothing is put. `set` takes ten times as long."""
    if type(value) is not Tensor:
        return False
    *steps, last = as_path(key)
    for step in steps:
        if type(data) is not TensorDict:
            return False
        data = data._tensordict.get(step)
    if type(data) is not TensorDict:
        return False
    held = data._tensordict.get(last)
    if held is value:
        return True
    if isinstance(held, Tensor) and held.data_ptr() == value.data_ptr() and held.shape == value.shape:
        return True  # read so
    fits = data.batch_size == shape == value.shape[: len(shape)] and data.device in (None, value.device)
    if not fits or data.is_locked or not (held is None or type(held) is Tensor) or type(last) is not str:
        return False
    data._tensordict[last] = value
    return True


def _as_entry(told: Any) -> Tensor | None:
    """What the info tells of items as one tensor on the host; None for what is none, or would have to be made."""
    if isinstance(told, tuple):
        return told[0].unsqueeze(-1) if len(told) == 1 and isinstance(told[0], Tensor) else None
    return told if isinstance(told, Tensor) else None


def _entry(data: TensorDictBase, key: Any) -> Any:
    """What stands under a key, or None: of plain tensordicts in a tenth of the time of `get`."""
    if type(data) is TensorDict and type(key) is str:
        found = data._tensordict.get(key)
        if found is None or type(found) is Tensor:
            return found
    return data.get(key, None)


def _numbers(priority: Any) -> Tensor:
    if type(priority) is Tensor and priority.dtype is torch.float32:
        return priority
    if not isinstance(priority, Tensor) or priority.dtype == torch.bool or priority.is_complex():
        found = priority.dtype if isinstance(priority, Tensor) else type(priority).__name__
        raise TypeError(f"priorities must be real numbers, got {found}")
    return priority


def include(data: Any, info: dict[Any, Any], apart: bool = True) -> None:
    """Set the info of a sample as entries of its tensordict, in place, with memory of their own if `apart`.

    Rows to which a transform gave more dims have the info of their items. RuntimeError for data that are no tensordict,
    and where a transform has taken rows away.
    """
    if not isinstance(data, TensorDictBase) and not hasattr(data, "_tensordict"):
        raise RuntimeError(f"Cannot include info in non-tensordict data: a transform made it a {type(data).__name__}")
    locked = data.is_locked
    if locked:
        data.unlock_()
    shape = data.batch_size
    plain = isinstance(data, TensorDictBase)  # others are tensorclasses, which have no entries but their fields
    known = info.keys() if plain else info.keys() & {field.name for field in dataclasses.fields(data)}
    for key, value in info.items():
        if key not in known:
            continue
        if not apart and _put_as_is(data, key, _as_entry(value), shape):
            continue
        if isinstance(value, tuple):
            value = torch.stack(value, -1)
        if isinstance(value, Tensor):
            value = value.to(data.device) if data.device is not None else value
            if len(shape) > 1 and value.shape[:1] != shape[:1] and value.shape[0] == shape.numel():
                # A transform gave rows more dims.
                value = value.reshape(*shape, *value.shape[1:])
            expands = value.ndim < len(shape) and value.shape == shape[: value.ndim]
            if expands:
                value = value.reshape(*value.shape, *(1 for _ in shape[value.ndim :])).expand(shape)
            value = value.clone() if expands or apart else value
        try:
            data.set(key, value)
        except RuntimeError as error:
            raise RuntimeError(
                f"Failed to set the metadata {key!r} in a sample of batch size {list(shape)}, got "
                f"{list(getattr(value, 'shape', []))}: a transform that takes rows away works on what sample() "
                "returns, or in a ReplayBuffer"
            ) from error
    if locked:
        data.lock_()
