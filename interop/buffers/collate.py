"""How a list of items becomes a batch."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase, is_tensor_collection, lazy_stack
from torch import Tensor

from interop.data.index import as_int
from interop.data.pytrees import none_of, row_of
from interop.data.tensordicts import densely_stacked
from interop.storages import CompressedListStorage, LazyStackStorage, ListStorage, Storage, TensorStorage

T = TypeVar("T")


def identity(data: T) -> T:
    """Return the result of the storage as the batch."""
    return data


def stack(items: list[Any]) -> Any:
    """Stack items along a new first dim, leaf by leaf; unlike tensordicts lazily, texts as a list. TypeError for other
    objects."""
    first = items[0] if items else None
    if first is None and not items:
        raise RuntimeError("cannot make a batch of no items")
    if is_tensor_collection(first):
        if (dense := densely_stacked(items)) is not None:
            return dense
        _same_dims(items)
        try:
            return torch.stack(items)
        except RuntimeError:
            return lazy_stack(_of_one_device([item.clone() for item in items]))
    if isinstance(first, Tensor):
        return _dense(items)
    if isinstance(first, str | bytes):
        return items
    if isinstance(first, dict):
        _same(items, lambda item: item.keys())
        return {key: stack([item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        _same(items, len)
        columns = [stack(list(column)) for column in zip(*items, strict=True)]
        return row_of(type(first), columns)
    raise TypeError(
        f"cannot stack items of type {type(first).__name__}: pass collate_fn=lambda items: items to get them as a list"
    )


def lazily(items: list[Any]) -> Any:
    """Stack tensordicts lazily, other items as `stack` does."""
    if items and all(is_tensor_collection(item) for item in items):
        _same_dims(items)
        return lazy_stack(items)
    return stack(items)


def read(storage: Storage, index: Any, collate_fn: Callable[[Any], Any]) -> tuple[Any, Callable[[Any], Any]]:
    """The items at an index, and the function that makes a batch of them. The lock of the storage is held.

    A default function cannot tell what no items are: the batch is then made here, of no items like the first one stored.
    """
    items = storage[index]
    if as_int(index) is not None:
        return items, identity
    if isinstance(items, list) and not items and collate_fn in (stack, lazily) and len(storage):
        return none_of(storage[0]), identity
    return items, collate_fn


def _same_dims(items: list[TensorDictBase]) -> None:
    """RuntimeError for tensordicts of different numbers of batch dims, which no batch can hold."""
    if any(item.ndim != items[0].ndim for item in items):
        sizes = sorted({tuple(item.batch_size) for item in items})
        raise RuntimeError(
            f"items of batch sizes {sizes} cannot be read as one: they need the same number of batch dims. Pass "
            "collate_fn=lambda items: items to get them as a list"
        )


def _dense(items: list[Tensor]) -> Tensor:
    try:
        return torch.stack(items)
    except RuntimeError:
        unlike = [item for item in items if isinstance(item, Tensor) and item.shape != items[0].shape]
        if not unlike:
            raise
    raise RuntimeError(
        f"tensors of shapes {list(items[0].shape)} and {list(unlike[0].shape)} cannot be stacked: pass "
        "collate_fn=lambda items: items to get them as a list, or store tensordicts, which are stacked lazily"
    )


def _of_one_device(items: list[Any]) -> list[Any]:
    """Clear the device of tensordicts if some have one device and the others none."""
    devices = {item.device for item in items}
    if len(devices) == 2 and None in devices:
        for item in items:
            item.clear_device_()
    return items


def default_for(storage: Storage) -> Callable[[Any], Any]:
    """The default collate function of a storage; NotImplementedError for a user's storage."""
    if isinstance(storage, TensorStorage | LazyStackStorage):
        return identity
    if isinstance(storage, CompressedListStorage):
        return lazily
    if isinstance(storage, ListStorage):
        return stack
    raise NotImplementedError(
        f"no default way to make batches of what a {type(storage).__name__} returns: give collate_fn"
    )


def _same(items: list[Any], trait: Callable[[Any], Any]) -> None:
    if any(type(item) is not type(items[0]) or trait(item) != trait(items[0]) for item in items):
        raise RuntimeError("cannot stack items of unlike structure: pass a collate_fn")
