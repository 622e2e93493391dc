"""Updates and searches of a priority tree for few entries, in loops that are one kernel each on the CPU."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fbuf.fusion import entry, part, put, word_of, zero_after, zero_after_reading

_ABREAST = 4  # entries of one iteration, which the processor computes side by side,
_MANY = 64  # from this many entries on

Choice = Callable[[Array, Array, Array, Array], tuple[Array, Array, Array]]


def set_in_order(table: Array, places: Array, values: Array) -> Array:
    """The table with values at places in range; of equal places the last wins."""

    def body(k: Array, table: Array) -> Array:
        return put(table, entry(values, k), entry(places, k))

    return jax.lax.fori_loop(zero_after(places), places.shape[0], body, table)


def descend(fanout: int, below: Sequence[int], choose: Choice, nodes: Array, leaves: Array, place: tuple) -> Array:
    """The leaves that `choose` finds from the root; `below` are the nodes where the levels under it begin."""
    count, kind = place[0].shape[0], place[1].dtype
    abreast = _ABREAST if count >= _MANY else 1
    padded = -(-count // abreast) * abreast  # with masses of zero, which are found like any other
    # In one array: of three XLA would copy two in each iteration.
    held = jnp.stack([_as_float(place[0], kind), *place[1:]], 1)
    held = jnp.pad(held, ((0, padded - count), (0, 0)))

    def step(families: Array, start: Array, held: Array, out: Array | None) -> Array:
        """One level down; or the leaves, into `out`."""

        def first_child(row: Array) -> Array:
            node = _as_node(jax.lax.dynamic_slice(held, (row.astype(jnp.uint32), jnp.uint32(0)), (1, 1))[0, 0])
            return word_of(entry(families, start + node * fanout))

        # A prefetch: the search waits for each of its reads.
        from_here = start + zero_after_reading(padded, first_child, zero_after(held))

        def body(group: Array, changed: Array) -> Array:
            here, *mass = part(changed if out is None else held, group * abreast, abreast).T
            node = _as_node(here)
            children = jnp.stack([part(families, from_here + node[k] * fanout, fanout) for k in range(abreast)])
            node, *mass = choose(children, node, *mass)
            chosen = jnp.stack([_as_float(node, kind), *mass], 1) if out is None else node
            return jax.lax.dynamic_update_slice_in_dim(changed, chosen, (group * abreast).astype(jnp.uint32), 0)

        return jax.lax.fori_loop(0, padded // abreast, body, held if out is None else out)

    if below:
        starts, first = jnp.asarray(below, jnp.int32), zero_after(place[1])
        held = jax.lax.fori_loop(
            first, len(below), lambda level, held: step(nodes, entry(starts, level), held, None), held
        )
    first = zero_after(held)
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
    many = [i for i, (_, nodes) in enumerate(levels) if nodes > count]  # levels that are larger than the batch
    shift = fanout.bit_length() - 1
    run = _is_run(slots) if many and count > fanout else jnp.bool_(False)

    def visited(height: Array) -> tuple[Array, Callable[[Array], Array]]:
        """The number of nodes of a level to recompute, and the k-th of them; a run needs each of its parents once."""
        bits = shift * (height + 1)
        number = jnp.where(run, jnp.minimum((count - 1 >> bits) + 2, count), count)
        step = jnp.where(run, bits, 0)
        return number, lambda k: entry(slots, jnp.minimum(k << step, count - 1)) >> bits

    def renewed(kinds: list[Array], families: list[Array], start: Array, node: Array) -> list[Array]:
        new = []
        for each, family, reduce, of in zip(kinds, families, combine, first, strict=True):
            children = of(part(family, start, fanout))
            new.append(put(each, functools.reduce(reduce, [children[k] for k in range(fanout)]), node))
        return new

    def lowest(node: Array, kinds: list[Array]) -> list[Array]:
        return renewed(kinds, [leaves] * len(kinds), node * fanout, node)

    if many:
        number, node_of = visited(jnp.int32(0))
        kinds = jax.lax.fori_loop(0, number, lambda k, kinds: lowest(node_of(k), kinds), kinds)
    else:
        kinds = jax.lax.fori_loop(0, levels[0][1], lowest, kinds)
    first = [lambda node: node] * len(kinds)
    if len(many) > 1:
        offsets = jnp.asarray([offset for offset, _ in levels], jnp.int32)

        def middle(height: Array, kinds: list[Array]) -> list[Array]:
            number, node_of = visited(height)
            below, here = entry(offsets, height - 1), entry(offsets, height)

            def body(k: Array, kinds: list[Array]) -> list[Array]:
                node = node_of(k)
                return renewed(kinds, kinds, below + node * fanout, here + node)

            return jax.lax.fori_loop(0, number, body, kinds)

        kinds = jax.lax.fori_loop(1, len(many), middle, kinds)
    above = range(max(len(many), 1), len(levels))
    if not above:
        return kinds
    node = np.concatenate([np.arange(levels[i][1]) + levels[i][0] for i in above]).astype(np.int32)
    start = np.concatenate([np.arange(levels[i][1]) * fanout + levels[i - 1][0] for i in above]).astype(np.int32)
    nodes, starts = jnp.asarray(node), jnp.asarray(start)

    def top(k: Array, kinds: list[Array]) -> list[Array]:
        return renewed(kinds, kinds, entry(starts, k), entry(nodes, k))

    # XLA would unroll a loop of one node, and copy the nodes because others read what the node is computed from.
    return jax.lax.fori_loop(zero_after(kinds[0]), node.size, top, kinds)


def _is_run(slots: Array) -> Array:
    """Whether slots are consecutive, like those of new rows. Stops at the first that is not."""
    count = slots.shape[0]

    def follows(k: Array) -> Array:
        return (k < count) & (entry(slots, jnp.minimum(k, count - 1)) == entry(slots, jnp.int32(0)) + k)

    return jax.lax.while_loop(follows, lambda k: k + 1, zero_after(slots)) == count
