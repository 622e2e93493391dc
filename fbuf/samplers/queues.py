"""The ring of slots that slices are drawn from, while it grows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fbuf import trajectories
from fbuf.fusion import divmod_unsigned, entry, loop_variant, one_kernel_loop, put, two_or_more, zero_after
from fbuf.ring_places import moved
from fbuf.trajectories import OPEN, Queued

FEW = 16  # items up to which a loop over them is faster on the CPU than kernels over all


@jax.jit
def push(queue: Array, last: Array, entered: Array, entries: Array) -> Array:
    """The queue with the entries that entered behind its last one."""
    return (one_kernel_loop(_pushed_one_by_one, _pushed) if entered.size <= FEW else _pushed)(
        queue, last, entered, entries
    )


def _pushed(queue: Array, last: Array, entered: Array, entries: Array) -> Array:
    room = jnp.uint32(queue.size - 1)
    place = (last + jnp.cumsum(entered, dtype=jnp.uint32) - entered) % room
    at, values = jnp.where(entered, place, room), jnp.where(entered, entries, 0)
    return queue.at[two_or_more(at)].set(two_or_more(values), mode="promise_in_bounds")


def _pushed_one_by_one(queue: Array, last: Array, entered: Array, entries: Array) -> Array:
    room = jnp.uint32(queue.size - 1)

    def body(k: Array, held: tuple[Array, Array]) -> tuple[Array, Array]:
        queue, place = held
        enters = entry(entered, k)
        queue = put(queue, jnp.where(enters, entry(entries, k), 0), jnp.where(enters, place, room))
        place = place + enters
        return queue, jnp.where(place == room, 0, place)

    return jax.lax.fori_loop(zero_after(last), entered.size, body, (queue, last))[0]


@functools.partial(jax.jit, static_argnums=0)
def push_ends(rule: Any, queued: Queued, write: Any) -> Queued:
    """The queue of ends of trajectories, which the rule keeps, after a write of few rows."""
    return one_kernel_loop(functools.partial(_ends_one_by_one, rule.shortest), rule.pushed_together)(queued, write)


def _ends_one_by_one(shortest: int, queued: Queued, write: Any) -> Queued:
    """The queue after a write of fewer rows than there are, and of the row before these, in a loop."""
    after, rows = write.after, write.count + 1
    capacity, lanes = after.number.shape

    def body(k: Array, queued: Queued) -> Queued:
        ring, leaving = loop_variant((write.ring, write.leaving), k)
        step, lane = divmod_unsigned(k, lanes)
        row = moved(ring.cursor, step - rows, capacity)
        there = divmod_unsigned(trajectories.cell(after.number, row, lane), capacity)[1]
        time = trajectories.time_of(ring, row, capacity)
        stored = trajectories.stored_before(ring, row, capacity)
        length = 1 + jnp.minimum((time - trajectories.cell(after.first, there, lane)).astype(jnp.int32), stored)
        closed = (trajectories.cell(after.kind, there, lane) != OPEN) & (
            trajectories.cell(after.last, there, lane) == time
        )
        closed &= (step > 0) | entry(write.before.is_open, lane)
        entered = (stored >= 0) & closed & (length >= shortest)
        return trajectories.queue_moved(
            queued, jnp.where(k == 0, leaving, 0), entered.astype(jnp.int32), row * lanes + lane
        )

    return jax.lax.fori_loop(zero_after(write.leaving), rows * lanes, body, queued)
