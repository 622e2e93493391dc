"""`rb[index] = value`: written by the storage at the places that the index names in the layout of the user."""

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from interop.buffers.places import coordinates, is_all, row_numbers
from interop.data.layout import Layout
from interop.data.pytrees import assigned, each_leaf, swapped
from interop.storages import Storage
from interop.writers import TensorDictMaxValueWriter, TensorDictRoundRobinWriter, Writer


def assign(storage: Storage, writer: Writer, dim: int, index: Any, value: Any) -> None:
    """Write value at an index over stored items whose dims 0 and `dim` are exchanged. Length and cursor stay.

    A value that does not fit, in shape or dtype, is refused before anything is written.
    """
    count = storage.shape[dim] if dim < storage.ndim and storage.shape is not None else 0
    if dim and isinstance(index, slice) and index.stop == count and index.indices(count) == (0, count, 1):
        index = slice(None)
    if dim == 0 or is_all(index):
        storage[index] = _numbered(storage, writer, index, swapped(value, dim))
        return
    if dim < storage.ndim:
        if storage.shape is None:
            raise RuntimeError("Cannot write at an index of a non-initialized storage: call extend() or add() first")
        place = coordinates(storage.shape, dim, index)
        storage[place] = _numbered(storage, writer, place[0], value)
        return
    held = storage[:]  # the dim lies within the items, which are written as a whole
    target = swapped(held, dim)
    if isinstance(held, TensorDictBase):
        value = _numbered(storage, writer, coordinates(held.batch_size, dim, index)[0], value)
    Layout.of(each_leaf(target, lambda leaf: leaf[index]), 0).flatten(value, 0)  # refuses what does not fit
    storage[:] = swapped(assigned(target, index, value), dim)


def _numbered(storage: Storage, writer: Writer, index: Any, value: Any) -> Any:
    """The value with the row numbers that the writer keeps beside tensordicts; index is over the rows."""
    if not isinstance(value, TensorDictBase | list) or not _keeps_numbers(storage, writer):
        return value
    rows = row_numbers(storage, index, value)
    named = tuple(rows.shape) if isinstance(rows, Tensor) else ()
    given = (len(value),) if isinstance(value, list) else tuple(value.batch_size)
    if given[: len(named)] != named:
        raise RuntimeError(f"the index names places of shape {named}, data has {given}; nothing was written")
    return writer.stamped(value, rows)


def _keeps_numbers(storage: Storage, writer: Writer) -> bool:
    if not isinstance(writer, TensorDictRoundRobinWriter | TensorDictMaxValueWriter):
        return False
    layout = getattr(storage, "fixed_layout", None)
    if layout is not None:
        return ("index",) in layout.places
    first = storage[0] if len(storage) else None  # of a list
    return first is None or (isinstance(first, TensorDictBase) and "index" in first)
