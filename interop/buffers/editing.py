"""Edits of stored items: by key in place, and by index. All is checked before anything is written."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from interop.checkpoint.state import defined_outside
from interop.data.fitting import fitting, shown_path
from interop.data.index import as_int, as_list, is_all, resolved
from interop.data.keys import as_path
from interop.data.layout import Layout
from interop.data.pytrees import assigned, each_leaf, swapped
from interop.storages import Storage
from interop.writers import Writer

KeyPath = tuple[str, ...]

# ------------------------------------------------------------------ indices


def owned(data: Any) -> Any:
    """A copy of the data, with its own tensors, tensordicts and tensorclasses."""
    return each_leaf(
        data, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) or is_tensor_collection(leaf) else leaf
    )


def as_key(index: Any) -> str | tuple[str, ...] | None:
    """The key, nested or not, of an index; None for an index of rows. A leading "_data" is ignored."""
    key = (index,) if isinstance(index, str) else index
    if not (isinstance(key, tuple) and key and all(isinstance(name, str) for name in key)):
        return None
    key = key[1:] if key[0] == "_data" and len(key) > 1 else key
    return key if len(key) > 1 else key[0]


def unwrapped(index: Any) -> Any:
    """The index, without a tuple of one around it."""
    return index[0] if isinstance(index, tuple) and len(index) == 1 else index


# ------------------------------------------------------------------ by key


def edit(storage: Storage, values: Any, index: Any = ..., dim: int = 0, adds: bool = False) -> None:
    """Write entries of stored tensordicts in place, at an index over items whose dims 0 and `dim` are exchanged.

    With `adds`, unknown entries are added to all items. The lock of the storage is held. AttributeError for other items than
    tensordicts, and the errors of `_planned`.
    """
    storage.guard.refuse_forked_child()
    rows = storage.contents.editable(values)
    if not is_tensor_collection(rows):
        raise AttributeError(f"in-place edits by key need stored tensordicts, got {type(rows).__name__}")
    rows = swapped(rows, dim)
    unknown: dict[KeyPath, Any] | None = {} if adds and isinstance(rows, TensorDictBase) else None
    plan = list(_planned(rows, values, index, unknown=unknown))
    if unknown:
        rows = rows.copy().update(unknown)
        storage.add_columns(swapped(rows, dim))
    for entry, place, value in plan:
        entry[place] = value
    if defined_outside(storage, "get") or not storage.is_live(slice(None)):  # what was edited may be a copy
        storage[:] = swapped(rows, dim)
    storage.contents.edited(slice(None))


def _planned(
    entry: Any, values: Any, index: Any, path: KeyPath = (), unknown: dict[KeyPath, Any] | None = None
) -> Iterator[tuple[Tensor, Any, Tensor]]:
    """Yields each stored tensor to write, the index in it, and the new values. A number fills the tensor.

    Unknown entries go into `unknown`, or are a KeyError without it. TypeError for other values than numbers and tensors,
    IndexError out of range, RuntimeError for another shape or dtype.
    """
    if not is_tensor_collection(entry):
        yield entry, index, fitting(entry[index], values, path)
        return
    if not isinstance(values, Mapping) and not is_tensor_collection(values):
        raise TypeError(f"{shown_path(path)}: a tensordict is stored, got {type(values).__name__}; nothing was written")
    stored = {as_path(key) for key in entry.keys(include_nested=True)}
    for key, value in values.items():
        below = as_path(key)
        if below in stored:
            at = path + below
            lazy = isinstance(entry, LazyStackedTensorDict)
            if not lazy or is_tensor_collection(entry.tensordicts[0].get(below)):
                yield from _planned(entry.get(below), value, index, at, unknown)
            else:  # the stack itself would give copies
                for item, part in _dealt(entry, value, index, at):
                    yield item.get(below), ..., fitting(item.get(below), part, at)
        elif unknown is not None:
            unknown[path + below] = value
        else:
            names = ", ".join(sorted(map(shown_path, stored)))
            raise KeyError(f"{shown_path(path + below)} is not stored; stored are {names}")


def _dealt(stack: LazyStackedTensorDict, value: Any, index: Any, path: KeyPath) -> Iterator[tuple[Any, Any]]:
    """The items of a lazy stack at an index, each with its part of a value. A number is for all items."""
    single = as_int(index)
    items = stack.tensordicts
    dim = stack.stack_dim
    if single is not None:
        yield items[single], value
        return
    items = items if index is Ellipsis else [items[place] for place in as_list(index, len(items))]
    value = torch.as_tensor(value, device="cpu") if isinstance(value, np.ndarray) else value
    if isinstance(value, Tensor) or is_tensor_collection(value):
        parts = value.unbind(dim) if value.ndim > dim else ()
    else:
        parts = value if isinstance(value, list | tuple) else [value] * len(items)
    if len(parts) != len(items):
        raise RuntimeError(f"{shown_path(path)}: got {len(parts)} values for {len(items)} items; nothing was written")
    yield from zip(items, parts, strict=True)


def chosen(values: Any, keys: Sequence[Any]) -> dict[KeyPath, Any]:
    """The entries of a dict or tensordict at `keys`. KeyError for a missing one."""
    every = values.items(include_nested=True) if is_tensor_collection(values) else values.items()
    entries = {as_path(key): value for key, value in every}
    missing = [key for key in keys if as_path(key) not in entries]
    if missing:
        raise KeyError(f"keys_to_update names {missing}, which the given data does not have")
    return {as_path(key): entries[as_path(key)] for key in keys}


# ------------------------------------------------------------------ by index


def assign(storage: Storage, writer: Writer, dim: int, index: Any, value: Any) -> None:
    """Write a value at an index over stored items whose dims 0 and `dim` are exchanged. Length and cursor stay.

    A value of another shape or dtype is refused before the write.
    """
    count = storage.shape[dim] if dim < storage.ndim and storage.shape is not None else 0
    if dim and isinstance(index, slice) and index.stop == count and index.indices(count) == (0, count, 1):
        index = slice(None)
    if dim == 0 or is_all(index):
        storage[index] = _numbered(storage, writer, index, swapped(value, dim))
    elif dim < storage.ndim:
        if storage.shape is None:
            raise RuntimeError("Cannot write at an index of a non-initialized storage: call extend() or add() first")
        place = _coordinates(storage.shape, dim, index)
        storage[place] = _numbered(storage, writer, place[0], value)
    else:
        rows = storage[:]  # the dim lies within the items: write them as a whole
        target = swapped(rows, dim)
        if isinstance(rows, TensorDictBase):
            value = _numbered(storage, writer, _coordinates(rows.batch_size, dim, index)[0], value)
        Layout.of(each_leaf(target, lambda leaf: leaf[index]), 0).flatten(value, 0)  # refuses what does not fit
        storage[:] = swapped(assigned(target, index, value), dim)


def _coordinates(shape: Sequence[int], dim: int, index: Any) -> tuple[Tensor, ...]:
    """The coordinates of the items at an index over items of this shape whose dims 0 and `dim` are exchanged.

    IndexError out of range. Memory in proportion to the items.
    """
    axes = torch.meshgrid(*(torch.arange(length, device="cpu") for length in shape), indexing="ij")  # views
    return tuple(axis.transpose(0, dim)[index] for axis in axes)


def _numbered(storage: Storage, writer: Writer, index: Any, value: Any) -> Any:
    """The value with the row numbers that the writer adds to tensordicts; the index is over rows."""
    if not isinstance(value, TensorDictBase | list):
        return value
    shape = storage.shape if storage.shape is not None else torch.Size([0])
    filled = len(storage) if storage.ndim == 1 else shape[0]
    places = resolved(index, filled, filled, (storage.row_capacity(value), *shape[1:]))
    rows = places[0] if isinstance(places, tuple) else places
    if isinstance(rows, slice):
        rows = torch.tensor(range(rows.start, rows.stop, rows.step or 1), dtype=torch.int64, device="cpu")
    named = tuple(rows.shape) if isinstance(rows, Tensor) else ()
    batch_shape = (len(value),) if isinstance(value, list) else tuple(value.batch_size)
    if batch_shape[: len(named)] != named:
        raise RuntimeError(f"the index names places of shape {named}, data has {batch_shape}; nothing was written")
    return writer.stamped(value, rows)
