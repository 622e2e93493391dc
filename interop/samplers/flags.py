"""Entries of one bool an item, read for the items of a batch."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.host.rows import TorchRows
from interop.samplers.markers import leaf_of, reads_rows
from interop.storages import Storage, columns


def flags_at(
    storage: Storage, key: Any, slots: np.ndarray, dims: int = 1, also: np.ndarray | None = None
) -> Tensor | None:
    """A copy of a bool entry at flat slots, [n] and `dims` dims of size 1; None where nothing is stored under the key.

    It is True where `also` is, [n, 1], too; where an item has several flags, all of them are. O(slots).
    """
    if reads_rows(storage) and isinstance(storage._rows, TorchRows) and storage._rows._numpy is not None:
        if (place := leaf_of(storage, key)) is None:
            return None
        held = storage._rows._numpy[place]
        if held.dtype == np.bool_ and held.flags.c_contiguous:
            if storage.ndim > 1:
                held = held.reshape(math.prod(held.shape[: storage.ndim]), *held.shape[storage.ndim :])
            flags = held.take(slots, 0, mode="clip")  # other modes copy twice
            if flags.ndim != 2 or flags.shape[1] != 1:
                flags = flags.reshape(_shape(flags, slots.size, dims))
            if also is not None:
                flags |= also if flags.ndim == 2 else also.reshape(-1, *(1 for _ in flags.shape[1:]))
            return torch.from_numpy(flags)
        found = storage._rows._items[place].read(torch.from_numpy(slots), slots)
    else:
        if not columns.has(storage, key):
            return None
        found = columns.read(storage, key, slots)
    found = found if found.dtype == torch.bool else found.to(torch.bool)
    found = found.reshape(_shape(found, slots.size, dims))
    if also is not None:
        found |= torch.from_numpy(also.reshape(-1, *(1 for _ in found.shape[1:]))).to(found.device)
    return found


def _shape(found: Any, count: int, dims: int) -> tuple[int, ...]:
    """[count, 1] where there is one flag an item; as it is, for several and without `dims`."""
    return (count, 1) if dims and math.prod(found.shape) == count else tuple(found.shape)
