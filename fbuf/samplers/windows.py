"""The slots and masks of slices, and their starts within drawn trajectories."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from fbuf import random_words, trajectories
from fbuf.fusion import divmod_unsigned, entry, map_entries
from fbuf.samplers.uniform import scaled
from fbuf.trajectories import TrajectoryState
from fbuf.writers import RingState, moved

_STEPS = 4  # of a slice in one iteration of a loop
_PIECES = 512  # of slices up to which a loop is faster on the CPU than kernels over all
_FEW = 256  # and draws of starts

Queue = tuple[Array, Array]  # a ring of slots, and where its oldest entry is
Windows = tuple[Int[Array, "slices time"], Bool[Array, "slices time"], Int[Array, " slices"]]
# The queue of ends, its oldest and how many, and the lanes whose latest trajectory goes on.
Ends = tuple[Array, Array, Array, Array]
Drawn = tuple[Int[Array, " n"], Bool[Array, " n"], Float[Array, " n"]]  # which trajectory, whether any, and its chance
Starts = tuple[Int[Array, " n"], Float[Array, " n"], Float[Array, ""]]  # slots, chances, and the smallest of these


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
    """Slots, mask and starts of slices. `drawn` are starts, or with a queue places of starts in it.

    A slice that is not valid repeats its slot, with mask False. O(slices * time).
    """
    time = burn_in + length
    steps = min(_STEPS, time)
    parts = -(-time // steps)
    if drawn.size * parts > _PIECES:
        steps, parts = time, 1
    tables, shared = (
        (None if queue is None else queue[0], drawn, valid, index),
        (None if queue is None else queue[1], ring, drawn[0]),  # the last one only for the loop to wait for it
    )
    piece = functools.partial(_piece, burn_in, steps, parts)
    most = _PIECES if steps <= _STEPS else 0
    slots, mask, starts = map_entries(piece, drawn.size * parts, tables, shared, most=most, settled=True)
    slots, mask = (leaf.reshape(drawn.size, parts * steps)[:, :time] for leaf in (slots, mask))
    return slots, mask, starts[::parts]


def in_queue(queue: Array, head: Array, place: Array) -> Array:
    """The index of the entry that is `place` entries behind the oldest one of a queue."""
    room = jnp.uint32(queue.size - 1)
    return (head.astype(jnp.uint32) + place.astype(jnp.uint32)) % room


def _piece(burn_in: int, steps: int, parts: int, tables: Any, shared: Any, k: Array) -> tuple[Array, Array, Array]:
    """Slots and mask of some steps of one slice, and its start."""
    (queue, drawn, valid, index), (head, ring, _drawn) = tables, shared
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


@functools.partial(jax.jit, static_argnums=0)
def starts_within(length: int, key: Array, ends: Ends, drawn: Drawn, index: TrajectoryState, ring: RingState) -> Starts:
    """Starts of slices of `length` within drawn trajectories, each whole slice equally often.

    Trajectories are numbered: ended ones by their place in the queue, then open ones.
    """
    queue, head, ended, going = ends
    tables, shared = (queue, going, index), (head, ended, ring, random_words.words_of(key))
    start = functools.partial(_start, length)
    slots, chances = map_entries(start, drawn[0].shape[0], tables, shared, *drawn, most=_FEW, settled=True)
    return slots, chances, jnp.min(chances)


def _start(
    length: int, tables: Any, shared: Any, k: Array, which: Array, valid: Array, chance: Array
) -> tuple[Array, Array]:
    """The start of one slice and its chance."""
    (queue, going, index), (head, ended, ring, words) = tables, shared
    capacity, lanes = index.number.shape
    lane = entry(going, jnp.clip(which - ended, 0, lanes - 1))
    closed = entry(queue, in_queue(queue, head, jnp.minimum(which, jnp.maximum(ended - 1, 0))))
    newest = jnp.where(ring.cursor > 0, ring.cursor, capacity) - 1
    last = jnp.where(which < ended, closed, newest * lanes + lane)
    row, lane = divmod_unsigned(last, lanes)
    stored = jnp.where(valid, trajectories.place_of_one(index, ring, row, lane).before + 1, 1)
    choices = jnp.maximum(stored - length + 1, 1)
    high, low = random_words.pairs_at(words, k, True)
    back = stored - 1 - scaled(high, low, choices)
    return moved(row, -back, capacity) * lanes + lane, chance / choices.astype(jnp.float32)
