"""Sums, minima and maxima over one value a slot; update and find in O(log capacity).

A tree of fan-out 8, kept as flat arrays: the leaves, then for each reduction its levels from just above the leaves up to
the root. A parent is always recomputed from its children, in one fixed order of additions: sums cannot drift, a parent
is positive exactly when a child is, and every backend holds the same bits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from fbuf import checks, tree_in_loops
from fbuf.fusion import by_device, gather, one_kernel_loop, two_or_more, zero_after
from fbuf.keywords import checked
from fbuf.short_text import ShortText

FANOUT = 8
LARGEST = 2**31 - 1 - FANOUT  # capacity, so that every leaf has an int32 number
_IN_LOOPS = 1024  # updates up to which loops over them are faster on the CPU than kernels over all
FOUND_IN_LOOPS = 512  # and masses up to which drawing and finding them in loops is
_DENSE, _SMALL = 16, 2**18  # nodes an entry, and nodes, up to which accelerators recompute a whole level
_CLIP = "promise_in_bounds"  # every index below is made to be in bounds; JAX's default would test it again


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PriorityTree(ShortText):
    """One value a slot and its reductions. Zero means empty; empty slots are never found.

    Attributes:
        leaves: [width], width > capacity: the last leaf takes the writes that are to be ignored, and stays zero.
        sums: [nodes]: level by level from just above the leaves; the root is the first of the last eight.
        minima: [nodes] of the positive leaves, infinite where there is none; None: not kept.
        maxima: [nodes], None: not kept.
        capacity: slots; fixed while tracing.

    Attributes:
        leaves: TODO.
        sums: TODO.
        minima: TODO.
        maxima: TODO.
        capacity: slots; fixed while tracing.
    """

    leaves: Array
    sums: Array
    minima: Array | None
    maxima: Array | None
    capacity: int = dataclasses.field(metadata={"static": True})


@functools.cache
def _levels(width: int) -> tuple[tuple[int, int], ...]:
    """(offset, nodes) of each level above `width` leaves, the root last. Offsets are multiples of the fan-out."""
    levels, offset, nodes = [], 0, width
    while True:
        nodes = -(-nodes // FANOUT)
        levels.append((offset, nodes))
        if nodes == 1:
            return tuple(levels)
        offset += _padded(nodes)


@checked
def init(capacity: int, *, dtype: str = "float32", minima: bool = True, maxima: bool = False) -> PriorityTree:
    """An empty tree. Memory: about 8/7 of a value a slot for the sums, 1/7 more for each other reduction."""
    capacity = checks.as_int("capacity", capacity)
    if capacity > LARGEST:
        raise ValueError(f"capacity must be an int from 1 to {LARGEST}, got {capacity!r}")
    if dtype not in ("float32", "float64"):
        raise ValueError(f"dtype must be 'float32' or 'float64', got {dtype!r}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"dtype={dtype!r} needs 64-bit types: set jax_enable_x64, or use dtype='float32'")
    width = -(-(capacity + 1) // FANOUT) * FANOUT
    nodes = _levels(width)[-1][0] + FANOUT
    kind = np.dtype(dtype)
    return PriorityTree(
        leaves=jnp.zeros(width, kind),
        sums=jnp.zeros(nodes, kind),
        minima=jnp.full(nodes, jnp.inf, kind) if minima else None,
        maxima=jnp.zeros(nodes, kind) if maxima else None,
        capacity=capacity,
    )


@checked
def total(tree: PriorityTree) -> Float[Array, ""]:
    """Sum of all values. O(1)."""
    return tree.sums[-FANOUT]


@checked
def minimum(tree: PriorityTree) -> Float[Array, ""]:
    """Smallest positive value; infinite in an empty tree. O(1)."""
    if tree.minima is None:
        raise ValueError("this tree keeps no minima: build it with init(..., minima=True)")
    return tree.minima[-FANOUT]


@checked
def get(tree: PriorityTree, slots: Int[Array, " batch"]) -> Float[Array, " batch"]:
    """Values at slots; zero where a slot is out of range. O(batch)."""
    return gather(tree.leaves, in_range(slots, tree.capacity, tree.leaves.size - 1))


@checked
def in_range(slots: Int[Array, " batch"], capacity: int, other: int) -> Int[Array, " batch"]:
    """Slots of any integer type as int32; those outside [0, capacity) become `other`."""
    if slots.dtype.itemsize < 4:
        slots = slots.astype(jnp.int32)
    return jnp.where((slots >= 0) & (slots < capacity), slots, other).astype(jnp.int32)


@checked
def last_of_equal(scratch: Array, slots: Int[Array, " batch"]) -> tuple[Array, Int[Array, " batch"]]:
    """For each entry the position of the last entry with the same slot, without sorting. O(batch).

    The order of a scatter with equal indices is undefined in JAX. Here equal indices either write equal values or meet in
    a maximum, so every backend agrees. `scratch` is any float array that the slots index; it is returned with marks at
    these slots, which the caller overwrites. Exact up to 2^24 entries (float32) or 2^53 (float64).
    """
    count = slots.shape[0]
    if count >= 2 ** (np.finfo(scratch.dtype).nmant + 1):
        raise ValueError(f"at most {2 ** (np.finfo(scratch.dtype).nmant + 1) - 1} slots in one update, got {count}")
    scratch = scratch.at[slots].set(-1, mode=_CLIP)
    scratch = scratch.at[slots].max(jnp.arange(count, dtype=scratch.dtype), mode=_CLIP)
    return scratch, scratch.at[slots].get(mode=_CLIP).astype(jnp.int32)


@jax.jit
@checked
def set_last(
    table: Array, slots: Int[Array, " batch"], values: Float[Array, " batch"]
) -> tuple[Array, Float[Array, " batch"]]:
    """Set a table at slots in range; of equal slots the last wins. Returns it and its values at the slots. O(batch)."""
    few = 0 < slots.shape[0] <= _IN_LOOPS
    return (one_kernel_loop(_set_in_order, _set_winners) if few else _set_winners)(table, slots, values)


def _set_in_order(table: Array, slots: Array, values: Array) -> tuple[Array, Array]:
    table = tree_in_loops.set_in_order(table, slots, values)
    return table, gather(table, slots)


def _set_winners(table: Array, slots: Array, values: Array) -> tuple[Array, Array]:
    table, winner = last_of_equal(table, slots)
    settled = values.at[winner].get(mode=_CLIP)
    return table.at[slots].set(settled, mode=_CLIP), settled


@functools.partial(jax.jit, static_argnames="settled")
@checked
def update(
    tree: PriorityTree, slots: Int[Array, " batch"], values: Float[Array, " batch"], *, settled: bool = False
) -> PriorityTree:
    """Set values. Of equal slots the last wins; slots out of range and values that are negative or not finite are ignored.

    Pass `settled` if equal slots have equal values; it is faster. Values are limited to the largest one whose total over
    all slots is finite. O(batch * log capacity).
    """
    if slots.ndim != 1 or values.shape != slots.shape:
        raise ValueError(f"one value for each slot of [batch] is needed, got {values.shape} for {slots.shape}")
    if slots.shape[0] == 0:
        return tree
    slots, values = two_or_more(slots), two_or_more(values)
    return update_accepted(tree, *accepted(tree, slots, values), settled=settled)


@checked
def accepted(tree: PriorityTree, slots: Array, values: Array) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """Checked slots and values for `update_accepted`. Ignored entries go to the spare leaf, with value 0."""
    spare, values = tree.leaves.size - 1, values.astype(tree.leaves.dtype)
    at = jnp.where(jnp.isfinite(values) & (values >= 0), in_range(slots, tree.capacity, spare), spare)
    return at, jnp.where(at < spare, jnp.minimum(values, _highest_value(tree)), 0)


@functools.partial(jax.jit, static_argnames="settled")
@checked
def update_accepted(tree: PriorityTree, at: Array, values: Array, *, settled: bool = False) -> PriorityTree:
    """`update` for two slots or more, after `accepted`."""
    if at.shape[0] > _IN_LOOPS:
        return _update_whole(settled, tree, at, values)
    return one_kernel_loop(_update_in_loops, functools.partial(_update_whole, settled))(tree, at, values)


def _update_whole(settled: bool, tree: PriorityTree, at: Array, values: Array) -> PriorityTree:
    leaves = tree.leaves.at[at].set(values, mode=_CLIP) if settled else _set_winners(tree.leaves, at, values)[0]
    return _rebuild(dataclasses.replace(tree, leaves=leaves), at)


def _update_in_loops(tree: PriorityTree, at: Array, values: Array) -> PriorityTree:
    leaves = tree_in_loops.set_in_order(tree.leaves, at, values)
    kept = _kept(tree)
    combine, first = zip(*(_REDUCTIONS[name] for name in kept), strict=True)
    nodes = tree_in_loops.climb(FANOUT, _levels(leaves.size), combine, first, leaves, list(kept.values()), at)
    found: Any = dict(zip(kept, nodes, strict=True))
    return dataclasses.replace(tree, leaves=leaves, **found)


@checked
def fill(tree: PriorityTree, values: Float[Array, " capacity"]) -> PriorityTree:
    """Set the value of every slot. Negative or not finite values become zero. O(capacity)."""
    if values.shape != (tree.capacity,):
        raise ValueError(f"one value for each of {tree.capacity} slots is needed, got {values.shape}")
    values = values.astype(tree.leaves.dtype)
    values = jnp.where(jnp.isfinite(values) & (values >= 0), jnp.minimum(values, _highest_value(tree)), 0)
    leaves = jnp.zeros_like(tree.leaves).at[: tree.capacity].set(values)
    return _rebuild(dataclasses.replace(tree, leaves=leaves), None)


def _highest_value(tree: PriorityTree) -> float:
    """The largest value that every slot may hold without an infinite total."""
    return float(np.finfo(tree.leaves.dtype).max) / (2 * tree.leaves.size)


@jax.jit
@checked
def find(
    tree: PriorityTree, mass: Float[Array, " batch"], low: Float[Array, " batch"] | float = 0
) -> Int[Array, " batch"]:
    """Slots where the running sum of values passes `mass`; never an empty one unless all are.

    `low` is added to `mass` exactly, below the precision of one float. A random mass needs it: 24 random bits cannot
    distinguish 10^7 slots. A mass at or above the total, or NaN, finds the last slot that is not empty.

    Sums are rounded, in float32 by 2^-24 of themselves, so borders between slots shift by a few 2^-24 of the total. Values
    below that part of the total need float64. O(batch * log capacity).
    """
    mass = mass.astype(tree.sums.dtype)
    low = jnp.broadcast_to(jnp.asarray(low, mass.dtype), mass.shape)
    return find_placed(tree, *placed(total(tree), mass, low))


@checked
def placed(
    total: Float[Array, ""], mass: Float[Array, " batch"], low: Float[Array, " batch"]
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """Masses for `find_placed`, and their rests below the precision of a float."""
    inside = (mass < total) | ((mass == total) & (low < 0))
    # Twice any total: the rest of it is larger than the sum of each level.
    mass, low = jnp.where(inside, mass, np.finfo(mass.dtype).max), jnp.where(inside, low, 0)
    return two_sum(mass, low)


@jax.jit
@checked
def find_placed(tree: PriorityTree, mass: Float[Array, " batch"], low: Float[Array, " batch"]) -> Int[Array, " batch"]:
    """`find` for masses from `placed`."""
    place = jnp.zeros(mass.shape[0], jnp.int32), mass, low
    if not 0 < mass.shape[0] <= FOUND_IN_LOOPS:
        return _find_whole(tree, place)
    return one_kernel_loop(_find_in_loops, _find_whole)(tree, place)


@jax.jit
@checked
def find_rest(
    tree: PriorityTree, mass: Float[Array, " batch"], low: Float[Array, " batch"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"], Float[Array, " batch"]]:
    """`find_placed`, and the rest of each mass within the found slot, for a tree below it."""
    return _descended(tree, (jnp.zeros(mass.shape[0], jnp.int32), mass, low))


def _find_in_loops(tree: PriorityTree, place: tuple[Array, Array, Array]) -> Array:
    below = [start for start, _ in levels_below_root(tree)]
    return tree_in_loops.descend(FANOUT, below, _choose, tree.sums, tree.leaves, place)


def _find_whole(tree: PriorityTree, place: tuple[Array, Array, Array]) -> Array:
    return _descended(tree, place)[0]


def _descended(tree: PriorityTree, place: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    place = by_device(_above_leaves_in_a_loop, _above_leaves)(tree, place)
    return _choose(tree.leaves.reshape(-1, FANOUT).at[place[0]].get(mode=_CLIP), *place)


def _above_leaves(tree: PriorityTree, place: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The nodes just above the leaves, one level after the other."""
    families = tree.sums.reshape(-1, FANOUT)
    for start, _ in levels_below_root(tree):
        place = _choose(families.at[start // FANOUT + place[0]].get(mode=_CLIP), *place)
    return place


def _above_leaves_in_a_loop(tree: PriorityTree, place: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """The same in a loop, which keeps XLA from repeating the steps above in each step; it may copy the sums, once."""
    families = tree.sums.reshape(-1, FANOUT)
    below = [start // FANOUT for start, _ in levels_below_root(tree)]
    if not below:
        return place
    starts = jnp.asarray(below, jnp.int32)

    def descend(step: Array, place: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        return _choose(families.at[starts.at[step].get(mode=_CLIP) + place[0]].get(mode=_CLIP), *place)

    # Of the type of the masses, which may differ between the devices of a mesh.
    node = place[0] + zero_after(place[1])
    found: tuple[Array, Array, Array] = jax.lax.fori_loop(0, len(below), descend, (node, *place[1:]))
    return found


@checked
def largest(tree: PriorityTree) -> Int[Array, ""]:
    """The first slot that holds the largest value. O(log capacity)."""
    if tree.maxima is None:
        raise ValueError("this tree keeps no maxima: build it with init(..., maxima=True)")
    node = jnp.int32(0)
    for offset, _ in levels_below_root(tree):
        node = node * FANOUT + jnp.argmax(jax.lax.dynamic_slice(tree.maxima, (offset + node * FANOUT,), (FANOUT,)))
    leaves = jax.lax.dynamic_slice(tree.leaves, (node * FANOUT,), (FANOUT,))
    return (node * FANOUT + jnp.argmax(leaves)).astype(jnp.int32)


@checked
def levels_below_root(tree: PriorityTree) -> tuple[tuple[int, int], ...]:
    """(offset, nodes) of the levels under the root, from the top."""
    return _levels(tree.leaves.size)[-2::-1]


@checked
def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b as a rounded sum and its exact rounding error (Knuth, The Art of Computer Programming 2, 4.2.2)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def _choose(children: Array, node: Array, mass: Array, low: Array) -> tuple[Array, Array, Array]:
    """The child of each node into which its mass falls, and the rest of the mass within that child."""
    running, reach = children[:, 0], _reach(mass, low)
    child, before = jnp.zeros_like(node), jnp.zeros_like(mass)
    for k in range(1, FANOUT):
        here = (running <= reach) & (children[:, k] > 0)
        child, before = jnp.where(here, k, child), jnp.where(here, running, before)
        running = running + children[:, k]
    return node * FANOUT + child, *two_sum(mass - before, low)


def _reach(mass: Array, low: Array) -> Array:
    """The largest float at or below mass + low: the mass, or the float below it if `low` is negative; at least zero."""
    bits = jax.lax.bitcast_convert_type(mass, f"int{8 * mass.dtype.itemsize}")
    return jnp.where(mass > 0, jnp.where(low < 0, jax.lax.bitcast_convert_type(bits - 1, mass.dtype), mass), 0)


def _reduce(children: Array, combine: Callable[[Array, Array], Array]) -> Array:
    """Combine each row from left to right: an order that no backend changes."""
    return functools.reduce(combine, [children[:, k] for k in range(FANOUT)])


_REDUCTIONS: dict[str, tuple[Callable[[Array, Array], Array], Callable[[Array], Array]]] = {
    "sums": (jnp.add, lambda leaf: leaf),
    "minima": (jnp.minimum, lambda leaf: jnp.where(leaf > 0, leaf, jnp.inf)),
    "maxima": (jnp.maximum, lambda leaf: leaf),
}


_EMPTY = {"sums": 0.0, "minima": np.inf, "maxima": 0.0}  # of a node without items


def _rebuild(tree: PriorityTree, slots: Array | None) -> PriorityTree:
    """Recompute the parents above slots; above all leaves for None."""
    return by_device(_climb_each, _climb_together)(tree, slots)


def _climb_each(tree: PriorityTree, slots: Array | None) -> PriorityTree:
    """Level by level, one reduction after the other."""
    kept = _kept(tree).items()
    found: Any = {name: _climb(tree.leaves, nodes, slots, *_REDUCTIONS[name]) for name, nodes in kept}
    return dataclasses.replace(tree, **found)


def _climb_together(tree: PriorityTree, slots: Array | None) -> PriorityTree:
    """All reductions side by side, in a few kernels.

    Large levels are recomputed above the slots, the others whole: a kernel costs more than the additions in it.
    """
    kept, levels = _kept(tree), _levels(tree.leaves.size)
    kinds = tuple(kept)
    many = 0 if slots is None else max(_DENSE * slots.shape[0], _SMALL)
    sparse = 0 if slots is None else sum(nodes > many for _, nodes in levels)
    nodes = {name: _climb(tree.leaves, held, slots, *_REDUCTIONS[name], top=sparse) for name, held in kept.items()}
    if sparse:
        offset, count = levels[sparse - 1]
        nodes = jax.lax.optimization_barrier(nodes)
        below = jnp.stack([jax.lax.slice(nodes[name], (offset,), (offset + _padded(count),)) for name in kinds])
    else:
        below = jnp.stack([_REDUCTIONS[name][1](tree.leaves) for name in kinds])
    found = []
    for height in range(sparse, len(levels)):
        below = _parents(kinds, below, levels[height][1])
        if (height - sparse) % 2 == 0 and height + 1 < len(levels):
            below = jax.lax.optimization_barrier(below)  # else each level above would compute these again
        found.append(below)
    top = jnp.concatenate(found, 1)
    if not sparse:
        nodes = {name: top[i] for i, name in enumerate(kinds)}
    elif found:  # a scatter: XLA would hand a slice that is written to another stream
        at = levels[sparse][0] + jnp.arange(top.shape[1], dtype=jnp.int32)
        put = functools.partial(_put_sorted, at)
        nodes = {name: put(nodes[name], top[i]) for i, name in enumerate(kinds)}
    return dataclasses.replace(tree, **jax.lax.optimization_barrier(nodes))


def _put_sorted(at: Array, nodes: Array, values: Array) -> Array:
    return nodes.at[at].set(values, mode=_CLIP, unique_indices=True, indices_are_sorted=True)


def _parents(kinds: tuple[str, ...], children: Array, count: int) -> Array:
    """The `count` parents, padded to a multiple of the fan-out, of children [reductions, at least count * fan-out]."""
    filled = _with_empty(kinds, children, count * FANOUT)[:, : count * FANOUT].reshape(len(kinds), count, FANOUT)
    parents = functools.reduce(functools.partial(_combine, kinds), [filled[:, :, k] for k in range(FANOUT)])
    return _with_empty(kinds, parents, _padded(count))


def _with_empty(kinds: tuple[str, ...], nodes: Array, count: int) -> Array:
    """Nodes [reductions, n] with empty ones behind them, at least `count` in all."""
    if nodes.shape[1] >= count:
        return nodes
    empty = jnp.asarray([[_EMPTY[name]] for name in kinds], nodes.dtype)
    return jnp.concatenate([nodes, jnp.broadcast_to(empty, (len(kinds), count - nodes.shape[1]))], 1)


def _combine(kinds: tuple[str, ...], first: Array, second: Array) -> Array:
    """Two nodes of each reduction, [reductions, n] each."""
    return jnp.stack([_REDUCTIONS[name][0](first[i], second[i]) for i, name in enumerate(kinds)])


def _padded(count: int) -> int:
    return -(-count // FANOUT) * FANOUT


def _kept(tree: PriorityTree) -> dict[str, Array]:
    """The nodes of each reduction that the tree keeps."""
    return {name: getattr(tree, name) for name in _REDUCTIONS if getattr(tree, name) is not None}


def _climb(
    leaves: Array,
    nodes: Array,
    slots: Array | None,
    combine: Callable[[Array, Array], Array],
    first: Callable[[Array], Array],
    top: int | None = None,
) -> Array:
    """The nodes of a reduction, recomputed above slots; with `top` only so many levels of them."""
    below, start = leaves, 0
    for height, (offset, parents) in enumerate(_levels(leaves.size)[:top]):
        if slots is None or parents <= slots.shape[0]:  # the whole level costs no more than the batch
            children = jax.lax.slice(below, (start,), (start + parents * FANOUT,)).reshape(parents, FANOUT)
            level = _reduce(first(children), combine)
            nodes = jax.lax.dynamic_update_slice(nodes, level, (offset,))
        else:
            parent = slots // FANOUT ** (height + 1)
            children = below.reshape(-1, FANOUT).at[parent + start // FANOUT].get(mode=_CLIP)
            nodes = nodes.at[parent + offset].set(_reduce(first(children), combine), mode=_CLIP)
        below, start, first = nodes, offset, lambda node: node
    return nodes
