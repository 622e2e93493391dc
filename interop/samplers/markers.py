"""Where the items of a storage say to which trajectory they belong."""

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from interop.data.keys import as_path
from interop.host.rows import TorchRows
from interop.storages import ListStorage, Storage, TensorStorage, columns

DONE = ("next", "done")
_FOUND_BY_DEFAULT: tuple[tuple[Any, bool], ...] = ((("collector", "traj_ids"), True), ("episode", True), (DONE, False))


class Markers:
    """Reads, for rows of a storage, the id of their trajectory, or whether it ends with them.

    Args:
        traj_key: an integer entry [rows, *lanes]; another value than in the row before begins a trajectory.
        end_keys: bool entries [rows, *lanes] or [rows, *lanes, 1], True in the last row of a trajectory; those that are
            stored are taken together. They count where there is no `traj_key`, or the storage has none.

    Without either `("collector", "traj_ids")`, `"episode"` and `("next", "done")` are looked for, in this order.
    """

    def __init__(self, traj_key: Any, end_keys: Sequence[Any] | None) -> None:
        self._traj_key = traj_key
        self._end_keys = list(end_keys) if end_keys is not None else None
        self.found: tuple[tuple[Any, ...], bool] | None = None  # keys, and whether they are of ids
        self._last: tuple[Any, int, np.ndarray, np.ndarray] | None = (
            None  # what was read: key, place, memory, and column
        )

    def resolve(self, storage: Storage) -> bool:
        """Find the entries; whether they are ids. RuntimeError or TypeError where there is none that can be used."""
        item = _an_item(storage)
        if self.found is None or any(item.get(key, None) is None for key in self.found[0]):
            self.found = self._look(item)
        keys, ids = self.found
        for key in keys:
            _check(storage, key, item.get(key), ids)
        return ids

    def _look(self, item: Any) -> tuple[tuple[Any, ...], bool]:
        def there(key: Any) -> bool:
            return item.get(key, None) is not None

        if self._traj_key is None and self._end_keys is None:
            for key, ids in _FOUND_BY_DEFAULT:
                if there(key):
                    return (key,), ids
        elif self._traj_key is not None and there(self._traj_key):
            return (self._traj_key,), True
        else:
            found = tuple(key for key in self._end_keys or [DONE] if there(key))
            if found:
                return found, False
        wanted = [self._traj_key] if self._traj_key is not None else []
        wanted += self._end_keys or [DONE]
        raise RuntimeError(
            "Could not get a tensordict out of the storage that says where trajectories end: "
            f"none of {wanted} is stored. Give traj_key, an integer for each item, or end_key, a bool for each"
        )

    def read(self, storage: Storage, rows: Any) -> np.ndarray:
        """Ids, int64, or flags, bool, of rows, a slice or int array: [n, lanes]. A copy, or a view of what is stored."""
        assert self.found is not None
        keys, ids = self.found
        last = self._last
        if last is not None and last[0] is keys[0] and reads_rows(storage) and last[2] is _array(storage, last[1]):
            values = last[3][rows]
        else:
            values = _column(storage, keys[0], rows)
            self._last = _whole(storage, keys[0])
        if ids:
            return values
        flags = values if values.dtype == np.bool_ else values != 0
        for key in keys[1:]:
            flags = flags | (_column(storage, key, rows) != 0)
        return flags

    def watched(self, storage: Storage) -> list[Tensor]:
        """The memory of the entries, where torch counts the changes of it and the library makes few through torch."""
        assert self.found is not None
        if not reads_rows(storage) or not isinstance(storage._rows, TorchRows) or not storage._rows.on_host:
            return []
        places = [leaf_of(storage, key) for key in self.found[0]]
        tensors = [storage._rows.tensors[place] for place in places if place is not None]
        return [tensor for tensor in tensors if not tensor.is_inference()]


def lanes_of(storage: Storage) -> int:
    """Items in a row."""
    return math.prod(storage.shape[1:]) if storage.ndim > 1 and storage.shape is not None else 1


def leaf_of(storage: TensorStorage, key: Any) -> int | None:
    """Which leaf of the stored items has this key."""
    path = as_path(key)
    assert storage._layout is not None
    return storage._layout.places.get(path)


def reads_rows(storage: Storage) -> TypeGuard[TensorStorage]:
    """Whether what `get` gives is what is in the rows: no method of the user's is passed by."""
    return isinstance(storage, TensorStorage) and getattr(storage.get, "__func__", None) is TensorStorage.get


def _an_item(storage: Storage) -> Any:
    """Something to look for keys in."""
    if reads_rows(storage) and storage._layout is not None and storage._layout.is_tensordict:
        return _Leaves(storage)
    if isinstance(storage, ListStorage) and len(storage) and is_tensor_collection(storage[0]):
        return storage[0]
    if not isinstance(storage, ListStorage) and not reads_rows(storage) and len(storage):
        held = storage.get(slice(0, 1))
        if isinstance(held, TensorDictBase):
            return held[(0,) * storage.ndim]
    raise RuntimeError(
        "Could not get a tensordict out of the storage, which is required to know where trajectories end: "
        f"a {type(storage).__name__} of {'other items' if len(storage) else 'no items'} has none"
    )


class _Leaves:
    """The tensors of a storage by key, as one item has them."""

    def __init__(self, storage: TensorStorage) -> None:
        self._storage = storage

    def get(self, key: Any, default: Any = None) -> Any:
        place = leaf_of(self._storage, key)
        if place is None:
            return default
        assert self._storage._layout is not None
        spec = self._storage._layout.leaves[place]
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def _check(storage: Storage, key: Any, value: Any, ids: bool) -> None:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        raise TypeError(
            f"{key!r} must be {'integers' if ids else 'bool'}, got {value.dtype if isinstance(value, Tensor) else value}"
        )
    if ids and value.ndim:
        raise RuntimeError(
            f"{key!r} must be one integer an item, a {storage.ndim}-dimensional signal; items have shape {list(value.shape)}"
        )
    if value.numel() != 1:
        raise RuntimeError(
            f"{key!r} must be one bool an item, with as many dims as the storage has ({storage.ndim}) and at most "
            f"others of size 1; items have shape {list(value.shape)}"
        )


def _column(storage: Storage, key: Any, rows: Any) -> np.ndarray:
    lanes = lanes_of(storage)
    if reads_rows(storage):
        place, held = leaf_of(storage, key), storage._rows
        assert place is not None and held is not None
        if isinstance(held, TorchRows) and held._numpy is not None:
            return held._numpy[place][rows].reshape(-1, lanes)  # in this order: a slice is a view in any strides
        tensor = held.tensors[place]
        at = rows if isinstance(rows, slice) else torch.as_tensor(rows, device=tensor.device)
        return tensor[at].cpu().numpy().reshape(-1, lanes)
    if isinstance(storage, ListStorage):
        numbers = range(len(storage))[rows] if isinstance(rows, slice) else rows
        return np.array([_one(storage, key, int(row)) for row in numbers]).reshape(-1, 1)
    memory = columns.memory(storage, key)
    column = storage[:].get(key) if memory is None else memory[: len(storage) // lanes]
    return column.cpu().numpy().reshape(-1, lanes)[rows]


def _array(storage: TensorStorage, place: int) -> Any:
    """NumPy's view of a leaf of rows on the host: another object once the memory is another. None where there is none."""
    arrays = storage._rows._numpy if isinstance(storage._rows, TorchRows) else None
    return arrays[place] if arrays is not None and place < len(arrays) else None


def _whole(storage: Storage, key: Any) -> tuple[Any, int, np.ndarray, np.ndarray] | None:
    """A key, its leaf, the memory of that, and the same as a view [rows, lanes]; None where there is none."""
    if not reads_rows(storage) or (place := leaf_of(storage, key)) is None:
        return None
    array = _array(storage, place)
    if array is None or not array.flags.c_contiguous:
        return None
    return key, place, array, array.reshape(-1, lanes_of(storage))


def _one(storage: Storage, key: Any, row: int) -> Any:
    item = storage.get(row)
    value = item.get(key, None) if is_tensor_collection(item) else None
    if value is None or value.numel() != 1:
        raise RuntimeError(
            f"every item must have one value under {key!r}, which says where trajectories end; the one at {row} has "
            f"{'none' if value is None else f'the shape {list(value.shape)}'}"
        )
    return value.item()
