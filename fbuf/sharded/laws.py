"""The two laws by which a batch is drawn from the parts of a buffer on several devices."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from fbuf import priority_tree
from fbuf.buffer import Buffer, BufferState
from fbuf.fusion import computed_once
from fbuf.samplers import Draw, Fifo, Prioritized
from fbuf.samplers.prioritized import chance, placed_masses
from fbuf.samplers.protocol import equal_chances
from fbuf.samplers.uniform import below
from fbuf.sharded.exchange import of_all

# A draw of the whole batch, its slots counted on this device, and which rows are from this device.
Found = tuple[Draw, Bool[Array, " batch"]]


def drawn_globally(part: Buffer, state: BufferState, key: Array, count: int, axis: str) -> Found:
    """The draw that one buffer with the items of all devices would make. One all-reduce of a few numbers a device.

    Every device computes the places of all `count` rows from the key, and looks up those that are in its part.
    """
    draw, own = (_by_priority if isinstance(part.sampler, Prioritized) else _uniformly)(part, state, key, count, axis)
    if part.frames:
        draw = dataclasses.replace(draw, valid=draw.valid & part.intact(state, draw.slots))
    return draw, own


def _uniformly(part: Buffer, state: BufferState, key: Array, count: int, axis: str) -> Found:
    sizes = of_all(part.size(state), axis)
    ends, stored = jnp.cumsum(sizes, dtype=jnp.int32), jnp.sum(sizes, dtype=jnp.int32)
    places = below(key, count, jnp.maximum(stored, 1)) - (ends - sizes)[jax.lax.axis_index(axis)]
    own = (places >= 0) & (places < part.size(state))
    slots = computed_once(jnp.where(own, places, 0))
    return equal_chances(slots, jnp.broadcast_to(stored > 0, (count,)), stored), own


def _by_priority(part: Buffer, state: BufferState, key: Array, count: int, axis: str) -> Found:
    """The devices are the leaves of a tree over their totals: the levels that one tree over all items has above theirs."""
    assert isinstance(part.sampler, Prioritized)
    tree, rule = state.sampler.tree, part.sampler
    mine = part.size(state), priority_tree.total(tree), priority_tree.minimum(tree)
    sizes, totals, minima = of_all(mine, axis)
    above = priority_tree.fill(priority_tree.init(totals.shape[0], dtype=rule.dtype, minima=False), totals)
    total = priority_tree.total(above)
    device, masses = priority_tree.find_rest(above, placed_masses(key, count, total, rule.stratified))
    own = device == jax.lax.axis_index(axis)
    slots = priority_tree.find_placed(tree, jnp.where(own[:, None], masses, 0))
    # Computed before later writes into the tree (see `computed_once`).
    slots, probability = computed_once((slots, chance(priority_tree.get(tree, slots), total)))
    valid, smallest = jnp.broadcast_to(total > 0, (count,)), chance(jnp.min(minima), total)
    return Draw(slots, probability, valid, smallest, jnp.sum(sizes, dtype=jnp.int32)), own


def corrected(part: Buffer, draw: Draw, axis: str) -> Draw:
    """A draw from one part as rows of the batch of all parts. One all-reduce of a few numbers a device.

    The probability of an item becomes that in a random row of the batch: the chance that a row comes from this device,
    times the chance there.
    """
    rows = jnp.sum(draw.valid, dtype=jnp.int32)
    if part.frames:  # a row is invalid by chance; the others of its device are still a whole share
        rows = ((draw.size > 0) & jnp.isfinite(draw.smallest)).astype(jnp.int32)
    all_rows, sizes, smallest = of_all((rows, draw.size, draw.smallest), axis)
    size, kind = jnp.sum(sizes, dtype=jnp.int32), draw.probability.dtype
    share = all_rows.astype(kind) / jnp.maximum(jnp.sum(all_rows), 1).astype(kind)
    probability = draw.probability * share[jax.lax.axis_index(axis)]
    least = jnp.min(jnp.where(all_rows > 0, smallest * share, jnp.inf))
    if isinstance(part.sampler, Fifo):  # each item is returned once, wherever it is
        least = 1 / jnp.maximum(size, 1).astype(kind)
        probability = jnp.broadcast_to(least, probability.shape)
    return dataclasses.replace(draw, probability=probability, smallest=least, size=size)
