"""The steps of a priority tree for few entries, one after the other: on the CPU each is a kernel, whatever the levels."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fbuf.fusion import divided, entry, following, nothing_of, part, put, word_of

_ABREAST = 4  # entries of one turn, which the processor computes side by side,
_MANY = 64  # from this many entries on

Choice = Callable[[Array, Array, Array, Array], tuple[Array, Array, Array]]


def set_in_order(table: Array, places: Array, values: Array) -> Array:
    """The table with values at places, which are in range; of equal ones the last stays."""

    def turn(k: Array, table: Array) -> Array:
        return put(table, entry(values, k), entry(places, k))

    return jax.lax.fori_loop(following(places), places.shape[0], turn, table)


def descend(fanout: int, below: Sequence[int], choose: Choice, nodes: Array, leaves: Array, place: tuple) -> Array:
    """The leaves that `choose` leads to from the root; `below` are the nodes where the levels under it begin."""
    count, kind = place[0].shape[0], place[1].dtype
    abreast = _ABREAST if count >= _MANY else 1
    padded = -(-count // abreast) * abreast  # with masses of zero, which are found like any other
    # In one array: of three XLA would copy two in each turn.
    held = jnp.stack([_as_float(place[0], kind), *place[1:]], 1)
    held = jnp.pad(held, ((0, padded - count), (0, 0)))

    def step(families: Array, start: Array, held: Array, out: Array | None) -> Array:
        """One level down; or the leaves, into `out`."""

        def ask(row: Array, seen: Array) -> Array:
            first = part(families, start + _as_node(entry(held, row)[0]) * fanout, 1)[0]
            return seen ^ word_of(first)

        # A level is asked for as a whole before it is worked on: a turn that does nothing else keeps a dozen reads under
        # way, where the working turns, of which few fit into a processor's window, wait for each.
        seen = jax.lax.fori_loop(0, padded, ask, following(held).astype(jnp.uint32))
        from_here = start + nothing_of(seen)

        def turn(group: Array, changed: Array) -> Array:
            here, *mass = part(changed if out is None else held, group * abreast, abreast).T
            node = _as_node(here)
            children = jnp.stack([part(families, from_here + node[k] * fanout, fanout) for k in range(abreast)])
            node, *mass = choose(children, node, *mass)
            chosen = jnp.stack([_as_float(node, kind), *mass], 1) if out is None else node
            return jax.lax.dynamic_update_slice_in_dim(changed, chosen, (group * abreast).astype(jnp.uint32), 0)

        return jax.lax.fori_loop(0, padded // abreast, turn, held if out is None else out)

    if below:
        starts, first = jnp.asarray(below, jnp.int32), following(place[1])
        held = jax.lax.fori_loop(
            first, len(below), lambda level, held: step(nodes, entry(starts, level), held, None), held
        )
    first = following(held)
    found = jnp.full(padded, first)
    found = jax.lax.fori_loop(first, 1, lambda _, found: step(leaves, jnp.int32(0), held, found), found)
    return found[:count]


def _as_float(node: Array, kind: Any) -> Array:
    return jax.lax.bitcast_convert_type(node, kind) if np.dtype(kind).itemsize == 4 else node.astype(kind)


def _as_node(value: Array) -> Array:
    return jax.lax.bitcast_convert_type(value, jnp.int32) if value.dtype.itemsize == 4 else value.astype(jnp.int32)


def climb(
    fanout: int,
    levels: tuple[tuple[int, int], ...],
    combine: Sequence[Callable[[Array, Array], Array]],
    first: Sequence[Callable[[Array], Array]],
    leaves: Array,
    kinds: list[Array],
    slots: Array,
) -> list[Array]:
    """Nodes of each kind of reduction, recomputed above slots; `levels` are (offset, nodes) from above the leaves on."""
    count = slots.shape[0]
    many = [i for i, (_, nodes) in enumerate(levels) if nodes > count]  # where a level is more than the batch

    def renewed(kinds: list[Array], families: list[Array], start: Array, node: Array) -> list[Array]:
        new = []
        for each, family, reduce, of in zip(kinds, families, combine, first, strict=True):
            children = of(part(family, start, fanout))
            new.append(put(each, functools.reduce(reduce, [children[k] for k in range(fanout)]), node))
        return new

    def lowest(k: Array, kinds: list[Array]) -> list[Array]:
        node = divided(entry(slots, k), fanout)[0] if many else k
        return renewed(kinds, [leaves] * len(kinds), node * fanout, node)

    kinds = jax.lax.fori_loop(0, count if many else levels[0][1], lowest, kinds)
    first = [lambda node: node] * len(kinds)
    if len(many) > 1:
        offsets = jnp.asarray([offset for offset, _ in levels], jnp.int32)
        spans = jnp.asarray([fanout ** (i + 1) for i in range(len(many))], jnp.int32)

        def middle(turn: Array, kinds: list[Array]) -> list[Array]:
            level, row = divided(turn, count)
            level = level + 1
            node = divided(entry(slots, row), entry(spans, level))[0]
            start = entry(offsets, level - 1) + node * fanout
            return renewed(kinds, kinds, start, entry(offsets, level) + node)

        kinds = jax.lax.fori_loop(0, (len(many) - 1) * count, middle, kinds)
    above = range(max(len(many), 1), len(levels))
    if not above:
        return kinds
    node = np.concatenate([np.arange(levels[i][1]) + levels[i][0] for i in above]).astype(np.int32)
    start = np.concatenate([np.arange(levels[i][1]) * fanout + levels[i - 1][0] for i in above]).astype(np.int32)
    nodes, starts = jnp.asarray(node), jnp.asarray(start)

    def top(k: Array, kinds: list[Array]) -> list[Array]:
        return renewed(kinds, kinds, entry(starts, k), entry(nodes, k))

    return jax.lax.fori_loop(0, node.size, top, kinds)
