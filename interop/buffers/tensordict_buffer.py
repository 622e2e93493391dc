"""A replay buffer of tensordicts: rows come in as one, with their index and priorities as entries."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from interop.buffers import collate
from interop.buffers.rate_limiter import RateLimiter
from interop.buffers.replay_buffer import ReplayBuffer
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data.by_item import column_of, rows_of, set_expanded
from interop.data.keys import as_path, checked_key, entry_at, no_priorities
from interop.data.masked_rows import Mask
from interop.data.pytrees import swapped
from interop.data.reductions import real_numbers, reduced
from interop.data.tensordicts import entries_of
from interop.sample_units import SampleUnit, of_anchors
from interop.samplers import Sampler
from interop.shared.storage_lock import locked
from interop.storages import Storage
from interop.storages.batches import BatchInfo, info_on
from interop.transforms import Transform
from interop.writers import TensorDictRoundRobinWriter, Writer


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of tensordicts: samples have an "index" and the other entries of the info.

    Args:
        priority_key: the entry that `add`, `extend` and `update_tensordict_priority` take priorities from.
        writer: names the slots of new items; a `TensorDictRoundRobinWriter` by default.

    The other arguments are those of `ReplayBuffer`.
    """

    _marks_samples = True

    def __init__(
        self,
        *,
        priority_key: NestedKey | None = "td_error",
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Transform | Callable[[Any], Any] | None = None,
        transform_factory: Callable[[], Transform | Callable[[Any], Any]] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: StorageCheckpointerBase | type[StorageCheckpointerBase] | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        sample_unit: SampleUnit | None = None,
        consume_after_n_samples: int | None = None,
        limiter: RateLimiter | None = None,
        service_backend: Literal["direct", "ray"] | None = None,
        service_backend_options: Mapping[str, Any] | None = None,
        transport: Literal["auto", "direct", "ray"] = "auto",
        transport_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.priority_key = priority_key
        super().__init__(
            storage=storage,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            transform_factory=transform_factory,
            batch_size=batch_size,
            dim_extend=dim_extend,
            checkpointer=checkpointer,
            generator=generator,
            shared=shared,
            compilable=compilable,
            delayed_init=delayed_init,
            sample_unit=sample_unit,
            consume_after_n_samples=consume_after_n_samples,
            limiter=limiter,
            service_backend=service_backend,
            service_backend_options=service_backend_options,
            transport=transport,
            transport_options=transport_options,
        )

    @property
    def priority_key(self) -> NestedKey:
        """The entry with priorities. Can be set; TypeError for other than a name or a tuple of names."""
        return self._priority_key

    @priority_key.setter
    def priority_key(self, value: NestedKey) -> None:
        if value is None:
            raise TypeError("priority_key must be a name or a tuple of names, got None")
        self._priority_key = checked_key("priority_key", value)

    @staticmethod
    def _default_writer(compilable: bool) -> Writer:
        return TensorDictRoundRobinWriter(compilable)

    def _over(self, storage: Storage, sampler: Callable[[], Sampler] | None) -> ReplayBuffer:
        return TensorDictReplayBuffer(storage=storage, sampler=sampler, **self._to_read())

    def _to_read(self) -> dict[str, Any]:
        return {**super()._to_read(), "priority_key": self.priority_key}

    def _check_data(self, call: str, data: Any) -> None:
        if type(data) is not TensorDict and not isinstance(data, TensorDictBase):
            raise ValueError(
                f"{type(self).__name__}.{call}() takes a TensorDict, got {type(data).__name__}; "
                "TensorDict(data, batch_size=[rows]) makes one of a dict, and ReplayBuffer takes other data"
            )

    def extend(
        self, tensordicts: TensorDictBase, *, update_priority: bool | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Write a batch, with the priorities under `priority_key` if it has that entry, unless `update_priority=False`.

        ValueError for data other than a tensordict. RuntimeError for priorities that are not one for each item, and for
        `update_priority=True` with `sync=False`. Nothing is written then. Priorities on the accelerator of the sampler are
        checked there: if they are not finite and at least 0 a later call raises a ValueError, and the rows have the default
        priority. With `mask` only the rows where it is True are written, with their priorities: see `ReplayBuffer.extend`.
        """
        self._check_data("extend", tensordicts)
        if update_priority and self._workers_only_write:
            raise RuntimeError(
                "update_priority=True needs sync=True: with sync=False new rows get the highest priority. Call "
                "update_priority() or update_tensordict_priority() in the process that samples"
            )
        return self._extend_masked(tensordicts, mask, update_priority is not False)

    def _priority_in(self, stored: Any, many: bool) -> Any:
        """The priorities under `priority_key` as the sampler takes them. RuntimeError for those that it would refuse."""
        priority = None if self._workers_only_write else _entry(stored, self.priority_key)
        if priority is None:
            return None
        if not self._sampler.hooks.takes_priorities:
            if many:
                self._sampler.update_priority(None, priority)  # warns, while nothing is written
            return None
        dims = stored.shape[: self._storage.ndim - (not many)]
        try:
            values = real_numbers(priority)
            if many and values.numel() != dims.numel():
                raise RuntimeError(f"there are {values.numel()} of shape {list(values.shape)} for {dims.numel()} items")
            if many:  # in the order in which items are stored
                values = swapped(values.reshape(dims), self.dim_extend).reshape(-1)
            else:
                values = self._reduced(values, dims.numel())
            if self._storage.ndim == 1 and self._sampler.item_values.checks_later(values):
                return values
            return self._sampler.item_values.checked(values)
        except NotImplementedError:  # for an unknown reduction
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise RuntimeError(
                f"the priorities under {self.priority_key!r} cannot be used: {error}. "
                "Pass update_priority=False to extend() to write without them"
            ) from error

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Draw a batch with its "index" and the rest of the info; with `return_info` also the info as a dict."""
        if include_info is not None:
            warnings.warn("include_info is deprecated: the info is in the sample", UserWarning, stacklevel=2)
        data, info = self._next_batch(self._size_of_batch(batch_size))
        included = type(info) is BatchInfo and info.is_in(data)  # the batch was built with the info
        if include_info is False and included:
            layout = self._storage.table.layout  # type: ignore[attr-defined]  # such batches come from tensors
            for key in info:
                if as_path(key) not in layout.places:
                    del data[key]
        elif include_info is not False and (return_info or not included or self._collate_fn is not collate.identity):
            include(data, info, apart=return_info)
        return (data, self._info(info)) if return_info else data

    def _revision(self, info: dict[Any, Any], key: np.ndarray) -> Callable[[Any], Any] | None:
        super()._revision(info, key)
        return partial(_with_flags, info=info) if self._transform.count else None

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of the items of a sample from `priority_key`; several values of an item are reduced to one.

        No effect if the sampler has no priorities. With a sample unit the drawn item gets the highest priority of its valid
        rows. KeyError for a sample without its index or without an entry at `priority_key`, before anything changes.
        """
        if not self._sampler.hooks.takes_priorities:
            return
        with locked(self):
            if self._deferring is not None:
                self._deferring.raise_deferred()
            ndim = self._storage.ndim
            anchors = column_of(data, "anchor_index") if self._unit is not None else None
            index = column_of(data, "index") if anchors is None else anchors
            if index is None:
                raise KeyError('the sample has no "index": pass one that came from sample(), with its index')
            if len(index) == 0 if isinstance(index, list) else 0 in index.shape:
                return
            priority = column_of(data, self.priority_key)
            if priority is None:
                raise no_priorities(self.priority_key, data)
            index = rows_of(index, ndim)
            items = len(index) if isinstance(data, LazyStackedTensorDict) else data.batch_size[0] if data.ndim else 1
            if ndim > 1:
                index = index.reshape(-1, ndim)
            elif anchors is not None:
                index = index.reshape(-1)
            elif index.shape != (items,):  # of slices, and of trajectories as items
                index = index.reshape(items, -1)[:, 0]
            rows = index.shape[0]
            values = self._reduced(priority, rows)
            if anchors is not None:
                valid = data.get("validity_mask", None)
                values = torch.as_tensor(values, device=index.device).expand(rows)
                index, values = of_anchors(index, None if valid is None else valid.reshape(-1), values)
            self._updates()(index, values, storage=self._storage)

    def _reduced(self, priority: Tensor | list[Tensor], rows: int) -> Tensor:
        """One priority for each row. A list has the values of each row."""
        return reduced(priority, rows, self._sampler)


def _with_flags(data: Any, info: dict[Any, Any]) -> Any:
    """The data with the entries of the info that transforms need: stored keys, and the flags where slices end."""
    if not isinstance(data, TensorDictBase):
        return data
    data = data.copy()
    for key, value in info.items():
        if not isinstance(value, Tensor) or key == "index" or value.shape[:1] != data.batch_size[:1]:
            continue
        nested = isinstance(key, tuple) and len(key) > 1
        if nested or key in data.keys():  # noqa: SIM118
            data.set(key, value if data.device is None else value.to(data.device))
    return data


def _entry(data: Any, key: NestedKey) -> Any:
    """The entry under a key, or None. For plain tensordicts in a tenth of the time of `get`."""
    entries = entries_of(data) if type(key) is str else None
    if entries is not None:
        entry = entries.get(key)
        if entry is None or type(entry) is Tensor:
            return entry
    return entry_at(data, key) if isinstance(data, TensorDictBase) else None


def include(data: Any, info: dict[Any, Any], apart: bool = True) -> None:
    """Set the info of a sample as entries of its tensordict, in place; with `apart` as copies.

    If items have dims of their own, or a transform added batch dims, the info is expanded. The items of a lazy stack may
    have unlike dims: each gets its own row of the info. In tensorclasses only fields are set. RuntimeError for data that is
    no tensordict, and if a transform has removed rows.
    """
    fields = is_tensorclass(data)
    if not isinstance(data, TensorDictBase) and not fields:
        raise RuntimeError(f"Cannot include info in non-tensordict data: a transform made it a {type(data).__name__}")
    entries = info.keys() & {field.name for field in dataclasses.fields(data)} if fields else info.keys()
    locked = data.is_locked
    if locked:
        data.unlock_()
    if data.device is not None:
        info = info_on(info, data.device)
    for key, value in info.items():
        if key not in entries:
            continue
        if isinstance(value, tuple):
            value = torch.stack(value, -1)
        try:
            if isinstance(data, LazyStackedTensorDict) and _is_row_each(value, len(data.tensordicts)):
                for item, row in zip(data.tensordicts, value.unbind(0), strict=True):
                    _set(item, key, row, apart)
            else:
                _set(data, key, value, apart)
        except RuntimeError as error:
            raise RuntimeError(
                f"Failed to set the metadata {key!r} in a sample of batch size {list(data.batch_size)}, got "
                f"{list(getattr(value, 'shape', []))}: transforms and collate_fn must keep the rows of a sample; one that "
                "takes rows away works on what sample() returns, or in a ReplayBuffer"
            ) from error
    if locked:
        data.lock_()


def _is_row_each(value: object, count: int) -> bool:
    """Whether a value has a row for each of `count` items."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count


def _set(data: Any, key: NestedKey, value: Any, apart: bool) -> None:
    if isinstance(data, LazyStackedTensorDict) and -1 in data.batch_size and isinstance(value, Tensor):
        set_expanded(data, key, value if data.device is None else value.to(data.device))
        return
    if isinstance(value, Tensor):
        value = _fitted(value, data.batch_size, data.device)
        value = value.clone() if apart else value
    data.set(key, value)


def _fitted(value: Tensor, shape: torch.Size, device: torch.device | None) -> Tensor:
    """An entry of the info, expanded to the batch size of a tensordict."""
    value = value if device is None else value.to(device)
    if len(shape) > 1 and value.ndim and value.shape[:1] != shape[:1] and value.shape[0] == shape.numel():
        value = value.reshape(*shape, *value.shape[1:])
    if value.ndim < len(shape) and value.shape == shape[: value.ndim]:
        value = value.reshape(*value.shape, *(1 for _ in shape[value.ndim :])).expand(shape).clone()
    return value
