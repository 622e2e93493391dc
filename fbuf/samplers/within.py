"""Where slices begin within trajectories that were drawn: at each of their whole slices equally often."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from fbuf import random_words, trajectories
from fbuf.fusion import as_one_kernel, computed_once, divided, entry, following, put, varying
from fbuf.ring_places import moved
from fbuf.samplers.uniform import below, scaled
from fbuf.samplers.windows import in_queue
from fbuf.trajectories import TrajectoryState
from fbuf.writers import RingState

_FEW = 256  # draws up to which a loop is faster on the CPU than kernels over all

# The queue of ends, its oldest and how many, and the lanes whose latest goes on.
Ends = tuple[Array, Array, Array, Array]
Drawn = tuple[Int[Array, " n"], Bool[Array, " n"], Float[Array, " n"]]  # which trajectory, whether any, and its chance
Starts = tuple[Int[Array, " n"], Float[Array, " n"], Float[Array, ""]]  # slots, chances, and the smallest of these


@functools.partial(jax.jit, static_argnums=0)  # outside of any program its loop would be compiled in every call
def starts(length: int, key: Array, ends: Ends, drawn: Drawn, index: TrajectoryState, ring: RingState) -> Starts:
    """Starts of slices of `length`. Trajectories are numbered: those that ended by their place in the queue, then others."""
    words = random_words.words_of(key)
    if words is None or not 1 < drawn[0].shape[0] <= _FEW:
        return _in_all(length, key, ends, drawn, index, ring)
    return as_one_kernel(functools.partial(_one_by_one, length), functools.partial(_in_all, length))(
        words, ends, drawn, index, ring
    )


def _in_all(length: int, key: Array, ends: Ends, drawn: Drawn, index: TrajectoryState, ring: RingState) -> Starts:
    (capacity, lanes), (which, valid, chance) = index.number.shape, drawn
    queue, head, count, going = ends
    lane = going[jnp.clip(which - count, 0, lanes - 1)]
    place = in_queue(queue, head, jnp.minimum(which, jnp.maximum(count - 1, 0)))
    closed = queue.at[place].get(mode="promise_in_bounds")
    last = computed_once(jnp.where(which < count, closed, _newest(ring.cursor, capacity) * lanes + lane))
    stored = jnp.where(valid, trajectories.place(index, ring, last).before + 1, 1)
    choices = jnp.maximum(stored - length + 1, 1)
    back = stored - 1 - below(key, which.shape[0], choices, another=True)
    row, lane = divided(last, lanes)
    chance = chance / choices.astype(jnp.float32)
    return computed_once(moved(row, -back, capacity) * lanes + lane), chance, jnp.min(chance)


def _one_by_one(length: int, words: Array, ends: Ends, drawn: Drawn, index: TrajectoryState, ring: RingState) -> Starts:
    capacity, lanes = index.number.shape
    queue, _head, _count, going = ends

    def turn(k: Array, out: Starts) -> Starts:
        slots, chances, smallest = out
        key, head, count, now = varying((words, *ends[1:3], ring), k)
        which, valid, chance = (entry(each, k) for each in drawn)
        lane = entry(going, jnp.clip(which - count, 0, lanes - 1))
        closed = entry(queue, in_queue(queue, head, jnp.minimum(which, jnp.maximum(count - 1, 0))))
        last = jnp.where(which < count, closed, _newest(now.cursor, capacity) * lanes + lane)
        row, lane = divided(last, lanes)
        stored = jnp.where(valid, trajectories.place_of_one(index, now, row, lane).before + 1, 1)
        choices = jnp.maximum(stored - length + 1, 1)
        random = scaled(*random_words.pairs_at(key, k.astype(jnp.uint32)[None], True), choices[None])[0]
        slot = moved(row, -(stored - 1 - random), capacity) * lanes + lane
        chance = chance / choices.astype(jnp.float32)
        return put(slots, slot, k), put(chances, chance, k), jnp.minimum(smallest, chance)

    zero, count = following(drawn[0]), drawn[0].shape[0]
    empty = jnp.full(count, zero), jnp.full(count, zero.astype(jnp.float32)), zero + jnp.float32(jnp.inf)
    return jax.lax.fori_loop(zero, count, turn, empty)


def _newest(cursor: Array, capacity: int) -> Array:
    return jnp.where(cursor > 0, cursor, capacity) - 1
