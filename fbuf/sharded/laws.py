"""The two laws by which a batch is drawn from the parts of a buffer on several devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from fbuf import priority_tree
from fbuf.buffer import Buffer, BufferState
from fbuf.fusion import computed_once
from fbuf.samplers import Draw, Fifo, Prioritized
from fbuf.samplers.in_order import chance
from fbuf.samplers.prioritized import PrioritizedState, placed_masses
from fbuf.samplers.uniform import below
from fbuf.sharded.collectives import of_all

Found = tuple[
    Draw, Bool[Array, " batch"]
]  # a draw of the whole batch with local slots, and which rows are of this device


def drawn_globally(part: Buffer, state: BufferState, key: Array, count: int, axis: str) -> Found:
    """The draw that one buffer with the items of all devices would make. One all-reduce of a few numbers a device.

    Every device computes the places of all `count` rows from the key, and looks up those that are in its part.
    """
    if isinstance(part.sampler, Prioritized):
        draw, own = _by_priority(part.sampler, state.sampler, part.size(state), key, count, axis)
    else:
        draw, own = _uniformly(part.size(state), key, count, axis)
    if part.frames:
        draw = dataclasses.replace(draw, valid=draw.valid & part.intact(state, draw.slots))
    return draw, own


def _uniformly(size: Int[Array, ""], key: Array, count: int, axis: str) -> Found:
    sizes = of_all(size, axis)
    ends, stored = jnp.cumsum(sizes), jnp.sum(sizes)
    places = below(key, count, jnp.maximum(stored, 1))
    end = ends[jax.lax.axis_index(axis)]
    own = (places >= end - size) & (places < end)
    probability = 1 / jnp.maximum(stored, 1).astype(jnp.float32)
    draw = Draw(
        slots=computed_once(jnp.where(own, places - (end - size), 0)),
        probability=jnp.broadcast_to(probability, (count,)),
        valid=jnp.broadcast_to(stored > 0, (count,)),
        smallest=probability,
        size=stored,
    )
    return draw, own


def _by_priority(
    rule: Prioritized, state: PrioritizedState, size: Int[Array, ""], key: Array, count: int, axis: str
) -> Found:
    """The devices are the leaves of a tree over their totals: the levels that one tree over all items has above theirs."""
    tree = state.tree
    sizes, totals, minima = of_all((size, priority_tree.total(tree), priority_tree.minimum(tree)), axis)
    above = priority_tree.fill(priority_tree.init(totals.shape[0], dtype=rule.dtype, minima=False), totals)
    total = priority_tree.total(above)
    device, masses = priority_tree.find_rest(above, placed_masses(key, count, total, rule.stratified))
    own = device == jax.lax.axis_index(axis)
    slots = priority_tree.find_placed(tree, jnp.where(own[:, None], masses, 0))
    probability = chance(priority_tree.get(tree, slots), total)
    slots, probability = computed_once((slots, probability))  # before later writes into the tree
    draw = Draw(
        slots=slots,
        probability=probability,
        valid=jnp.broadcast_to(total > 0, (count,)),
        smallest=chance(jnp.min(minima), total),
        size=jnp.sum(sizes),
    )
    return draw, own


def corrected(part: Buffer, draw: Draw, axis: str) -> Draw:
    """A draw from one part as rows of the batch of all parts. One all-reduce of a few numbers a device.

    The probability of an item becomes that in a random row of the batch: the chance that the row comes from this
    device, times the chance there.
    """
    rows: Int[Array, ""] = jnp.sum(draw.valid, dtype=jnp.int32)
    if part.frames:  # a row may be lost by chance, which says nothing about the others
        rows = ((draw.size > 0) & jnp.isfinite(draw.smallest)).astype(jnp.int32)
    all_rows, sizes, smallest = of_all((rows, draw.size, draw.smallest), axis)
    size = jnp.sum(sizes)
    if isinstance(part.sampler, Fifo):  # each item is returned once, wherever it is
        every: Float[Array, ""] = 1 / jnp.maximum(size, 1).astype(draw.probability.dtype)
        probability, least = jnp.broadcast_to(every, draw.probability.shape), every
    else:
        share = all_rows.astype(draw.probability.dtype) / jnp.maximum(jnp.sum(all_rows), 1)
        probability = draw.probability * share[jax.lax.axis_index(axis)]
        least = jnp.min(jnp.where(all_rows > 0, smallest * share, jnp.inf))
    return dataclasses.replace(draw, probability=probability, smallest=least, size=size)


def moved_by(draw: Draw, first: Int[Array, ""]) -> Draw:
    """The draw with slots counted from another first one."""
    starts: Any = None if draw.starts is None else draw.starts + first
    return dataclasses.replace(draw, slots=draw.slots + first, starts=starts)
