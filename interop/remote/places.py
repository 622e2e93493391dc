"""Global indices: the slot of an item plus the capacities of the shards before its own."""

from typing import Any

import torch


def to_global(index: Any, shard: int, capacity: int) -> Any:
    """Convert an index of one shard to a global index of the same form; -1 stays -1.

    Args:
        index: an int, an integer tensor [n], coordinates [n, ndim] or a tuple of them, as returned by samplers and
            writers, or None. The first coordinate is offset by the shard.
        shard: the number of the shard, from 0.
        capacity: `Storage.max_size` of every shard.
    """
    if isinstance(index, tuple):
        return (to_global(index[0], shard, capacity), *index[1:])
    if not isinstance(index, torch.Tensor):
        return index if index is None or index < 0 else index + shard * capacity
    moved = torch.where(index >= 0, index + shard * capacity, index)
    return moved if index.ndim < 2 else torch.cat([moved[:, :1], index[:, 1:]], 1)


def to_local(index: Any, shards: int, capacity: int) -> list[tuple[torch.Tensor, Any]]:
    """Split a global index by shard: the positions in it, int64, and the local index. Entries of -1 are dropped.

    IndexError for an index outside of all shards.
    """
    columns = [torch.as_tensor(each) for each in index] if isinstance(index, tuple) else []
    every = torch.atleast_1d(torch.stack(columns, -1) if columns else torch.as_tensor(index))
    slots = every if every.ndim == 1 else every[:, 0]
    for wrong in slots[(slots < -1) | (slots >= shards * capacity)].tolist():
        raise IndexError(f"index {wrong} is out of range: {shards} shards have {shards * capacity} slots")
    found = []
    for shard in range(shards):
        at = (slots.div(capacity, rounding_mode="floor") == shard).nonzero().squeeze(1)
        local = to_global(every[at], -shard, capacity)
        found.append((at, local.unbind(-1) if columns else local))
    return found
