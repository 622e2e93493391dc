"""The index of an item among those of all shards: its slot, plus the capacity of the shards before its own."""

from typing import Any

import torch
from torch import Tensor


def to_global(index: Any, shard: int, capacity: int) -> Any:
    """The index over all shards of items of one shard, in the form that it has there; -1 stays -1.

    Args:
        index: an int, an integer tensor [n], coordinates [n, ndim] or a tuple of them, as samplers and writers give it.
            Of several coordinates the first one counts on.
        shard: which shard, from 0.
        capacity: what `Storage.max_size` of every shard is.
    """
    return _moved(index, shard * capacity)


def to_local(index: Any, shards: int, capacity: int) -> list[tuple[Tensor, Any]]:
    """For each shard the positions in the index that are its own, int64, and the index there. Entries of -1 are dropped.

    IndexError for an index of no shard, before anything is returned.
    """
    if isinstance(index, tuple):
        index = tuple(torch.as_tensor(each).reshape(-1) for each in index)
        first = index[0]
    else:
        index = torch.as_tensor(index)
        index = index.reshape(-1) if index.ndim < 2 else index
        first = index if index.ndim == 1 else index[:, 0]
    if first.numel() and (int(first.max()) >= shards * capacity or int(first.min()) < -1):
        raise IndexError(f"index {int(first.max())} is out of range: {shards} shards have {shards * capacity} slots")
    found: list[tuple[Tensor, Any]] = []
    for shard in range(shards):
        at = ((first >= shard * capacity) & (first < (shard + 1) * capacity)).nonzero().squeeze(1)
        mine = tuple(each[at] for each in index) if isinstance(index, tuple) else index[at]
        found.append((at, _moved(mine, -shard * capacity)))
    return found


def _moved(index: Any, by: int) -> Any:
    """The index with `by` added to its first coordinate, in memory of its own where that changes anything."""
    if index is None or by == 0:
        return index
    if isinstance(index, int):
        return index + by if index >= 0 else index
    if isinstance(index, tuple):
        return (_moved(index[0], by), *index[1:])
    moved: Tensor = index.clone()
    first = moved if moved.ndim == 1 else moved.select(-1, 0)
    first += torch.where(first >= 0, by, 0)
    return moved
