"""One entry of the stored items, read without the others.

The caller holds the lock of the storage. A key is a name or a tuple of names; slots are flat, over all items.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import as_path
from interop.storages import Storage


def has(storage: Storage, key: NestedKey, slot: int = 0) -> bool:
    """Whether the items, or the one in `slot` where they may differ, have a tensor under the key."""
    try:
        if storage.contents.column(key) is not None:
            return True
    except KeyError:
        return False
    except TypeError:  # text or ragged rows
        return True
    index = slot if storage.ndim == 1 else tuple(map(int, np.unravel_index(slot, tuple(storage.shape or ()))))
    try:
        _within(storage.get(index), key)
    except KeyError:
        return False
    return True


def read(storage: Storage, key: NestedKey, slots: np.ndarray) -> Tensor:
    """Copies of an entry of the items at slots, [*slots.shape, ...], on the device of the storage. O(slots).

    KeyError for an entry that is not stored.
    """
    values = storage.contents.read(key, slots)
    return _by_item(storage, key, slots) if values is None else values


def read_several(storage: Storage, keys: Sequence[Any], slots: np.ndarray) -> list[Tensor]:
    """`read` of several entries; items that are read whole are read once."""
    columns = [storage.contents.read(key, slots) for key in keys]
    if any(values is not None for values in columns):
        return [
            _by_item(storage, key, slots) if values is None else values
            for key, values in zip(keys, columns, strict=True)
        ]
    found = _gotten(storage, slots.reshape(-1))
    entries = (_one_entry(found, key) for key in keys)
    return [values.reshape(*slots.shape, *values.shape[1:]) for values in entries]


def whole(storage: Storage, key: NestedKey) -> Tensor:
    """An entry of all stored items in the order of slots, [items, ...]; a view if possible."""
    held = storage.contents.column(key)
    if held is None:
        return read(storage, key, np.arange(len(storage)))
    assert storage.shape is not None
    return held[: storage.shape[0]].flatten(0, storage.ndim - 1)


def texts(storage: Storage, key: NestedKey, slots: np.ndarray) -> list[str] | None:
    """An entry of the items at slots, [n], if it is one text an item; None otherwise. O(slots).

    KeyError for an entry that is not stored.
    """
    found = _gotten(storage, slots)
    for step in as_path(key):
        found = [item[step] for item in found] if isinstance(found, list) else found[step]
    is_text = isinstance(found, Iterable) and not isinstance(found, Tensor) and all(type(each) is str for each in found)
    return list(found) if is_text else None


def _gotten(storage: Storage, slots: np.ndarray) -> Any:
    """The items at slots, [n], by the `get` of the storage: a batch or a list."""
    if storage.ndim == 1:
        return storage.get(torch.from_numpy(slots))
    return storage.get(tuple(map(torch.from_numpy, np.unravel_index(slots, tuple(storage.shape or ())))))


def _by_item(storage: Storage, key: NestedKey, slots: np.ndarray) -> Tensor:
    """`read` by the `get` of the storage."""
    held = _one_entry(_gotten(storage, slots.reshape(-1)), key)
    return held.reshape(*slots.shape, *held.shape[1:])


def _one_entry(items: Any, key: NestedKey) -> Tensor:
    """An entry of a list or batch of items, [items, ...]."""
    return torch.stack([_within(item, key) for item in items]) if isinstance(items, list) else _within(items, key)


def _within(item: Any, key: NestedKey) -> Tensor:
    """A tensor in an item. KeyError where there is none."""
    held = item
    for step in as_path(key):
        if is_tensor_collection(held):
            held = held.get(step, None)
        else:
            held = held.get(step) if isinstance(held, dict) else None
    if held is None or is_tensor_collection(held) or isinstance(held, dict):
        raise KeyError(f"{key!r} is not stored as a tensor in items of type {type(item).__name__}")
    return held if isinstance(held, Tensor) else torch.as_tensor(held, device="cpu")
