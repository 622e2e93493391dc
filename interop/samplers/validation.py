"""Slots of rows, and priorities, become NumPy arrays, or an error before anything changes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.storages import Storage

# Half the time of the methods.
_least = np.minimum.reduce
_most = np.maximum.reduce
_PLAIN = (torch.float32, torch.float64)


def flat_slots(index: Any, storage: Storage | None) -> tuple[np.ndarray, int, int]:
    """Flat slots [n] for an int, integers, or coordinates [n, ndim]; the lowest, at most 0; the highest.

    TypeError for other numbers than integers. RuntimeError or IndexError for coordinates that do not fit the storage.
    """
    if isinstance(index, tuple):
        index = torch.stack([torch.as_tensor(coordinates) for coordinates in index], -1)
    if isinstance(index, Tensor):
        index = index if index.is_cpu and not index.requires_grad else index.detach().cpu()
        array = index.numpy()
    else:
        array = np.asarray(index)
    if array.size == 0:
        return np.zeros(0, np.int32), 0, -1
    if array.dtype.kind not in "iu":
        raise TypeError(f"index must be integers, got {array.dtype}")
    if array.ndim == 2 and not (array.shape[1] == 1 and (storage is None or storage.ndim == 1)):
        if storage is None or storage.shape is None:
            raise RuntimeError("an index of several columns needs the storage, to know its shape")
        array = of_coordinates(array, tuple(storage.shape))
    array = array.reshape(-1)
    return array, min(int(_least(array)), 0), int(_most(array))


def refuse_below(lowest: int) -> None:
    """IndexError for a slot below -1. (-1 stands for no slot.)"""
    if lowest < -1:
        raise IndexError(f"index {lowest} is negative: only -1 is allowed, for an item that was not kept")


def of_coordinates(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Flat slots [n] for coordinates [n, ndim] in a shape. RuntimeError for another ndim, IndexError out of range."""
    if array.shape[1] != len(shape):
        raise RuntimeError(f"coordinates need {len(shape)} columns, one for each item dim, got {array.shape[1]}")
    flat = np.zeros(array.shape[0], np.int64)
    for axis, length in enumerate(shape):
        column = array[:, axis]
        low = column.min()
        high = column.max()
        if low < 0 or high >= length:
            raise IndexError(f"coordinate {low if low < 0 else high} is out of range for dim {axis} of size {length}")
        flat = flat * length + column
    return flat


def good_priorities(priority: Any, dtype: str) -> tuple[np.ndarray, Any]:
    """Priorities in the dtype of the sampler, and the highest of them, 0 if there is none.

    TypeError unless they are real numbers, ValueError for negative or not finite ones.
    """
    if isinstance(priority, Tensor):
        if priority.requires_grad or not priority.is_cpu or priority.dtype not in _PLAIN:
            priority = priority.detach()
            priority = (priority.float() if priority.dtype == torch.bfloat16 else priority).cpu()
        priority = priority.numpy()
    numbers = np.asarray(priority)
    if numbers.dtype.kind not in "fiu":
        raise TypeError(f"priorities must be real numbers, got {numbers.dtype}")
    if numbers.dtype == dtype:
        values = numbers
    else:
        with np.errstate(over="ignore"):  # too large values become infinite, and are refused below
            values = numbers.astype(dtype)
    if not values.size:
        return values, values.dtype.type(0)
    top = _most(values, axis=None)
    if not (_least(values, axis=None) >= 0 and top < np.inf):
        at = int((~((values >= 0) & (values < np.inf))).argmax())
        raise ValueError(
            f"priorities must be finite and at least 0 in {dtype}, got {numbers.reshape(-1)[at]} (number {at}): "
            "pass the absolute error"
        )
    return values, top


def one_for_each(slots: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One priority for each slot, [n], from one value for all or one for each. RuntimeError for another number."""
    if values.size not in (1, slots.size) or (values.size == 1 and values.ndim > 1 and slots.size != 1):
        raise RuntimeError(
            "priority should be a number or an iterable of the same length as index: "
            f"got {values.size} priorities for {slots.size} indices"
        )
    flat = values.reshape(-1)
    return flat if flat.size == slots.size else np.broadcast_to(flat, slots.shape)


def refuse_replacement(sampler: object, replacement: bool) -> None:
    """ValueError for `replacement=True`, TypeError for what is no bool: the sampler draws without replacement."""
    if not isinstance(replacement, bool):
        raise TypeError(f"replacement must be False, got {replacement!r}")
    if replacement:
        raise ValueError(f"a {type(sampler).__name__} draws without replacement, got replacement=True")
