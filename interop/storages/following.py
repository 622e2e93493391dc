"""Have the samplers of this process know of rows that other processes wrote, and of edits."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from interop.storages.storage import Storage


def followers(storage: "Storage") -> list[Any]:
    """The buffers on the storage whose samplers must be told of writes, which another process cannot do."""
    return [each for each in storage.buffers() if each.sampler.follows_writes]


def standing(storage: "Storage") -> tuple[int, ...]:
    """What this process knows of the rows when it releases the lock."""
    return (*storage.ring.counts, len(storage))


def follow(storage: "Storage", before: tuple[int, ...]) -> None:
    """Call `mark_update` for rows that were written since, around the ring; empty the samplers of a storage that was
    emptied. Of rows that were written elsewhere only the writer knows."""
    if standing(storage) == before:  # of a first write that failed nothing says how many rows there are
        return
    written, _, _, length = before
    ring, rows = storage.ring, storage.row_capacity(None)
    count = min(ring.written - written, rows)
    new = torch.arange(ring.cursor - count, ring.cursor, device="cpu") % max(rows, 1)
    new = new[new < storage.filled_rows]
    for buffer in followers(storage):
        if len(storage) < length:
            buffer.sampler.clear()
            new = torch.arange(storage.filled_rows, device="cpu")
        if len(new):
            buffer.mark_update(storage.coordinates(new))


def edited(storage: "Storage", known: int | None) -> tuple[int, np.ndarray]:
    """How many edits there were, and the flat slots of rows that were edited after the first `known`, the oldest row first.

    These are all slots where `known` is None, or what was edited is not known row by row.
    """
    ring, length, rows = storage.ring, len(storage), storage.filled_rows
    edits: int = ring.version
    if edits == known or not length:
        return edits, np.zeros(0, np.int64)
    named = None if known is None else ring.since(known)
    changed = np.full(rows, named is None)
    for each in named or ():
        changed[each] = True
    places = (np.flatnonzero(np.roll(changed, -ring.cursor)) + ring.cursor) % rows
    lanes = length // rows
    return edits, (places[:, None] * lanes + np.arange(lanes)).reshape(-1)
