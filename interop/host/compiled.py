"""The one place that compiles and donates. Each function is traced once per rule and shapes, for any values.

Called inside `bridge.exact()`, or with 32-bit values only. Batches whose length varies come padded to a power of two by
repeating their last entry, so that no length of batch costs a trace of its own: equal entries at equal places are well
defined.
"""

import dataclasses
import functools
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fbuf
from fbuf import priority_tree, storage

Leaves = tuple[Any, ...]
_WIDTHS = {"float32": 1, "float64": 2}  # words of a number

# By default XLA:CPU orders kernels so that several threads have work. Kernels of a microsecond then cost the waking of a
# thread each: a draw of 256 takes three times as long.
IN_ORDER: dict[str, bool | str] = (
    {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    if jax.__version_info__ >= (0, 10)
    else {"xla_cpu_enable_concurrency_optimized_scheduler": False}
)
_OPTIONS = dict(IN_ORDER)
if platform.machine() in ("x86_64", "AMD64"):
    # At each load of a program with AVX-512 from the compilation cache XLA logs that the processor does not fit.
    _OPTIONS["xla_cpu_max_isa"] = "AVX2"


def padded(values: np.ndarray, least: int = 1) -> np.ndarray:
    """The entries of a 1-d array, and the last one again up to the next power of two; in memory of their own.

    JAX reads arguments of NumPy after the call has returned: what a program is given must not be written any more.
    """
    count = values.shape[0]
    out = np.empty(max(1 << (count - 1).bit_length(), least), values.dtype)
    out[:count], out[count:] = values, values[-1]
    return out


# ---------------------------------------------------------------------- priorities on the host: see `HostPriorities`


def words_of(given: np.ndarray, slots: np.ndarray, alpha: float, beta: float, key: np.ndarray, size: int) -> np.ndarray:
    """Numbers for `assign_and_draw` in one array of int32: each argument of a call takes a microsecond or two.

    Priorities, alpha and beta; then the slots of the priorities, the two words of a random key, and the number of items.
    Priorities and slots are padded as by `padded`, to 64 at least: as many cost little more than one.
    """
    held, width = slots.size, given.itemsize // 4
    count = max(1 << (held - 1).bit_length(), 64) if held else 0
    words = np.empty((count + 2) * width + count + 3, np.int32)
    floats, whole = words[: (count + 2) * width].view(given.dtype), words[(count + 2) * width :]
    floats[:held], whole[:held] = given, slots
    if held < count:
        floats[held:count], whole[held:count] = given[-1], slots[-1]
    floats[count], floats[count + 1] = alpha, beta
    whole[count : count + 2], whole[count + 2] = key.view(np.int32), size
    return words


def read_words(drawn: np.ndarray, batch_size: int, dtype: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """Drawn slots, int64, their importance weights, and whether there was anything to draw: views of these words."""
    slots = 2 * ((drawn.size - 1) // (2 + _WIDTHS[dtype]))  # the words of all slots that were drawn
    return drawn[: 2 * batch_size].view(np.int64), drawn[slots:-1].view(dtype)[:batch_size], bool(drawn[-1])


def shared_size(batch_size: int) -> int:
    """How many a program draws for a batch: at most twice as many, so that batch sizes share programs.

    The first entries of a larger draw are those of a smaller one with the same key.
    """
    return 1 << (batch_size - 1).bit_length() if batch_size <= 1024 else -(-batch_size // 1024) * 1024


def _opened(words: Array, dtype: str) -> tuple[Array, Array]:
    """The floats and the whole numbers of `words_of`."""
    width = _WIDTHS[dtype]
    floats = ((words.shape[0] - 2 * width - 3) // (width + 1) + 2) * width
    shape = (-1,) if width == 1 else (-1, width)
    return jax.lax.bitcast_convert_type(words[:floats].reshape(shape), dtype), words[floats:]


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=0)
def tree_of(rule: Any, given: Array, alpha: Array) -> Leaves:
    """The arrays of the tree over items of these priorities, -1 for those that are not to be drawn, [capacity]."""
    tree = priority_tree.fill(rule.init(given.shape[0]).tree, _weights(rule, given, alpha))
    return tree.leaves, tree.sums, tree.minima


def _weights(rule: Any, given: Array, alpha: Array) -> Array:
    return jnp.where(given >= 0, rule.value(jnp.maximum(given, 0), alpha), 0)


def tree_with(arrays: Leaves, capacity: int) -> priority_tree.PriorityTree:
    """The tree of these arrays; plain tuples cross into a program and back in less time."""
    leaves, sums, minima = arrays
    return priority_tree.PriorityTree(leaves, sums, minima, None, capacity)


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1, 2), donate_argnums=3)
def assign_and_draw(
    rule: Any, capacity: int, batch_size: int, arrays: Leaves, words: Array
) -> tuple[Leaves, Array | None]:
    """The tree with other priorities at slots, of which equal ones have equal ones, and a draw of some: see `read_words`."""
    floats, whole = _opened(words, rule.dtype)
    weights = _weights(rule, floats[:-2], floats[-2])
    tree = priority_tree.update(tree_with(arrays, capacity), whole[:-3], weights, settled=True)
    drawn = _drawn_words(rule, tree, batch_size, floats, whole) if batch_size else None
    return (tree.leaves, tree.sums, tree.minima), drawn


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1, 2))
def draw_words(rule: Any, capacity: int, batch_size: int, arrays: Leaves, words: Array) -> Array:
    """What `assign_and_draw` draws, of a tree that stays as it is."""
    return _drawn_words(rule, tree_with(arrays, capacity), batch_size, *_opened(words, rule.dtype))


def _drawn_words(rule: Any, tree: Any, batch_size: int, floats: Array, whole: Array) -> Array:
    key = jax.lax.bitcast_convert_type(whole[-3:-1], jnp.uint32)
    drawn = rule.draw(tree, key, batch_size, whole[-1])
    slots = jnp.stack([drawn.slots, jnp.zeros_like(drawn.slots)], 1).reshape(-1)
    weights = jax.lax.bitcast_convert_type(fbuf.importance_weights(drawn, floats[-1]), jnp.int32).reshape(-1)
    return jnp.concatenate([slots, weights, drawn.valid[:1].astype(jnp.int32)])


# ---------------------------------------------------------------------- priorities on a device: see `DevicePriorities`


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1, 2))
def init(rule: Any, capacity: int, excluding: bool) -> Any:
    """Fresh state of a sampler; with `excluding` one in which items may be excluded from draws."""
    return rule.init_excluding(capacity) if excluding else rule.init(capacity)


_replacing = functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=0, donate_argnums=1)


@_replacing
def exclude(rule: Any, state: Any, slots: Array, allowed: Array) -> Any:
    """The state after items at slots were allowed to be drawn, or not."""
    return rule.exclude(state, slots, allowed)


@_replacing
def written(rule: Any, state: Any, slots: Array) -> Any:
    """The state after new items came into slots."""
    return rule.written(state, slots)


@_replacing
def update(rule: Any, state: Any, slots: Array, priorities: Array, highest: Array) -> Any:
    """The state after items were given priorities; `highest` is the highest of all that the host knows."""
    return _topped(rule, rule.update(state, slots, priorities), highest)


@_replacing
def update_async(rule: Any, state: Any, slots: Array, priorities: Array, filled: Array) -> tuple[Any, Array]:
    """`update`, and whether it took place: not where a slot is not below `filled`, or -1, or a priority cannot be kept."""
    priorities = priorities.astype(state.priorities.dtype)
    slots = slots.astype(filled.dtype)
    fine = jnp.all((slots >= -1) & (slots < filled) & jnp.isfinite(priorities) & (priorities >= 0))
    slots, priorities = jnp.where(fine, slots, -1), jnp.where(fine, priorities, 0)
    return _topped(rule, rule.update(state, slots, priorities), jnp.max(jnp.where(slots >= 0, priorities, 0))), fine


def _topped(rule: Any, state: Any, highest: Array) -> Any:
    """The state, in which a priority that another of the same update took the place of has been given all the same."""
    if rule.new_items != "highest_ever":
        return state
    return dataclasses.replace(state, highest=jnp.maximum(state.highest, highest))


@functools.partial(jax.jit, compiler_options=_OPTIONS)
def masses(tree: Any) -> Array:
    """The sum of a tree of priorities and its smallest positive value, [2]."""
    return jnp.stack([priority_tree.total(tree), priority_tree.minimum(tree)])


@_replacing
def reweight(rule: Any, state: Any, alpha: Array) -> Any:
    """The state under another alpha."""
    return rule.reweight(state, alpha)


@_replacing
def refill(rule: Any, state: Any, priorities: Array, alpha: Array) -> Any:
    """The state of a fresh sampler with items of these priorities, -1 for none, [capacity]: the bits of a history."""
    state = dataclasses.replace(state, priorities=state.priorities.at[: state.tree.capacity].set(priorities))
    if state.ranks is not None:
        state = dataclasses.replace(state, ranks=priority_tree.fill(state.ranks, priorities))
    return rule.reweight(state, alpha)


def _draw(
    rule: Any,
    state: Any,
    key: Array,
    batch_size: int,
    size: Array,
    beta: Array | None,
    items: list[Array],
    lanes: tuple[int, ...],
) -> tuple[Array, tuple[Array, Array] | None, list[Array]]:
    """Drawn slots as int32, and the items at them.

    With a beta also their importance weights, and whether there was anything to draw.
    """
    drawn = rule.sample(state, key, batch_size, size)[1]
    weighed = None
    if beta is not None:
        weighed = fbuf.importance_weights(drawn, beta), drawn.valid[0]
    return drawn.slots, weighed, storage.read(items, drawn.slots, lanes) if items else []


draw = jax.jit(_draw, compiler_options=_OPTIONS, static_argnums=(0, 3, 7))


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=2)
def read(items: list[Array], slots: Array, lanes: tuple[int, ...]) -> list[Array]:
    """Copies of the items at slots."""
    return storage.read(items, slots, lanes)


@functools.partial(jax.jit, compiler_options=_OPTIONS, donate_argnums=0)
def write(items: list[Array], rows: Array, batch: list[Array]) -> list[Array]:
    """Items with batch at rows, in place; equal rows come with equal values."""
    return [kept.at[rows].set(new, mode="promise_in_bounds") for kept, new in zip(items, batch, strict=True)]


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1))
def allocate(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> list[Array]:
    """Zeros."""
    return [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
