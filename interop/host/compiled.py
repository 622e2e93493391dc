"""The one place that compiles and donates. Each function is traced once per rule and shapes, for any values.

Called inside `bridge.exact()`, or with 32-bit values only. Batches whose length varies come padded to a power of two by
repeating their last entry, so that no length of batch costs a trace of its own: equal entries at equal places are well
defined. Programs that take over the state of a sampler are for `Lent`.
"""

import dataclasses
import functools
import platform
from collections.abc import Callable
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


def _taking_over(function: Callable[..., Any]) -> Any:
    """For a function of a rule, a state and more that returns a state, and maybe more: a program for `Lent.to`.

    The state that it is given is donated.
    """

    @functools.wraps(function)
    def leaves_first(rule: Any, state: Any, *given: Any) -> tuple[Any, ...]:
        found = function(rule, state, *given)
        new, *more = found if isinstance(found, tuple) else (found,)
        return tuple(jax.tree.leaves(new)), *more

    return jax.jit(leaves_first, compiler_options=_OPTIONS, static_argnums=0, donate_argnums=1)


def padded(values: np.ndarray, least: int = 1) -> np.ndarray:
    """The entries of a 1-d array, and the last one again up to the next power of two; in memory of their own.

    JAX reads arguments of NumPy after the call has returned: what a program is given must not be written any more.
    """
    count = values.shape[0]
    out = np.empty(max(1 << (count - 1).bit_length(), least), values.dtype)
    out[:count], out[count:] = values, values[-1]
    return out


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1))
def init(rule: Any, capacity: int) -> Any:
    """Fresh state of a sampler."""
    return rule.init(capacity)


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1))
def init_excluding(rule: Any, capacity: int) -> Any:
    """Fresh state of a sampler that can be told what not to draw."""
    return rule.init_excluding(capacity)


@_taking_over
def exclude(rule: Any, state: Any, slots: Array, allowed: Array) -> Any:
    """The sampler's state after items at slots were allowed to be drawn, or not."""
    return rule.exclude(state, slots, allowed)


@_taking_over
def written(rule: Any, state: Any, slots: Array) -> Any:
    """The sampler's state after new items came into slots."""
    return rule.written(state, slots.astype(jnp.int32))


def _assign(rule: Any, state: Any, slots: Array, priorities: Array, highest: Array) -> Any:
    """The sampler's state after items, new or not, were given priorities; new items shall get `highest` from now on."""
    return dataclasses.replace(rule.written(state, slots, priorities), highest=highest)


assign = _taking_over(_assign)


class Words:
    """Numbers for a program on the CPU in one array: each argument of a call takes a microsecond or two.

    Priorities, beta and the highest priority; then the slots that get the priorities, the two words of a random key, and
    the number of items. What a program was given must not be written any more.
    """

    def __init__(self, count: int, dtype: str) -> None:
        """For so many slots."""
        floats = (count + 2) * _WIDTHS[dtype]
        self.count, self._all = count, np.empty(floats + count + 3, np.int32)
        self.values, self.slots = self._all[:floats].view(dtype), self._all[floats:]  # and what comes behind them

    def closed(self, beta: Any, highest: Any, key: np.ndarray, size: int) -> np.ndarray:
        """The array, with what comes behind priorities and slots."""
        count, floats, whole = self.count, self.values, self.slots
        floats[count], floats[count + 1] = beta, highest
        whole[count : count + 2], whole[count + 2] = key.view(np.int32), size
        return self._all


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
    """The floats and the whole numbers of `Words`."""
    width = _WIDTHS[dtype]
    floats = ((words.shape[0] - 2 * width - 3) // (width + 1) + 2) * width
    shape = (-1,) if width == 1 else (-1, width)
    return jax.lax.bitcast_convert_type(words[:floats].reshape(shape), dtype), words[floats:]


@functools.cache
def moving(structure: Any) -> tuple[bool, ...]:
    """Which leaves of a prioritized state of this structure `assign_and_draw` changes."""
    places = jax.tree.unflatten(structure, range(structure.num_leaves))
    still = (places.alpha, places.highest_slot, places.refused)
    return tuple(place not in still for place in range(structure.num_leaves))


def _whole(structure: Any, moved: Leaves, still: Leaves) -> Any:
    """The state of two halves of its leaves, each with None in the places of the other."""
    return jax.tree.unflatten(structure, [b if a is None else a for a, b in zip(moved, still, strict=True)])


def _weighed(rule: Any, state: Any, batch_size: int, whole: Array, beta: Array) -> Array:
    """Words: drawn slots as int64, their importance weights, and whether there was anything to draw."""
    key = jax.lax.bitcast_convert_type(whole[-3:-1], jnp.uint32)
    slots, weighed, _ = _draw(rule, state, key, batch_size, whole[-1], beta, [], ())
    assert weighed is not None
    slots = jnp.stack([slots, jnp.zeros_like(slots)], 1).reshape(-1)
    weights = jax.lax.bitcast_convert_type(weighed[0], jnp.int32).reshape(-1)
    return jnp.concatenate([slots, weights, weighed[1].astype(jnp.int32)[None]])


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1, 4), donate_argnums=2)
def assign_and_draw(
    rule: Any, structure: Any, moved: Leaves, still: Leaves, batch_size: int, words: Array
) -> tuple[Leaves, Array]:
    """`assign` and then `draw_weighed`: one program takes less than two, and half as much where other work came between.

    For `Lent.part_to`, and rules whose new items get the highest priority ever given.
    """
    floats, whole = _opened(words, rule.dtype)
    state = _assign(rule, _whole(structure, moved, still), whole[:-3], floats[:-2], floats[-1])
    leaves = jax.tree.leaves(state)
    new = tuple(leaf if moves else None for leaf, moves in zip(leaves, moving(structure), strict=True))
    return new, _weighed(rule, state, batch_size, whole, floats[-2])


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1, 4))
def draw_weighed(rule: Any, structure: Any, moved: Leaves, still: Leaves, batch_size: int, words: Array) -> Array:
    """What is drawn, as words: see `read_words`. The words that are given are of no slots."""
    floats, whole = _opened(words, rule.dtype)
    return _weighed(rule, _whole(structure, moved, still), batch_size, whole, floats[-2])


@_taking_over
def update(rule: Any, state: Any, slots: Array, priorities: Array, highest: Array) -> Any:
    """The sampler's state after items were given priorities; `highest` is the highest of all that the host knows."""
    return _topped(rule, rule.update(state, slots.astype(jnp.int32), priorities), highest)


@_taking_over
def update_whole(rule: Any, state: Any, slots: Array, priorities: Array, filled: Array) -> tuple[Any, Array]:
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


@_taking_over
def reweight(rule: Any, state: Any, alpha: Array) -> Any:
    """The sampler's state under another alpha."""
    return rule.reweight(state, alpha)


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=0, donate_argnums=1)
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
