"""The oldest slot first."""

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor

from interop.codec import Layout, shallow, stack_items
from interop.pytrees import each_leaf
from interop.shared_int import counter
from interop.storages import Storage, TensorStorage
from interop.storages.lists import unbind
from interop.writers.writer import Writer


class RoundRobinWriter(Writer):
    """Fills the storage in order and then recycles the oldest rows.

    Cursor and count are seen by worker processes, unless `compilable`. A write that raises moves neither.
    """

    def __init__(self, compilable: bool = False) -> None:
        super().__init__(compilable)
        self._cursor_cell = counter(compilable)
        self._count_cell = counter(compilable)

    def register_storage(self, storage: Storage) -> None:
        """Write to this storage from now on; into another one than before from its first row."""
        if getattr(self, "_storage", storage) is not storage:
            self._cursor = 0
        super().register_storage(storage)

    @property
    def _cursor(self) -> int:
        return self._cursor_cell.value

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        self._cursor_cell.value = value

    @property
    def write_count(self) -> int:
        """Rows ever written; never capped by the capacity."""
        return self._count_cell.value

    @property
    def _write_count(self) -> int:
        return self._count_cell.value

    @_write_count.setter
    def _write_count(self, value: int) -> None:
        self._count_cell.value = value

    def add(self, data: Any) -> Any:
        """Write one item; an int, or coordinates [n, ndim] where a row holds several items."""
        self._storage.refuse_a_stranger()
        cursor = self._cursor
        self._storage.set(cursor, self._stamped(data, cursor))
        self._advance(1)
        return self._replicate_index(cursor)

    def extend(self, data: Any) -> Tensor:
        """Write a batch, dim 0 being the rows; of more rows than the capacity the last stay."""
        if not isinstance(self._storage, TensorStorage):
            data = unbind(data)
        dims = _item_dims(data, self._storage.ndim)
        if 0 in dims:
            return self._nothing()
        self._storage.refuse_a_stranger()
        count = dims[0]
        cursor = self._cursor
        capacity = self._storage.row_capacity(data)
        index = torch.arange(cursor, cursor + count, device="cpu")
        if cursor + count > capacity:
            index %= capacity
        _write_run(self._storage, cursor, index, self._stamped(data, index))
        self._advance(count)
        device = getattr(data, "device", None)
        index = self._replicate_index(index)
        return index.to(device) if device is not None and device.type != "cpu" else index

    def _nothing(self) -> Tensor:
        raise RuntimeError("Expected at least one element in extend.")

    def _advance(self, count: int) -> None:
        self._cursor = (self._cursor + count) % self._storage.row_capacity(None)
        self._write_count += count

    def _empty(self, empty_write_count: bool = True) -> None:
        self._cursor = 0
        if empty_write_count:
            self._write_count = 0

    def __repr__(self) -> str:
        full = self._storage._is_full if hasattr(self, "_storage") else False
        return f"{type(self).__name__}(cursor={self._cursor}, full_storage={full})"


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """Also writes the row number of each item of a tensordict under "index", expanded to its batch dims."""

    def _stamped(self, data: Any, index: Any) -> Any:
        if isinstance(data, list) and isinstance(self._storage, TensorStorage):
            data = stack_items(data) if all(isinstance(item, TensorDictBase) for item in data) else data
        elif isinstance(data, list) and not isinstance(index, int):
            return [self._stamped(item, int(place)) for item, place in zip(data, index, strict=True)]
        if not isinstance(data, TensorDictBase):
            return data
        stamped = shallow(data)
        rows = _expanded(index, data.batch_size)
        # A list keeps this tensor, rows in memory copy it.
        stamped.set("index", rows if isinstance(self._storage, TensorStorage) else rows.clone())
        return stamped

    def _note(self, data: Any, index: Any) -> None:
        if isinstance(data, TensorDictBase) and not data.is_locked:
            data.set("index", _expanded(index, data.batch_size).clone())

    def _nothing(self) -> Tensor:
        return torch.zeros(
            (0,) if self._storage.ndim == 1 else (0, self._storage.ndim), dtype=torch.int64, device="cpu"
        )


def _expanded(index: Any, shape: torch.Size) -> Tensor:
    """Row numbers as int64 of the batch dims of a tensordict, without a copy."""
    rows = torch.as_tensor(index, dtype=torch.int64)
    return rows if rows.shape == shape else rows.reshape(*rows.shape, *(1 for _ in shape[rows.ndim :])).expand(shape)


def _item_dims(data: Any, ndim: int) -> tuple[int, ...]:
    """The dims of a batch that count as items, rows first; what is missing of them the storage refuses."""
    if isinstance(data, list):
        return (len(data),)
    if isinstance(data, Tensor) or is_tensor_collection(data):
        shape = data.shape
    else:
        leaves = Layout.of(data, 0).flatten(data, 0)
        shape = leaves[0].shape if leaves else torch.Size([])
    if not shape:
        raise RuntimeError("extend() needs data with a leading dim, got one without dims: use add() for a single item")
    return tuple(shape[:ndim])


def _write_run(storage: Storage, start: int, index: Tensor, data: Any) -> None:
    """Have the storage write consecutive rows, by the short way where its own `set` is not replaced."""
    if isinstance(storage, TensorStorage) and type(storage).set is TensorStorage.set:
        storage.set_run(start, index, data)
    elif index.shape[0] > storage.max_size:  # of equal rows only the last would stay; in order, so that lists can grow
        keep = storage.max_size
        order = index[-keep:].argsort()
        if isinstance(data, list):
            storage.set(index[-keep:][order], [data[-keep:][place] for place in order])
        else:
            storage.set(index[-keep:][order], each_leaf(data, lambda leaf: leaf[-keep:][order]))
    else:
        storage.set(index, data)
