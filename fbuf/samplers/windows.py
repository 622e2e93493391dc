"""The slots that slices cover."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from fbuf import trajectories
from fbuf.fusion import as_one_kernel, computed_once, divided, entry, following, put, varying
from fbuf.ring_places import moved
from fbuf.trajectories import TrajectoryState
from fbuf.writers import RingState

_STEPS = 4  # of a slice in a turn of a loop
_TURNS = 512  # up to which a loop is faster on the CPU than kernels over all

Queue = tuple[Array, Array]  # a ring of slots, and where its oldest entry is
Windows = tuple[Int[Array, "slices time"], Bool[Array, "slices time"], Int[Array, " slices"]]


@functools.partial(jax.jit, static_argnums=(0, 1))  # outside of any program its loop would be compiled in every call
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
    in_all = functools.partial(_in_all, burn_in, length)
    if not 0 < drawn.size * -(-(burn_in + length) // _STEPS) <= _TURNS:
        return in_all(queue, drawn, valid, index, ring)
    return as_one_kernel(functools.partial(_one_by_one, burn_in, length), in_all)(queue, drawn, valid, index, ring)


def in_queue(queue: Array, head: Array, place: Array) -> Array:
    """Which element of the queue is a number of entries behind its oldest."""
    room = jnp.uint32(queue.size - 1)
    return (head.astype(jnp.uint32) + place.astype(jnp.uint32)) % room


def _in_all(
    burn_in: int, length: int, queue: Queue | None, drawn: Array, valid: Array, index: TrajectoryState, ring: RingState
) -> Windows:
    lanes = index.latest.size
    if queue is not None:
        drawn = computed_once(queue[0].at[in_queue(*queue, drawn)].get(mode="promise_in_bounds"))
    at = trajectories.place(index, ring, drawn)
    offset = jnp.arange(-burn_in, length, dtype=jnp.int32)[None]
    row, lane = (part[:, None] for part in divided(drawn, lanes))
    slots, mask = _steps(offset, row, lane, at.before[:, None], at.after[:, None], valid[:, None], index.number.shape)
    slots, drawn = computed_once((slots, drawn))
    return slots, mask, drawn


def _one_by_one(
    burn_in: int, length: int, queue: Queue | None, drawn: Array, valid: Array, index: TrajectoryState, ring: RingState
) -> Windows:
    """The same in a loop, whose turns write some steps of one slice each."""
    time, lanes = burn_in + length, index.latest.size
    steps = min(_STEPS, time)
    parts = -(-time // steps)

    def turn(k: Array, out: Windows) -> Windows:
        which, piece = divided(k, parts)
        start = jnp.minimum(piece * steps, time - steps)
        slot = entry(drawn, which)
        if queue is not None:
            slot = entry(queue[0], in_queue(queue[0], varying(queue[1], k), slot))
        row, lane = divided(slot, lanes)
        at = trajectories.place_of_one(index, varying(ring, k), row, lane)
        offset = start - burn_in + jnp.arange(steps, dtype=jnp.int32)
        slots, mask = _steps(offset, row, lane, at.before, at.after, entry(valid, which), index.number.shape)
        place = which.astype(jnp.uint32), start.astype(jnp.uint32)
        return (
            jax.lax.dynamic_update_slice(out[0], slots[None], place),
            jax.lax.dynamic_update_slice(out[1], mask[None], place),
            put(out[2], slot, which),
        )

    shape, zero = (drawn.size, time), following(drawn)
    out = jnp.full(shape, zero), jnp.full(shape, zero > 0), jnp.full(drawn.size, zero)
    return jax.lax.fori_loop(zero, drawn.size * parts, turn, out)


def _steps(
    offset: Array, row: Array, lane: Array, before: Array, after: Array, valid: Array, shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """Slots some steps from a row, held to what is stored of its trajectory before and after it; and which need no hold."""
    before, after = jnp.where(valid, before, 0), jnp.where(valid, after, 0)
    rows = moved(row, jnp.clip(offset, -before, after), shape[0])
    return rows * shape[1] + lane, (offset >= -before) & (offset <= after) & valid
