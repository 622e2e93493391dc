"""Where the items are that an index of a buffer names."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from interop.data.index import resolved
from interop.data.pytrees import each_leaf
from interop.storages import Storage


def is_all(index: Any) -> bool:
    """Whether index is `:`."""
    return isinstance(index, slice) and index == slice(None)


def owned(data: Any) -> Any:
    """The data with tensors, tensordicts and tensorclasses of its own."""
    return each_leaf(
        data, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) or is_tensor_collection(leaf) else leaf
    )


def coordinates(shape: Sequence[int], dim: int, index: Any) -> tuple[Tensor, ...]:
    """For each dim of `shape`, where the items at index are; the index goes over the same items with dims 0 and `dim`
    exchanged. IndexError out of range. Memory in proportion to what the index names."""
    axes = torch.meshgrid(
        *(torch.arange(length, device="cpu") for length in shape), indexing="ij"
    )  # views of one line each
    return tuple(axis.transpose(0, dim)[index] for axis in axes)


def row_numbers(storage: Storage, index: Any, data: Any) -> int | Tensor:
    """The rows that an index of the storage names, none negative; data is what is to be written there."""
    shape = storage.shape if storage.shape is not None else torch.Size([0])
    filled = len(storage) if storage.ndim == 1 else shape[0]
    places = resolved(index, filled, filled, (storage.row_capacity(data), *shape[1:]))
    rows = places[0] if isinstance(places, tuple) else places
    if isinstance(rows, slice):
        return torch.tensor(range(rows.start, rows.stop, rows.step or 1), dtype=torch.int64, device="cpu")
    return rows


def as_key(index: Any) -> str | tuple[str, ...] | None:
    """The key, nested or not, that an index names; "_data" in front says nothing."""
    key = (index,) if isinstance(index, str) else index
    if not (isinstance(key, tuple) and key and all(isinstance(each, str) for each in key)):
        return None
    key = key[1:] if key[0] == "_data" and len(key) > 1 else key
    return key if len(key) > 1 else key[0]


def unwrapped(index: Any) -> Any:
    """The index out of a tuple of one."""
    return index[0] if isinstance(index, tuple) and len(index) == 1 else index
