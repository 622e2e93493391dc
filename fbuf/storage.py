"""Items by slot: a pytree of [capacity, *lanes, ...] arrays."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, PyTree

from fbuf.fusion import (
    computed_once,
    divmod_unsigned,
    entry,
    loop_variant,
    one_kernel_loop,
    opaque_zero,
    put,
    put_alone,
    word_of,
    zero_after,
)
from fbuf.keywords import checked
from fbuf.writers import wrapped

_AT_ONCE = 192  # bytes of a row that one iteration may read: XLA counts them four times, against its 1,024
_BLOCK = 32  # rows that are prefetched before they are copied
_LINE = 64  # bytes the memory gives at once
_FEW = 1024  # rows up to which one thread that prefetches is faster
_MANY = 64  # rows from which on a loop that writes them is


@checked
def init(capacity: int, lanes: tuple[int, ...], example: Any) -> Any:
    """Zeros for `capacity` rows of items like `example`, a pytree of arrays or `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: jnp.zeros((capacity, *lanes, *leaf.shape), leaf.dtype), example)


@checked
def write(items: Any, rows: Int[Array, " n"], batch: Any, *, repeating: bool = False) -> Any:
    """Items with batch at rows in range. In place when `items` is donated. O(batch).

    All rows are different. With `repeating` rows may be equal, if their items are equal, too.
    """

    def scatter(kept: Array, new: Array) -> Array:
        if rows.shape == (1,):
            return put_alone(kept, jnp.asarray(new)[0], rows[0])
        return kept.at[rows].set(new, mode="promise_in_bounds", unique_indices=not repeating)

    return jax.tree.map(scatter, items, batch)


@checked
def moved(tables: PyTree, rows: np.ndarray, capacity: int, empty: float = 0) -> PyTree:
    """Tables of `capacity` rows, of which the first are some rows of others, and the rest is `empty`. O(capacity).

    `rows`, at most `capacity`, are known on the host. Their number does not change the program.
    """
    padded = np.full(capacity, np.iinfo(np.int32).max, np.int32)
    padded[: rows.size] = rows
    return _moved(tables, padded, empty)


@functools.partial(jax.jit, static_argnums=2)
def _moved(tables: PyTree, rows: Int[Array, " capacity"], empty: float) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.at[rows].get(mode="fill", fill_value=empty), tables)


@jax.jit
@checked
def write_around(items: Any, first: Int[Array, ""], batch: Any) -> Any:
    """Items with batch at the rows from the first on around the ring, at most all.

    Small rows are written one by one on the CPU: XLA gives programs of 1,000 operations and more to another thread, and
    counts a scatter of 256 rows as more.
    """
    leaves, structure = jax.tree.flatten(items)
    new = [jnp.asarray(leaf).astype(kept.dtype) for leaf, kept in zip(jax.tree.leaves(batch), leaves, strict=True)]
    few = bool(new) and _MANY <= new[0].shape[0] <= _FEW
    for group in _groups(leaves, ()):
        chosen, given = [leaves[i] for i in group], [new[i] for i in group]
        small = few and _row_bytes(chosen[0], ()) <= _AT_ONCE
        chosen = (one_kernel_loop(_put_around, _all_around) if small else _all_around)(chosen, first, given)
        for i, leaf in zip(group, chosen, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _all_around(leaves: list[Array], first: Array, new: list[Array]) -> list[Array]:
    rows = _around(first, jnp.arange(new[0].shape[0], dtype=jnp.uint32), leaves[0].shape[0])
    held: list[Array] = write(leaves, rows, new)
    return held


def _put_around(leaves: list[Array], first: Array, new: list[Array]) -> list[Array]:
    def body(k: Array, held: list[Array]) -> list[Array]:
        row = _around(loop_variant(first, k), k.astype(jnp.uint32), held[0].shape[0])
        return [put(leaf, entry(given, k), row) for leaf, given in zip(held, new, strict=True)]

    return jax.lax.fori_loop(zero_after(first), new[0].shape[0], body, leaves)


def _around(first: Array, steps: Array, capacity: int) -> Array:
    return wrapped(first.astype(jnp.uint32) + steps, capacity)


@functools.partial(jax.jit, static_argnums=2)  # outside of any program the reshape would copy all items
@checked
def read(items: Any, slots: Int[Array, " batch"], lanes: tuple[int, ...] = ()) -> Any:
    """A copy of the items at slots in range; a slot counts rows and lanes. O(batch)."""
    leaves, structure = jax.tree.flatten(items)
    found: list[Any] = [None] * len(leaves)
    at = slots.reshape(-1)
    few = 0 < slots.size <= _FEW
    whole, loop = functools.partial(_gathered, lanes), functools.partial(_copied, lanes)
    for group in _groups(leaves, lanes):
        chosen = [leaves[i] for i in group]
        if few and _row_bytes(chosen[0], lanes) <= _AT_ONCE:
            taken = one_kernel_loop(loop, whole)(chosen, at)
        else:  # or each gather would repeat the arithmetic behind the slots
            taken = whole(chosen, computed_once(at))
        for i, rows in zip(group, taken, strict=True):
            found[i] = rows.reshape(*slots.shape, *rows.shape[1:])
    return jax.tree.unflatten(structure, found)


def _groups(leaves: list[Array], lanes: tuple[int, ...]) -> list[list[int]]:
    """Groups of leaves whose rows one loop copies; a leaf that is too large for a loop is alone."""
    groups: list[list[int]] = []
    room = 0
    for i in sorted(range(len(leaves)), key=lambda i: _row_bytes(leaves[i], lanes)):
        size = max(_row_bytes(leaves[i], lanes), 1)
        if not groups or size > room:
            groups.append([])
            room = _AT_ONCE
        groups[-1].append(i)
        room -= size
    return groups


def _row_bytes(leaf: Array, lanes: tuple[int, ...]) -> int:
    return math.prod(leaf.shape[1 + len(lanes) :]) * leaf.dtype.itemsize


def _gathered(lanes: tuple[int, ...], leaves: list[Array], slots: Array) -> list[Array]:
    flat = [leaf.reshape(leaf.shape[0] * math.prod(lanes), *leaf.shape[1 + len(lanes) :]) for leaf in leaves]
    return [leaf.at[slots].get(mode="promise_in_bounds") for leaf in flat]


def _copied(lanes: tuple[int, ...], leaves: list[Array], slots: Array) -> list[Array]:
    """`_gathered` row by row. A block of rows is prefetched before it is copied, so many reads are in flight."""
    count, zero = slots.shape[0], zero_after(slots)
    block = min(_BLOCK, count)

    def body(k: Array, out: list[Array]) -> list[Array]:
        first = jnp.minimum(k * block, count - block)

        def ask(k: Array, seen: Array) -> Array:
            place = _place(entry(slots, first + k), lanes)
            return seen ^ functools.reduce(jnp.bitwise_xor, [_lines(leaf, place) for leaf in leaves])

        there = opaque_zero(jax.lax.fori_loop(0, block, ask, zero.astype(jnp.uint32)))

        def copy(k: Array, out: list[Array]) -> list[Array]:
            place = _place(entry(slots, first + k) + there, lanes)
            return [put(rows, _item(leaf, place), first + k) for rows, leaf in zip(out, leaves, strict=True)]

        return jax.lax.fori_loop(0, block, copy, out)

    empty = [jnp.full((count, *leaf.shape[1 + len(lanes) :]), zero.astype(leaf.dtype)) for leaf in leaves]
    return jax.lax.fori_loop(zero, -(-count // block), body, empty)


def _place(slot: Array, lanes: tuple[int, ...]) -> list[Array]:
    """The row and the lanes of a slot. (XLA would write a reshaped storage twice.)"""
    place: list[Array] = []
    slot = slot.astype(jnp.uint32)  # for a signed place JAX adds the test whether it counts from the end
    for size in reversed(lanes):
        slot, lane = divmod_unsigned(slot, size)
        place.append(lane)
    return [slot, *reversed(place)]


def _item(leaf: Array, place: list[Array]) -> Array:
    shape = leaf.shape[len(place) :]
    start = (*place, *(_at(0, place) for _ in shape))
    return jax.lax.dynamic_slice(leaf, start, (*(1 for _ in place), *shape)).reshape(shape)


def _at(number: int, place: list[Array]) -> Array:
    """An index with the dtype of the others; plain numbers differ if 64-bit types are on."""
    return jnp.asarray(number, place[0].dtype)


def _lines(leaf: Array, place: list[Array]) -> Array:
    """A word that depends on each cache line of an item."""
    shape, step = leaf.shape[len(place) :], max(_LINE // leaf.dtype.itemsize, 1)
    words = [jnp.uint32(0)]
    for offset in range(0, math.prod(shape), step):
        within = [_at(int(each), place) for each in np.unravel_index(offset, shape)] if shape else []
        words.append(word_of(jax.lax.dynamic_slice(leaf, (*place, *within), (1,) * leaf.ndim).reshape(())))
    return functools.reduce(jnp.bitwise_xor, words)
