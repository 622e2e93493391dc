"""Members, slots and priorities of a functional buffer, as users name them."""

from typing import Any

import jax
import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import Tensor

import fbuf
from interop.samplers.validation import flat_slots, good_priorities, of_coordinates, refuse_below


def number_of(member: int | None, buffer: fbuf.Buffer | fbuf.Mixture) -> int:
    """The number of a member. TypeError for none of a mixture, and for one of a single buffer; IndexError out of range."""
    if (member is None) is isinstance(buffer, fbuf.Mixture):
        raise TypeError(f"a mixture needs the number of a member, a single buffer has none, got member={member!r}")
    if isinstance(buffer, fbuf.Mixture) and not 0 <= (member or 0) < len(buffer.buffers):
        raise IndexError(f"there are {len(buffer.buffers)} members, got member={member}")
    return member or 0


def slots_of(index: Any, every: tuple[fbuf.Buffer, ...], member: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Slots, int32 [n], and their members. TypeError and IndexError for what names no slots."""
    members: Any = member
    if is_tensor_collection(index) or isinstance(index, dict):
        index, members = index["index"], index["buffer_ids"].cpu()
    if isinstance(index, tuple):
        index = torch.stack([torch.as_tensor(each) for each in index], -1)
    index = index.cpu() if isinstance(index, Tensor) else index
    if np.ndim(index) == 2 and every[member].lanes:
        index = of_coordinates(np.asarray(index), (every[member].capacity, *every[member].lanes))
    slots, lowest, _ = flat_slots(index, None)
    refuse_below(lowest)
    members = np.broadcast_to(np.asarray(members, np.int32), slots.shape)
    limits = np.asarray([each.capacity * each.items_per_row for each in every])
    if not np.isin(members, range(len(every))).all() or (slots >= limits[members]).any():
        raise IndexError(f"index out of range: buffers have {limits.tolist()} items, got {slots} of buffers {members}")
    return slots.astype(np.int32), members


def priorities_of(priority: Any) -> np.ndarray:
    """Priorities in the widest float that JAX has. TypeError for no real numbers, ValueError for refused ones."""
    return good_priorities(priority, str(jax.dtypes.canonicalize_dtype("float64")))[0]
