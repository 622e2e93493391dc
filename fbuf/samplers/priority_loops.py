"""Draws and updates of few priorities, one after the other: on the CPU a kernel each, and few operations (see `fusion`)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from fbuf import priority_tree
from fbuf.fusion import (
    computed_once,
    entry,
    is_few,
    loop_variant,
    one_kernel_loop,
    put,
    word_of,
    zero_after,
    zero_after_reading,
)
from fbuf.priority_tree import PriorityTree

Value = Callable[[Array, Array], Array]  # of a priority and alpha: what an item weighs

Chances = tuple[Int[Array, " batch"], Float[Array, " batch"], Float[Array, ""], Bool[Array, ""]]


def chance(value: Array, total: Float[Array, ""]) -> Array:
    """The chance of what weighs `value`. One that underflows would make every weight that is measured by it zero."""
    return jnp.maximum(value / jnp.where(total > 0, total, 1), np.finfo(total.dtype).tiny)


@jax.jit
def chances(tree: PriorityTree, slots: Int[Array, " batch"]) -> Chances:
    """Slots that were found, the chance of each, the smallest of all, and whether there is any.

    All computed once (see `fusion.computed_once`): read later, they would be read after a write into the tree.
    """
    return one_kernel_loop(_chances, _all_chances)(tree, slots) if is_few(slots.shape[0]) else _all_chances(tree, slots)


def _all_chances(tree: PriorityTree, slots: Array) -> Chances:
    total = priority_tree.total(tree)
    smallest = chance(priority_tree.minimum(tree), total)
    return computed_once((slots, chance(priority_tree.get(tree, slots), total), smallest, total > 0))


def _chances(tree: PriorityTree, slots: Array) -> Chances:
    def body(k: Array, out: Chances) -> Chances:
        slot, total = entry(slots, k), loop_variant(priority_tree.total(tree), k)
        smallest = chance(loop_variant(priority_tree.minimum(tree), k), total)
        return put(out[0], slot, k), put(out[1], chance(entry(tree.leaves, slot), total), k), smallest, total > 0

    zero = zero_after(slots)
    none = zero.astype(tree.leaves.dtype)
    empty = jnp.full(slots.shape, zero), jnp.full(slots.shape, none), none, zero > 0
    return jax.lax.fori_loop(zero, slots.shape[0], body, empty)


def begun(value: Value, state: Any, slots: Array, changed: Array, allowed: Array) -> Any:
    """The state of `Prioritized` after items came into slots, and others may be drawn from now on, or not."""
    spare, count = state.priorities.size - 1, changed.shape[0]
    zero = zero_after(changed)

    def begin(k: Array, held: Array) -> Array:
        return put(held, state.highest, entry(slots, k))

    held = jax.lax.fori_loop(zero, slots.shape[0], begin, state.priorities)

    def exclude(k: Array, out: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        excluded, at, values = out
        slot = priority_tree.in_range(entry(changed, k), state.tree.capacity, spare)
        priority, may = entry(held, slot), entry(allowed, k)
        new = jnp.where(may & (priority >= 0), value(jnp.maximum(priority, 0), loop_variant(state.alpha, k)), 0)
        slot, new = priority_tree.accepted(state.tree, slot, new)
        return put(excluded, ~may & (slot < spare), slot), put(at, slot, k), put(values, new, k)

    empty = jnp.full(count, zero), jnp.full(count, zero.astype(held.dtype))
    excluded, at, values = jax.lax.fori_loop(zero, count, exclude, (state.excluded, *empty))
    tree = priority_tree.update_accepted(state.tree, at, values, settled=True)
    return dataclasses.replace(state, priorities=held, excluded=excluded, tree=tree)


def updated(value: Value, state: Any, slots: Array, priorities: Array) -> Any:
    """The state of `Prioritized` after an update. Of equal slots the last counts."""
    spare, count = state.priorities.size - 1, slots.shape[0]

    def kept(k: Array) -> Array:
        return word_of(entry(state.priorities, priority_tree.in_range(entry(slots, k), state.tree.capacity, spare)))

    zero = zero_after_reading(count, kept, zero_after(slots))

    def note(k: Array, held: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        table, at, refused = held
        priority = entry(priorities, k)
        good = jnp.isfinite(priority) & (priority >= 0)
        slot = jnp.where(good, priority_tree.in_range(entry(slots, k), state.tree.capacity, spare), spare)
        slot = jnp.where(entry(table, slot) >= 0, slot, spare)
        at = put(at, slot, k)
        slot = entry(at, k)  # so that XLA reads the table for it before it writes there, and copies none
        return put(table, jnp.where(slot < spare, priority, -1), slot), at, refused + ~good

    held = state.priorities, jnp.full(count, zero), state.refused
    held, at, refused = jax.lax.fori_loop(zero, count, note, held)
    zero = zero_after(at)

    def weigh(k: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
        values, highest = out
        slot = entry(at, k)
        settled = entry(held, slot)
        weighs = settled >= 0
        if state.excluded is not None:
            weighs &= ~entry(state.excluded, slot)
        new = jnp.where(weighs, value(jnp.maximum(settled, 0), loop_variant(state.alpha, k)), 0)
        _slot, new = priority_tree.accepted(state.tree, slot, new)
        return put(values, new, k), jnp.maximum(highest, settled)

    values = jnp.full(count, zero.astype(held.dtype))
    values, highest = jax.lax.fori_loop(zero, count, weigh, (values, state.highest))
    tree = priority_tree.update_accepted(state.tree, at, values, settled=True)
    return dataclasses.replace(state, priorities=held, refused=refused, highest=highest, tree=tree)
