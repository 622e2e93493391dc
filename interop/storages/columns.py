"""One entry of the stored items, read without the others.

To be called while the lock of the storage is held. A key is a name or a tuple of names; slots are flat, over all items.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

from interop.data import bridge
from interop.data.keys import as_path
from interop.data.layout import Path as KeyPath
from interop.host.rows import TorchRows
from interop.storages import Storage, TensorStorage


def _in_rows(storage: Storage, path: KeyPath) -> TypeGuard[TensorStorage]:
    """Whether an entry is read from the rows of the storage, not by the `get` of a subclass."""
    return isinstance(storage, TensorStorage) and (type(storage).get is TensorStorage.get or path in storage.AS_STORED)


def memory(storage: Storage, key: Any) -> Tensor | None:
    """Where an entry lives, [rows, *lanes, ...], whole; None for a storage that is read by `get` alone.

    KeyError for an entry that is not stored. Not to be kept: the next write may move it.
    """
    path = as_path(key)
    if not _in_rows(storage, path):
        return None
    place, rows = _place(storage, path), storage.rows
    assert rows is not None
    return rows.column(place)


def _place(storage: TensorStorage, path: KeyPath) -> int:
    """The leaf of an entry."""
    layout, key = storage.layout, path if len(path) > 1 else path[0]
    if layout is None:
        raise RuntimeError("Cannot get elements out of a non-initialized storage: call extend() or add() first")
    place = layout.places.get(path)
    if place is None:
        raise KeyError(
            f"{key!r} is not stored as a tensor; stored are {', '.join(spec.name for spec in layout.leaves)}"
        )
    if path in layout.varied:
        raise TypeError(f"{key!r} holds text or ragged rows, which have no column; a tensor is needed here")
    return place


def arrays(storage: Storage, paths: Sequence[KeyPath]) -> list[np.ndarray | None] | None:
    """Entries in memory on the host, [items, ...] each: views, and None for what is not stored.

    None in the place of all where NumPy cannot view them so. Not to be kept: the next write may move them.
    """
    if not isinstance(storage, TensorStorage) or storage.layout is None or not isinstance(storage.rows, TorchRows):
        return None
    if type(storage).get is not TensorStorage.get and not all(path in storage.AS_STORED for path in paths):
        return None
    rows, places, found = storage.rows, storage.layout.places, list[np.ndarray | None]()
    for path in paths:
        if (place := places.get(path)) is None:
            found.append(None)
            continue
        held = rows.array(place)
        if held is None or not (storage.ndim == 1 or held.flags.c_contiguous):
            return None
        dims = storage.ndim
        found.append(held if dims == 1 else held.reshape(math.prod(held.shape[:dims]), *held.shape[dims:]))
    return found


def has(storage: Storage, key: Any) -> bool:
    """Whether the items, of which there is one at least, have a tensor under the key."""
    path = as_path(key)
    if _in_rows(storage, path) and storage.layout is not None:
        return path in storage.layout.places
    try:
        if memory(storage, key) is None:
            _within(storage.get(0), key)
    except KeyError:
        return False
    return True


def read(storage: Storage, key: Any, slots: np.ndarray) -> Tensor:
    """Copies of an entry of the items at slots, [*slots.shape, ...], on the device of the storage. O(slots).

    KeyError for an entry that is not stored.
    """
    held = memory(storage, key)
    if held is None:
        return _by_item(storage, key, slots)
    if storage.ndim == 1 and held.device.type == "cpu" and held.dtype in bridge.DTYPES:
        found = torch.from_numpy(bridge.numpy_view(held).take(slots, 0))
        return found.view(torch.bfloat16) if held.dtype == torch.bfloat16 else found
    shape = held.shape[: storage.ndim]
    return held[tuple(torch.from_numpy(each).to(held.device) for each in np.unravel_index(slots, tuple(shape)))]


def flags(storage: Storage, key: Any, slots: np.ndarray) -> np.ndarray:
    """Whether an entry of one value an item is true, for the items at slots. ValueError for several values an item."""
    found = read(storage, key, slots)
    if found.numel() != slots.size:
        raise ValueError(f"{key!r} must have one value an item, it has the shape {list(found.shape[slots.ndim :])}")
    return (found != 0).reshape(slots.shape).cpu().numpy()


def whole(storage: Storage, key: Any) -> Tensor:
    """An entry of all stored items in the order of slots, [items, ...]: a view where it can be one."""
    held = memory(storage, key)
    if held is None:
        return _by_item(storage, key, np.arange(len(storage)))
    assert storage.shape is not None
    return held[: storage.shape[0]].flatten(0, storage.ndim - 1)


def texts(storage: Storage, key: Any, slots: np.ndarray) -> list[str] | None:
    """An entry of the items at slots, [n], where it is one text an item; None where it is something else. O(slots).

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


def _by_item(storage: Storage, key: Any, slots: np.ndarray) -> Tensor:
    """The same by the `get` of the storage."""
    found = _gotten(storage, slots.reshape(-1))
    held = torch.stack([_within(item, key) for item in found]) if isinstance(found, list) else _within(found, key)
    return held.reshape(*slots.shape, *held.shape[1:])


def _within(item: Any, key: Any) -> Tensor:
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
