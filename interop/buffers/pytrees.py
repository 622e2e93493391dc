"""Batches of any kind, changed leaf by leaf."""

from collections.abc import Callable
from typing import Any

from tensordict import is_tensor_collection
from torch import Tensor


def each_leaf(data: Any, change: Callable[[Any], Any]) -> Any:
    """The change made to a tensor or tensordict, or to each leaf of a pytree."""
    if isinstance(data, Tensor) or is_tensor_collection(data):
        return change(data)
    if isinstance(data, dict):
        return {key: each_leaf(value, change) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(each_leaf(value, change) for value in data))
    if isinstance(data, tuple | list):
        return type(data)(each_leaf(value, change) for value in data)
    return data


def swapped(data: Any, dim: int) -> Any:
    """The data with dims 0 and `dim` exchanged."""
    return data if dim == 0 or isinstance(data, list) else each_leaf(data, lambda leaf: leaf.transpose(0, dim))


def assigned(target: Any, index: Any, value: Any) -> Any:
    """A copy of target with value at index."""
    if isinstance(target, Tensor) or is_tensor_collection(target):
        target = target.clone()
        target[index] = value
        return target
    if isinstance(target, dict):
        return {key: assigned(held, index, value[key]) for key, held in target.items()}
    return type(target)(assigned(held, index, new) for held, new in zip(target, value, strict=True))
