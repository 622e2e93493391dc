"""Batches of any kind, changed leaf by leaf."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tensordict import is_tensor_collection
from torch import Tensor


def each_leaf(data: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a change to a tensor or tensordict, or to each leaf of a pytree."""
    if isinstance(data, Tensor) or is_tensor_collection(data):
        return change(data)
    if isinstance(data, dict):
        return _dict_of(data, {key: each_leaf(value, change) for key, value in data.items()})
    if isinstance(data, tuple | list):
        return row_of(type(data), [each_leaf(value, change) for value in data])
    return change(data)


def swapped(data: Any, dim: int) -> Any:
    """The data with dims 0 and `dim` exchanged."""

    def swap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) and not is_tensor_collection(leaf):
            raise TypeError(f"dims can be exchanged in tensors and tensordicts, got {type(leaf).__name__}")
        if leaf.ndim <= dim:
            raise RuntimeError(
                f"data needs {dim + 1} leading dims to extend along dim {dim}, got shape {list(leaf.shape)}"
            )
        return leaf.transpose(0, dim)

    return data if dim == 0 or isinstance(data, list) else each_leaf(data, swap)


def assigned(target: Any, index: Any, value: Any) -> Any:
    """A copy of target with value at index."""
    if isinstance(target, Tensor) or is_tensor_collection(target):
        target = target.clone()
        target[index] = value
        return target
    if isinstance(target, dict):
        return _dict_of(target, {key: assigned(child, index, value[key]) for key, child in target.items()})
    return row_of(type(target), [assigned(child, index, new) for child, new in zip(target, value, strict=True)])


def lead_of(data: Any) -> tuple[int, ...]:
    """The shape of the first leaf of data that has dims, batch dims of a tensordict or the length of a list of texts."""
    if isinstance(data, Tensor | np.ndarray | jax.Array) or is_tensor_collection(data):
        return tuple(data.shape)
    if isinstance(data, list) and any(isinstance(element, str | bytes) for element in data):
        return (len(data),)
    children = data.values() if isinstance(data, dict) else data if isinstance(data, tuple | list) else ()
    return next(filter(None, map(lead_of, children)), ())


def length_of(data: Any) -> int:
    """Rows of a batch: the first dim of its leaves, or the length of a list of items."""
    lead = () if isinstance(data, list) else lead_of(data)
    return lead[0] if lead else len(data)


def _dict_of(data: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the same class with other values."""
    if type(data) is dict:
        return values
    twin = copy.copy(data)
    twin.update(values)
    return twin


def row_of(kind: Any, values: list[Any]) -> Any:
    """A tuple, named tuple or list of this class with these values."""
    return kind(*values) if hasattr(kind, "_fields") else kind(values)


def none_of(item: Any, dim: int = 0) -> Any:
    """A batch of no items like this one: its leaves with a dim of 0 at `dim`, texts and other values as empty lists."""
    return each_leaf(item, lambda leaf: _none(leaf, dim))


def _none(leaf: Any, dim: int) -> Any:
    if not isinstance(leaf, Tensor) and not is_tensor_collection(leaf):
        return []
    return leaf.unsqueeze(dim)[(*(slice(None) for _ in range(dim)), slice(0, 0))]
