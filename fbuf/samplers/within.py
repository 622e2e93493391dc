"""Starts of slices within drawn trajectories: each whole slice equally often."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from fbuf import random_words, trajectories
from fbuf.fusion import divmod_unsigned, entry, map_entries
from fbuf.ring_places import moved
from fbuf.samplers.uniform import scaled
from fbuf.samplers.windows import in_queue
from fbuf.trajectories import TrajectoryState
from fbuf.writers import RingState

_FEW = 256  # draws up to which a loop is faster on the CPU than kernels over all

# The queue of ends, its oldest and how many, and the lanes whose latest goes on.
Ends = tuple[Array, Array, Array, Array]
Drawn = tuple[Int[Array, " n"], Bool[Array, " n"], Float[Array, " n"]]  # which trajectory, whether any, and its chance
Starts = tuple[Int[Array, " n"], Float[Array, " n"], Float[Array, ""]]  # slots, chances, and the smallest of these


@functools.partial(jax.jit, static_argnums=0)
def starts(length: int, key: Array, ends: Ends, drawn: Drawn, index: TrajectoryState, ring: RingState) -> Starts:
    """Starts of slices of `length`. Trajectories are numbered: those that ended by their place in the queue, then others."""
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
