"""Reads of the items of a storage at any index, and of single entries."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from interop.data.index import as_int, as_tensor, in_range, indexed, is_basic, spelled_out
from interop.data.layout import Path

if TYPE_CHECKING:
    from interop.storages.tensors import TensorStorage


def read(storage: "TensorStorage", index: Any) -> Any:
    """The items at an index over the filled part: a view for ints and slices, a copy for arrays and masks.

    RuntimeError before the first write, IndexError out of range.
    """
    rows, filled = storage.own_rows(), (storage.filled_rows, *storage.lanes)
    if isinstance(index, tuple):
        index = tuple(each if is_basic(each) else as_tensor(each) for each in spelled_out(index, storage.ndim))
        if storage.ndim > 1 and len(index) == storage.ndim and all(map(_is_long, index)):
            flat = torch.zeros((), dtype=torch.int64, device="cpu")
            for axis, each in enumerate(index):
                flat = flat * filled[axis] + in_range(each, filled[axis])
            return _copies(storage, flat)
        index = index[0] if len(index) == 1 else index
    single = as_int(index)
    if single is not None and not -filled[0] <= single < filled[0]:
        raise IndexError(f"index {single} is out of range: {filled[0]} rows are stored")
    if single is not None or is_basic(index):
        place = index if single is None else single
        return storage.build(rows.at(filled[0], place), indexed(filled, place), locked=storage.mapped)
    if isinstance(index, tuple):
        return storage.build(rows.at(filled[0], index), indexed(filled, index))
    place = as_tensor(index)
    if place.dtype == torch.bool:
        if tuple(place.shape) != filled[: place.ndim]:
            raise IndexError(f"the mask has shape {list(place.shape)}, the filled part {list(filled)}")
        place = place.to(rows.device)
        return storage.build(rows.at(filled[0], place), indexed(filled, place.cpu()))
    place = in_range(place, filled[0])
    if storage.ndim == 1:
        return _copies(storage, place)
    return storage.build(rows.at(filled[0], place.to(rows.device)), (*place.shape, *filled[1:]))


def _copies(storage: "TensorStorage", slots: Tensor) -> Any:
    """Copies of the items at flat slots, in their shape."""
    rows, shape = storage.own_rows(), tuple(slots.shape)
    leaves = rows.read(slots if len(shape) == 1 else slots.reshape(-1))
    if len(shape) != 1:
        leaves = [leaf.reshape((*shape, *leaf.shape[1:])) for leaf in leaves]
    return storage.build(leaves, shape)


def _is_long(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.int64


def column(storage: "TensorStorage", path: Path) -> Tensor | None:
    """The memory of an entry, [rows, *lanes, ...]; None if it is not one tensor.

    KeyError for an entry that is not stored, TypeError for text and ragged rows.
    """
    rows, layout, name = storage.own_rows(), storage.layout, path if len(path) > 1 else path[0]
    assert layout is not None
    if path not in layout.places:
        stored = ", ".join(spec.name for spec in layout.leaves)
        raise KeyError(f"{name!r} is not stored as a tensor; stored are {stored}")
    if path in layout.varied:
        raise TypeError(f"{name!r} holds text or ragged rows, which have no column; a tensor is needed here")
    return rows.column(layout.places[path])


def views(storage: "TensorStorage", paths: Sequence[Path]) -> list[np.ndarray | None] | None:
    """NumPy views of entries, [items, ...] each, None for an entry that is not stored; None if one has no view."""
    rows, layout, dims = storage.own_rows(), storage.layout, storage.ndim
    assert layout is not None
    found: list[np.ndarray | None] = []
    for path in paths:
        if (place := layout.places.get(path)) is None:
            found.append(None)
            continue
        held = rows.array(place)
        if held is None or not (dims == 1 or held.flags.c_contiguous):
            return None
        found.append(held if dims == 1 else held.reshape(math.prod(held.shape[:dims]), *held.shape[dims:]))
    return found
