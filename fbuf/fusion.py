"""Forms of programs that suit the device: loops that XLA:CPU compiles to one kernel, and values that are computed once.

Each kernel of a program costs XLA:CPU a microsecond or more, and XLA hands a program of more than about 1,000 operations
to another thread. A loop is one kernel if an iteration moves less than 1,024 bytes and neither scatters, sorts nor calls
out. So small work is a loop over entries on the CPU. On a GPU, and under `jax.vmap`, where an iteration grows with the
mapped axis, the same result comes from operations on whole arrays.

A GPU runs a program as one CUDA graph, at two or three microseconds a kernel, if nothing in it asks the host or another
stream: no loop, and no slice that is written into a large array, which XLA hands to a stream of copies.

A function that may be called outside of jit has `@jax.jit`. Otherwise each call would compile its loop again.
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
_FEW = 1024  # entries up to which a loop over them is faster on the CPU than kernels over all
_READS = 2  # of one iteration of `zero_after_reading`


def by_device(on_cpu: Callable[..., T], on_accelerator: Callable[..., T]) -> Callable[..., T]:
    """The first function on the CPU, the second on GPUs and TPUs. Both return the same bits.

    Both take pytrees of arrays and close over none. JAX traces the second only when it compiles for an accelerator.
    """

    def vectorized(size: int, axes: tuple[Any, ...]) -> Callable[..., T]:
        forms = (jax.vmap(each, in_axes=axes, axis_size=size) for each in (on_cpu, on_accelerator))
        return functools.partial(_of_device, *forms)

    def derived(values: tuple[Any, ...], changes: tuple[Any, ...]) -> tuple[T, T]:
        forms = (functools.partial(jax.jvp, each) for each in (on_cpu, on_accelerator))
        return _of_device(*forms, values, changes)

    return _chosen(on_cpu, on_accelerator, vectorized, derived)


def one_kernel_loop(loop: Callable[..., T], whole: Callable[..., T]) -> Callable[..., T]:
    """`loop` on the CPU; `whole` on other devices, under `jax.vmap` and for derivatives. Both return the same values.

    Both take pytrees of arrays and close over none.
    """

    def vectorized(size: int, axes: tuple[Any, ...]) -> Callable[..., T]:
        return jax.vmap(whole, in_axes=axes, axis_size=size)

    # JAX has no reverse mode of a loop with an unknown number of iterations.
    return _chosen(loop, whole, vectorized, functools.partial(jax.jvp, whole))


def _of_device(on_cpu: Callable[..., T], on_accelerator: Callable[..., T], *operands: Any) -> T:
    found: T = jax.lax.platform_dependent(*operands, cpu=on_cpu, default=on_accelerator)
    return found


def _chosen(
    on_cpu: Callable[..., T],
    elsewhere: Callable[..., T],
    vectorized: Callable[[int, tuple[Any, ...]], Callable[..., T]],
    derived: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[T, T]],
) -> Callable[..., T]:
    """A function of the device. `vectorized(size, axes)` is its form under `jax.vmap`, `derived` its JVP."""
    early, late = _branches(on_cpu, elsewhere)

    @jax.custom_batching.custom_vmap
    def chosen(*operands: Any) -> T:
        return _of_device(early, late, *operands)

    @chosen.def_vmap
    def batched(size: int, mapped: Any, *operands: Any) -> tuple[T, Any]:
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(mapped))
        out = vectorized(size, axes)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    differentiable = jax.custom_jvp(chosen)

    @differentiable.defjvp
    def forward(values: Any, changes: Any) -> tuple[T, T]:
        return derived(values, changes)

    def computed(*operands: Any) -> T:
        # Under `jax.disable_jit` a loop runs in Python, which counts by numbers of its own.
        disabled = jax.config.jax_disable_jit  # type: ignore[attr-defined]  # made when JAX is imported
        found: T = elsewhere(*operands) if disabled else differentiable(*operands)
        return found

    return computed


@functools.lru_cache(maxsize=256)  # JAX caches eager calls by function
def _branches(on_cpu: Callable[..., T], elsewhere: Callable[..., T]) -> tuple[Callable[..., T], Callable[..., T]]:
    """The first function, and the second wrapped so that JAX traces it only when it compiles for another device."""
    traced_once = jax.jit(on_cpu, inline=True)

    def later(*operands: Any) -> T:
        traced, (flat, given) = traced_once.trace(*operands), jax.tree.flatten(operands)
        found = _traced_late.bind(*flat, function=elsewhere, given=given, avals=tuple(traced.jaxpr.out_avals))
        out: T = jax.tree.unflatten(jax.tree.structure(traced.out_info), found)
        return out

    return traced_once, later


def map_entries(
    function: Callable[..., T],
    count: int,
    tables: Any,
    shared: Any,
    *arrays: Array,
    most: int = _FEW,
    settled: bool = False,
) -> T:
    """`function(tables, shared, place, *entries)` of each entry of arrays [count, ...], stacked.

    On the CPU, for 2 to `most` entries, it is a loop of one kernel. Otherwise it is `jax.vmap`, with `settled` followed by
    `computed_once`, which the loop implies. The function closes over no array. `shared` holds a few numbers for every
    iteration; the function reads `tables`, of any size, by slices. The loop waits for the first of the arrays, or without
    arrays for the last leaf of `shared`: see `zero_after`.
    """
    looped, vectorized = _forms(function, count, settled)
    if not 1 < count <= most:  # a loop of one iteration is none
        return vectorized(tables, shared, *arrays)
    return one_kernel_loop(looped, vectorized)(tables, shared, *arrays)


@functools.lru_cache(maxsize=256)  # of one function the same two each time, see `_branches`
def _forms(function: Callable[..., T], count: int, settled: bool) -> tuple[Callable[..., T], Callable[..., T]]:
    return functools.partial(_looped, function, count), functools.partial(_vectorized, function, count, settled)


def _vectorized(function: Callable[..., T], count: int, settled: bool, tables: Any, shared: Any, *arrays: Array) -> T:
    found = jax.vmap(functools.partial(function, tables, shared))(jnp.arange(count, dtype=jnp.uint32), *arrays)
    return computed_once(found) if settled else found


def _looped(function: Callable[..., T], count: int, tables: Any, shared: Any, *arrays: Array) -> T:
    def step(k: Array, out: T) -> T:
        found = function(tables, loop_variant(shared, k), k.astype(jnp.uint32), *(entry(each, k) for each in arrays))
        return jax.tree.map(lambda held, new: put(held, new, k), out, found)

    zero = zero_after(arrays[0] if arrays else jax.tree.leaves(shared)[-1])
    shapes = jax.eval_shape(functools.partial(_vectorized, function, count, False), tables, shared, *arrays)
    empty = jax.tree.map(lambda leaf: jnp.full(leaf.shape, zero.astype(leaf.dtype)), shapes)
    return jax.lax.fori_loop(zero, count, step, empty)


def entry(array: Array, place: Array) -> Array:
    """The entry at a place in range along the first axis, as a slice, which a loop can read."""
    return part(array, place, 1)[0]


def part(array: Array, start: Array, count: int) -> Array:
    """`count` entries from a place along the first axis on, all in range."""
    # Unsigned: for a signed place JAX adds the test whether it counts from the end.
    return jax.lax.dynamic_slice_in_dim(array, start.astype(jnp.uint32), count, 0)


def put(array: Array, value: Array, place: Array) -> Array:
    """The array with a value at a place in range along the first axis; in a loop it is written in place."""
    return jax.lax.dynamic_update_index_in_dim(array, value.astype(array.dtype), place.astype(jnp.uint32), 0)


def put_alone(array: Array, value: Array, place: Array) -> Array:
    """The array with a value at a place in range along the first axis, outside of loops of one kernel.

    A slice on the CPU, where XLA would test again, in three kernels, that a scatter is in range. GPUs hand slices to another
    stream: there it is a scatter.
    """
    return by_device(put, _scattered)(array, value, place)


def _scattered(array: Array, value: Array, place: Array) -> Array:
    at, values = two_or_more((place[None], value.astype(array.dtype)[None]))
    return array.at[at].set(values, mode="promise_in_bounds")


def gather(array: Array, places: Array) -> Array:
    """Small entries at places in range, [n], along the first axis. O(n).

    XLA:CPU splits a gather from a large array between threads, however few are gathered, and waking one takes longer.
    """
    if not is_few(places.shape[0]):
        return array.at[places].get(mode="promise_in_bounds")
    return map_entries(_read, places.shape[0], array, (), places)


def _read(table: Array, _shared: Any, _k: Array, place: Array) -> Array:
    return entry(table, place)


def is_few(count: int) -> bool:
    """Whether a loop over this many entries is faster on the CPU than kernels over all."""
    return 1 < count <= _FEW


def two_or_more(entries: T) -> T:
    """Arrays [1, ...] with their entry twice. XLA turns a scatter of one entry into a slice, and then copies the table."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, 0) if leaf.shape[0] == 1 else leaf, entries)


def divmod_unsigned(number: Array, by: int | Array) -> tuple[Array, Array]:
    """Quotient and remainder of an integer of at least 0; `//` and `%` of a signed one are twenty operations each."""
    unsigned = jnp.dtype(f"uint{8 * number.dtype.itemsize}")
    dividend = number.astype(unsigned)
    divisor = jnp.broadcast_to(jnp.asarray(by).astype(unsigned), number.shape)
    return jax.lax.div(dividend, divisor).astype(number.dtype), jax.lax.rem(dividend, divisor).astype(number.dtype)


def zero_after(value: Array) -> Array:
    """A zero that depends on a value, for the start of a loop and for the arrays that it fills.

    If more than eight kernels are ready, XLA:CPU hands half to another thread, which takes 50 to 100 microseconds to wake;
    constant results and counters would all be ready. And XLA unrolls a loop that is known to have a single iteration.
    """
    return opaque_zero(word_of(value.reshape(-1)[0]))


def opaque_zero(word: Array) -> Array:
    """A zero that no compiler can fold: the product of a number and the next one is even."""
    return (word * (word + 1) & 1).astype(jnp.int32)


def word_of(value: Array) -> Array:
    """A uint32 that depends on the value."""
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = value.real
    if jnp.issubdtype(value.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)
    return value.astype(jnp.uint32)


def zero_after_reading(count: int, word: Callable[[Array], Array], zero: Array) -> Array:
    """A zero that depends on `word(k)` for each k below `count`, and on `zero`: prefetches the memory of the words.

    A loop that only reads keeps many cache misses in flight. XLA stores a dozen counters and addresses in each iteration,
    which fill the store buffer, so one iteration makes several reads.
    """
    together = min(_READS, count)

    def read(group: Array, seen: Array) -> Array:
        places = [jnp.minimum(group * together + k, count - 1) for k in range(together)]
        return functools.reduce(jnp.bitwise_xor, map(word, places), seen)

    return opaque_zero(jax.lax.fori_loop(0, -(-count // together), read, zero.astype(jnp.uint32)))


def loop_variant(values: T, step: Array) -> T:
    """The same numbers, but XLA cannot prove them constant and hoists nothing out of the loop.

    A hoisted operation would be a kernel in front of the loop.
    """
    zero = opaque_zero(step.astype(jnp.uint32))

    def vary(value: Array) -> Array:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value + zero.astype(value.dtype)
        bits = jax.lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(bits + zero.astype(bits.dtype), value.dtype)

    return jax.tree.map(vary, values)


@jax.jit
def computed_once(values: T) -> T:
    """The same arrays, as a barrier against fusion: all are computed before one of them is used.

    XLA fuses the arithmetic behind an index into every gather and scatter that takes it, and so repeats random bits or a
    search for each leaf and each level of a tree. And a read that is fused into a later use comes after a write in place,
    so XLA copies the whole array. On the CPU `jax.lax.optimization_barrier` disappears before fusion, a loop does not.
    Cost: one kernel on the CPU, and a nanosecond or two an element; nothing on accelerators.
    """
    leaves, structure = jax.tree.flatten(values)
    most = max((leaf.size for leaf in leaves), default=0)
    if most <= 1 or sum(leaf.size for leaf in leaves) > _SMALL:
        return _barrier(values)
    flat = [leaf.reshape(-1) for leaf in leaves]
    whole: Callable[[list[Array]], list[Array]] = _barrier
    moved = one_kernel_loop(_moved_one_by_one, whole)(flat)
    return jax.tree.unflatten(structure, [new.reshape(leaf.shape) for new, leaf in zip(moved, leaves, strict=True)])


def _moved_one_by_one(flat: list[Array]) -> list[Array]:
    def move(k: Array, held: list[Array]) -> list[Array]:
        places = [jnp.minimum(k, leaf.size - 1) for leaf in flat]
        return [put(out, entry(leaf, at), at) for out, leaf, at in zip(held, flat, places, strict=True)]

    zero = zero_after(flat[0])
    empty = [jnp.full(leaf.shape, zero.astype(leaf.dtype)) for leaf in flat]
    return jax.lax.fori_loop(zero, max(leaf.size for leaf in flat), move, empty)


def _barrier(values: T) -> T:
    return by_device(_inverted_twice, jax.lax.optimization_barrier)(values)


def _inverted_twice(values: T) -> T:
    """Invert integers or negate floats, twice, in a loop over whole arrays."""

    def invert(held: Array) -> Array:
        return jnp.negative(held) if jnp.issubdtype(held.dtype, jnp.floating) else jnp.invert(held)

    return jax.lax.fori_loop(0, 2, lambda _, held: jax.tree.map(invert, held), values)
