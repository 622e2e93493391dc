"""Slots of a functional buffer, as the index of a sample names them."""

from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

import fbuf


def slots_of(index: Any, every: tuple[fbuf.Buffer, ...], member: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Slots, int32 [n], and their members. TypeError and IndexError for what names no slots."""
    members: Any = member
    if is_tensor_collection(index) or isinstance(index, dict):
        index, members = index["index"], index["buffer_ids"].cpu().numpy()
    index = torch.stack([torch.as_tensor(each) for each in index], -1) if isinstance(index, tuple) else index
    given = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
    if given.dtype.kind not in "iu" and given.size:
        raise TypeError(f"index must be integers, got {given.dtype}")
    members = np.broadcast_to(np.asarray(members, np.int32), given.shape[:1] or (1,))
    if members.size and not 0 <= members.min() <= members.max() < len(every):
        raise IndexError(f"there are {len(every)} members, got buffer_ids {members.min()} to {members.max()}")
    shape = every[member].capacity, *every[member].lanes
    if given.ndim == 2 and given.shape[1] == len(shape) > 1:
        try:
            given = np.ravel_multi_index(tuple(given.T), shape)
        except ValueError as error:
            raise IndexError(f"coordinates out of range for {shape}: {error}") from error
    limits = np.asarray([each.capacity * each.items_per_row for each in every])
    slots = given.reshape(-1)
    if slots.size and (slots.min() < -1 or (slots >= limits[members]).any()):
        raise IndexError(f"slots are from 0 to {limits.tolist()} by member, or -1, got {slots.min()} to {slots.max()}")
    return slots.astype(np.int32), members
