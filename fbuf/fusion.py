"""What XLA:CPU is to compute as one kernel, or once, where it would make many kernels or compute again.

Each kernel of a program costs XLA:CPU a microsecond or more, and a program of more than about 1,000 operations is handed
to another thread. A loop is one kernel if a turn of it moves less than 1,024 bytes and neither scatters, sorts nor calls
out: XLA then compiles all of it together. So small work is written here as a loop over entries. On a GPU, and under
`jax.vmap`, where a turn grows with what is mapped, the same is computed by operations on whole arrays.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import mlir

T = TypeVar("T")
_traced_late = Primitive("traced_late")
_traced_late.multiple_results = True
_traced_late.def_abstract_eval(lambda *_, function, given, avals: avals)
mlir.register_lowering(
    _traced_late,
    mlir.lower_fun(lambda *flat, function, given, avals: jax.tree.leaves(function(*jax.tree.unflatten(given, flat)))),
)
_SMALL = 4096  # elements that are moved one by one
_FEW = 1024  # entries that are
_READS = 2  # of one iteration of `after_reading`


def as_one_kernel(loop: Callable[..., T], whole: Callable[..., T]) -> Callable[..., T]:
    """`loop` on the CPU, `whole` on other devices, under `jax.vmap` and where derivatives are taken: the same values.

    Both take pytrees of arrays and close over none.
    """

    on_cpu, elsewhere = _branches(loop, whole)

    @jax.custom_batching.custom_vmap
    def chosen(*operands: Any) -> T:
        found: T = jax.lax.platform_dependent(*operands, cpu=on_cpu, default=elsewhere)
        return found

    @chosen.def_vmap
    def batched(size: int, mapped: Any, *operands: Any) -> tuple[T, Any]:
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(mapped))
        out = jax.vmap(whole, in_axes=axes, axis_size=size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    differentiable = jax.custom_jvp(chosen)

    @differentiable.defjvp
    def forward(values: Any, changes: Any) -> tuple[T, T]:
        return jax.jvp(whole, values, changes)  # of a loop whose turns are not known JAX has no reverse mode

    def computed(*operands: Any) -> T:
        # Under `jax.disable_jit` turns are steps of Python, which count them by its own numbers.
        disabled = jax.config.jax_disable_jit  # type: ignore[attr-defined]  # made when JAX is imported
        found: T = whole(*operands) if disabled else differentiable(*operands)
        return found

    return computed


@functools.lru_cache(maxsize=256)  # JAX finds by the function what it compiled for a call outside of any program
def _branches(loop: Callable[..., T], whole: Callable[..., T]) -> tuple[Callable[..., T], Callable[..., T]]:
    """`loop`, and `whole` as a function that is only traced where a program for its device is compiled."""
    traced_once = jax.jit(loop, inline=True)

    def later(*operands: Any) -> T:
        traced, (flat, given) = traced_once.trace(*operands), jax.tree.flatten(operands)
        found = _traced_late.bind(*flat, function=whole, given=given, avals=tuple(traced.jaxpr.out_avals))
        out: T = jax.tree.unflatten(jax.tree.structure(traced.out_info), found)
        return out

    return traced_once, later


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
    return (as_one_kernel(_one_by_one, _gathered) if is_few(places.shape[0]) else _gathered)(array, places)


def is_few(count: int) -> bool:
    """Whether a loop over so many entries is faster on the CPU than kernels over all; one would be no loop."""
    return 1 < count <= _FEW


def _gathered(array: Array, places: Array) -> Array:
    return array.at[places].get(mode="promise_in_bounds")


def _one_by_one(array: Array, places: Array) -> Array:
    def turn(k: Array, out: Array) -> Array:
        return put(out, entry(array, entry(places, k)), k)

    count, zero = places.shape[0], following(places)
    return jax.lax.fori_loop(zero, count, turn, jnp.full((count, *array.shape[1:]), zero.astype(array.dtype)))


def divided(number: Array, by: int | Array) -> tuple[Array, Array]:
    """Quotient and rest of an integer that is not negative; `//` and `%` of a signed one are twenty operations each."""
    unsigned = jnp.dtype(f"uint{8 * number.dtype.itemsize}")
    whole = number.astype(unsigned)
    divisor = jnp.broadcast_to(jnp.asarray(by).astype(unsigned), number.shape)
    return jax.lax.div(whole, divisor).astype(number.dtype), jax.lax.rem(whole, divisor).astype(number.dtype)


def following(value: Array) -> Array:
    """Zero, known when a value is that another kernel computes: where a loop begins, and what it fills.

    Of more than eight kernels that could start, XLA:CPU hands half to another thread, and waking it takes 50 to 100
    microseconds; all empty results and counters could. Nor does XLA know how many turns such a loop has: it takes the
    only turn of one for no loop, and a single write in place for something to compute again.
    """
    return nothing_of(word_of(value.reshape(-1)[0]))


def word_of(value: Array) -> Array:
    """Some uint32 that nobody knows before the value is known."""
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = value.real
    if jnp.issubdtype(value.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
    return value.astype(jnp.uint32)


def after_reading(count: int, word: Callable[[Array], Array], zero: Array) -> Array:
    """Zero, known only after `word(k)` was read for each k below `count`, and after `zero` is known.

    Later reads of the same memory do not wait. A loop that only reads keeps many cache misses in flight. XLA stores a
    dozen counters and addresses in each iteration, which fill the store buffer: so one iteration makes several reads.
    """
    together = min(_READS, count)

    def read(group: Array, seen: Array) -> Array:
        places = [jnp.minimum(group * together + k, count - 1) for k in range(together)]
        return functools.reduce(jnp.bitwise_xor, map(word, places), seen)

    return nothing_of(jax.lax.fori_loop(0, -(-count // together), read, zero.astype(jnp.uint32)))


def varying(values: T, turn: Array) -> T:
    """The same numbers, which XLA cannot know to be the same in every turn of a loop: what follows from them stays in it.

    Otherwise each operation on what a loop only reads is a kernel in front of it.
    """
    zero = nothing_of(turn.astype(jnp.uint32))

    def vary(value: Array) -> Array:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value + zero.astype(value.dtype)
        bits = jax.lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(bits + zero.astype(bits.dtype), value.dtype)

    return jax.tree.map(vary, values)


def in_turns(function: Callable[..., T], count: int, shared: Any, *arrays: Array) -> T:
    """`function(shared, places, *arrays)` for the places 0 to count - 1: arrays of one entry for each, from such arrays.

    On the CPU one at a time, in a loop that is one kernel: of a loop XLA counts the operations of one turn, and a program
    of which it counts 1,000 it hands to another thread. `shared` is what every turn needs; few numbers.
    """

    def whole(shared: Any, *arrays: Array) -> T:
        return function(shared, jnp.arange(count, dtype=jnp.uint32), *arrays)

    if not is_few(count):
        return whole(shared, *arrays)

    def loop(shared: Any, *arrays: Array) -> T:
        def turn(k: Array, out: T) -> T:
            new = function(varying(shared, k), k.astype(jnp.uint32)[None], *(part(each, k, 1) for each in arrays))
            return jax.tree.map(lambda all_of, one: put(all_of, one[0], k), out, new)

        zero = following(arrays[0] if arrays else jax.tree.leaves(shared)[-1])
        shapes = jax.eval_shape(whole, shared, *arrays)
        empty = jax.tree.map(lambda leaf: jnp.full(leaf.shape, zero.astype(leaf.dtype)), shapes)
        return jax.lax.fori_loop(zero, count, turn, empty)

    return as_one_kernel(loop, whole)(shared, *arrays)


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

    zero = following(flat[0])
    empty = [jnp.full(leaf.shape, zero.astype(leaf.dtype)) for leaf in flat]
    return jax.lax.fori_loop(zero, max(leaf.size for leaf in flat), move, empty)


def _turned_twice(values: T) -> T:
    """Integers into their complement, floats into their negative, and back: also in a loop, by whole arrays."""

    def turn(held: Array) -> Array:
        return jnp.negative(held) if jnp.issubdtype(held.dtype, jnp.floating) else jnp.invert(held)

    return jax.lax.fori_loop(0, 2, lambda _, held: jax.tree.map(turn, held), values)
