"""Entries of a sample item by item, also of lazy stacks whose items are not alike."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from interop.data.keys import entry_at, missing


def column_of(data: TensorDictBase, key: NestedKey) -> Any:
    """The entry of all items; None where no item has it.

    It is one tensor with the items first, or a list of one tensor an item where their shapes differ. The items of a lazy
    stack are the tensordicts in it, along any dim. KeyError where only some items have the entry.
    """
    if not isinstance(data, LazyStackedTensorDict):
        return entry_at(data, key)
    values = [column_of(item, key) for item in data.tensordicts]
    lacking = [place for place, value in enumerate(values) if value is None]
    if len(lacking) == len(values):
        return None
    if lacking:
        raise missing(f"item {lacking[0]} of the sample", key, data.tensordicts[lacking[0]])
    if not all(isinstance(value, Tensor) for value in values):
        return (
            [_flat(value) for value in values] if all(isinstance(value, Tensor | list) for value in values) else values
        )
    alike = len({(value.shape, value.dtype, value.device) for value in values}) == 1
    return torch.stack(values) if alike else values


def _flat(values: Tensor | list[Any]) -> Tensor:
    """All values of an item, whose own rows may be unlike, in one dim."""
    return torch.cat([_flat(value) for value in values]) if isinstance(values, list) else values.reshape(-1)


def rows_of(index: Tensor | Sequence[Tensor], ndim: int) -> Tensor:
    """The index of each item from a column "index": [items], or [items, ndim] for a storage of several item dims."""
    if isinstance(index, Tensor):
        return index
    rows = torch.stack([coordinate.reshape(-1, ndim)[0] for coordinate in index])
    return rows[:, 0] if ndim == 1 else rows


def set_expanded(data: TensorDictBase, key: NestedKey, value: Tensor) -> None:
    """Set an entry to a value expanded to the batch dims, with memory of its own, also where those of items are unlike."""
    if isinstance(data, LazyStackedTensorDict) and -1 in data.batch_size:
        dim = data.stack_dim
        items = data.tensordicts
        rows = value.unbind(dim) if value.ndim > dim else [value] * len(items)
        for item, row in zip(items, rows, strict=True):
            set_expanded(item, key, row)
        return
    shape = data.batch_size
    data.set(key, value.reshape((*value.shape, *(1 for _ in shape[value.ndim :]))).expand(shape).clone())
