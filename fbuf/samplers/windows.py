"""The slots and masks of slices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from fbuf import trajectories
from fbuf.fusion import divmod_unsigned, entry, map_entries
from fbuf.ring_places import moved
from fbuf.trajectories import TrajectoryState
from fbuf.writers import RingState

_STEPS = 4  # of a slice in one iteration of a loop
_PIECES = 512  # up to which a loop is faster on the CPU than kernels over all

Queue = tuple[Array, Array]  # a ring of slots, and where its oldest entry is
Windows = tuple[Int[Array, "slices time"], Bool[Array, "slices time"], Int[Array, " slices"]]


@functools.partial(jax.jit, static_argnums=(0, 1))
def of(
    burn_in: int,
    length: int,
    queue: Queue | None,
    drawn: Int[Array, " slices"],
    valid: Bool[Array, " slices"],
    index: TrajectoryState,
    ring: RingState,
) -> Windows:
    """Slots and mask of slices, and where they begin: at the slots drawn, or at those that stand there in the queue.

    Where nothing was drawn the slot repeats, with mask False. O(slices * time).
    """
    time = burn_in + length
    steps = min(_STEPS, time)
    parts = -(-time // steps)
    if drawn.size * parts > _PIECES:
        steps, parts = time, 1
    tables, shared = (
        (None if queue is None else queue[0], drawn, valid, index),
        (None if queue is None else queue[1], ring),
    )
    piece = functools.partial(_piece, burn_in, steps, parts)
    most = _PIECES if steps <= _STEPS else 0
    slots, mask, starts = map_entries(piece, drawn.size * parts, tables, shared, most=most, settled=True)
    slots, mask = (leaf.reshape(drawn.size, parts * steps)[:, :time] for leaf in (slots, mask))
    return slots, mask, starts[::parts]


def in_queue(queue: Array, head: Array, place: Array) -> Array:
    """The element of the queue that is a number of entries behind its oldest."""
    room = jnp.uint32(queue.size - 1)
    return (head.astype(jnp.uint32) + place.astype(jnp.uint32)) % room


def _piece(burn_in: int, steps: int, parts: int, tables: Any, shared: Any, k: Array) -> tuple[Array, Array, Array]:
    """Slots and mask of some steps of one slice, and where the slice begins."""
    (queue, drawn, valid, index), (head, ring) = tables, shared
    capacity, lanes = index.number.shape
    which, part = divmod_unsigned(k, parts)
    slot, is_valid = entry(drawn, which), entry(valid, which)
    if queue is not None:
        slot = entry(queue, in_queue(queue, head, slot))
    row, lane = divmod_unsigned(slot, lanes)
    at = trajectories.place_of_one(index, ring, row, lane)
    before, after = jnp.where(is_valid, at.before, 0), jnp.where(is_valid, at.after, 0)
    offset = (part * steps).astype(jnp.int32) - burn_in + jnp.arange(steps, dtype=jnp.int32)
    rows = moved(row, jnp.clip(offset, -before, after), capacity)
    return rows * lanes + lane, (offset >= -before) & (offset <= after) & is_valid, slot
