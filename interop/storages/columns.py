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

from interop.data import bridge
from interop.data.keys import as_path
from interop.storages import Storage
from interop.storages.selected import SelectedItems


def has(storage: Storage, key: NestedKey, slot: int = 0) -> bool:
    """Whether the items, or the one in `slot` where they may differ, have a tensor under the key."""
    if isinstance(storage, SelectedItems):
        return has(storage.base, key, int(storage.located(np.array(slot))))
    try:
        if storage.column(key) is not None:
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
    if isinstance(storage, SelectedItems):
        return read(storage.base, key, storage.located(slots))
    held = storage.column(key)
    if held is None:
        return _by_item(storage, key, slots)
    if storage.ndim == 1 and held.device.type == "cpu" and held.dtype in bridge.DTYPES:
        found = torch.from_numpy(bridge.numpy_view(held).take(slots, 0))
        return found.view(torch.bfloat16) if held.dtype == torch.bfloat16 else found
    shape = held.shape[: storage.ndim]
    return held[tuple(torch.from_numpy(each).to(held.device) for each in np.unravel_index(slots, tuple(shape)))]


def read_several(storage: Storage, keys: Sequence[Any], slots: np.ndarray) -> list[Tensor]:
    """`read` of several entries; items that are read whole are read once."""
    if isinstance(storage, SelectedItems):
        return read_several(storage.base, keys, storage.located(slots))
    if any(storage.column(key) is not None for key in keys):
        return [read(storage, key, slots) for key in keys]
    found = _gotten(storage, slots.reshape(-1))
    values = (_one_entry(found, key) for key in keys)
    return [value.reshape(*slots.shape, *value.shape[1:]) for value in values]


def whole(storage: Storage, key: NestedKey) -> Tensor:
    """An entry of all stored items in the order of slots, [items, ...]; a view if possible."""
    if isinstance(storage, SelectedItems):
        return read(storage, key, np.arange(len(storage)))
    held = storage.column(key)
    if held is None:
        return _by_item(storage, key, np.arange(len(storage)))
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
