"""What XLA:CPU is to compute as one kernel, or once, where it would make many kernels or compute again.

Each kernel of a program costs XLA:CPU a microsecond or more, and a program of more than about 1,000 operations is handed
to another thread. A loop is one kernel if a turn of it moves less than 1,024 bytes and neither scatters, sorts nor calls
out: XLA then compiles all of it together. So small work is written here as a loop over entries. On a GPU, and under
`jax.vmap`, where a turn grows with what is mapped, the same is computed by operations on whole arrays.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

T = TypeVar("T")
_SMALL = 4096  # elements that are moved one by one
_FEW = 1024  # entries that are


def as_one_kernel(loop: Callable[..., T], whole: Callable[..., T]) -> Callable[..., T]:
    """`loop` on the CPU, `whole` on other devices and under `jax.vmap`: two ways to the same values.

    Both take pytrees of arrays and close over none.
    """

    @jax.custom_batching.custom_vmap
    def chosen(*operands: Any) -> T:
        return jax.lax.platform_dependent(*operands, cpu=loop, default=whole)

    @chosen.def_vmap
    def batched(size: int, mapped: Any, *operands: Any) -> tuple[T, Any]:
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(mapped))
        out = jax.vmap(whole, in_axes=axes, axis_size=size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return chosen


def entry(array: Array, place: Array) -> Array:
    """What stands at a place along the first axis, which is in range; as a slice, which a loop can read."""
    return part(array, place, 1)[0]


def part(array: Array, start: Array, count: int) -> Array:
    """`count` entries from a place along the first axis on, which are in range."""
    # Unsigned: JAX would look whether the place is counted from the end.
    return jax.lax.dynamic_slice_in_dim(array, start.astype(jnp.uint32), count, 0)


def put(array: Array, value: Array, place: Array) -> Array:
    """The array with a value at a place along the first axis, which is in range; written in place in a loop."""
    return jax.lax.dynamic_update_index_in_dim(array, value.astype(array.dtype), place.astype(jnp.uint32), 0)


def entries(array: Array, places: Array) -> Array:
    """What stands at places, [n], along the first axis, which are in range; small entries. O(n).

    XLA:CPU splits a gather from a large array between threads, however few are gathered, and waking one takes longer.
    """
    few = 1 < places.shape[0] <= _FEW
    return (as_one_kernel(_one_by_one, _gathered) if few else _gathered)(array, places)


def _gathered(array: Array, places: Array) -> Array:
    return array.at[places].get(mode="promise_in_bounds")


def _one_by_one(array: Array, places: Array) -> Array:
    def turn(k: Array, out: Array) -> Array:
        return put(out, entry(array, entry(places, k)), k)

    count = places.shape[0]
    return jax.lax.fori_loop(0, count, turn, jnp.zeros((count, *array.shape[1:]), array.dtype))


def divided(number: Array, by: int | Array) -> tuple[Array, Array]:
    """Quotient and rest of an integer that is not negative. `//` and `%` are twenty operations each of a signed one."""
    divisor = jnp.asarray(by, number.dtype)
    divisor = jnp.broadcast_to(divisor, number.shape)
    return jax.lax.div(number, divisor), jax.lax.rem(number, divisor)


def turns(count: int, known: Array) -> Array | int:
    """`count`, for a loop that writes into something large; `known` is any integer of the program.

    XLA takes the only turn of a loop for no loop, and a single write in place for something to compute again.
    """
    return count + nothing_of(known.astype(jnp.uint32)) if count == 1 else count


def nothing_of(word: Array) -> Array:
    """Zero, which no compiler knows: one of two numbers that follow each other is even."""
    return (word * (word + 1) & 1).astype(jnp.int32)


@jax.jit  # called outside of any program, it would otherwise compile its loop in every call
def computed_once(values: T) -> T:
    """The same arrays, kept from being fused into what uses them; all are there before one of them is used.

    XLA fuses the arithmetic behind an index into every gather and scatter that takes it: random bits, or a search, are
    then repeated for each leaf and each level of a tree. And a read that is fused into a later use comes after a write
    in place, for which XLA copies the whole array. On the CPU `jax.lax.optimization_barrier` is gone before fusion is
    decided. A loop is not. Cost: one kernel on the CPU, and a nanosecond or two an element.
    """
    leaves, structure = jax.tree.flatten(values)
    most = max((leaf.size for leaf in leaves), default=0)
    if most <= 1 or sum(leaf.size for leaf in leaves) > _SMALL:  # a loop of one turn is none
        return _turned_twice(values)
    flat = [leaf.reshape(-1) for leaf in leaves]
    whole: Callable[[list[Array]], list[Array]] = _turned_twice
    moved = as_one_kernel(_moved_one_by_one, whole)(flat)
    return jax.tree.unflatten(structure, [new.reshape(leaf.shape) for new, leaf in zip(moved, leaves, strict=True)])


def _moved_one_by_one(flat: list[Array]) -> list[Array]:
    def move(turn: Array, held: list[Array]) -> list[Array]:
        places = [jnp.minimum(turn, leaf.size - 1) for leaf in flat]
        return [put(out, entry(leaf, at), at) for out, leaf, at in zip(held, flat, places, strict=True)]

    return jax.lax.fori_loop(0, max((leaf.size for leaf in flat), default=0), move, [jnp.zeros_like(x) for x in flat])


def _turned_twice(values: T) -> T:
    """Integers into their complement, floats into their negative, and back: also in a loop, by whole arrays."""

    def turn(held: Array) -> Array:
        return jnp.negative(held) if jnp.issubdtype(held.dtype, jnp.floating) else jnp.invert(held)

    return jax.lax.fori_loop(0, 2, lambda _, held: jax.tree.map(turn, held), values)
