"""The one place that compiles and donates. Each function is traced once per rule and shapes, for any values.

Called inside `bridge.exact()`, or with 32-bit values only. Batches whose length varies come padded to a power of two by
repeating their last entry, so that no length of batch costs a trace of its own: equal entries at equal places are well
defined. Programs on the state of a sampler are for `Lent.to`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fbuf
from fbuf import priority_tree, storage

# By default XLA:CPU orders kernels so that several threads have work. Kernels of a microsecond then cost the waking of a
# thread each: a draw of 256 takes three times as long.
_OPTIONS: dict[str, bool | str] = (
    {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    if jax.__version_info__ >= (0, 10)
    else {"xla_cpu_enable_concurrency_optimized_scheduler": False}
)


def _taking_over(*static: int) -> Callable[[Callable[..., Any]], Any]:
    """For a function of a rule, a state and more that returns a state, and maybe more: a program for `Lent.to`.

    The state that it is given is donated. `static` are the places of further static arguments.
    """

    def program(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def leaves_first(rule: Any, state: Any, *given: Any) -> tuple[Any, ...]:
            found = function(rule, state, *given)
            new, *more = found if isinstance(found, tuple) else (found,)
            return tuple(jax.tree.leaves(new)), *more

        return jax.jit(leaves_first, compiler_options=_OPTIONS, static_argnums=(0, *static), donate_argnums=1)

    return program


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


@_taking_over()
def exclude(rule: Any, state: Any, slots: Array, allowed: Array) -> Any:
    """The sampler's state after items at slots were allowed to be drawn, or not."""
    return rule.exclude(state, slots, allowed)


@_taking_over()
def written(rule: Any, state: Any, slots: Array) -> Any:
    """The sampler's state after new items came into slots."""
    return rule.written(state, slots.astype(jnp.int32))


def _assign(rule: Any, state: Any, slots: Array, priorities: Array, highest: Array) -> Any:
    """The sampler's state after items, new or not, were given priorities; new items shall get `highest` from now on."""
    return dataclasses.replace(rule.written(state, slots, priorities), highest=highest)


assign = _taking_over()(_assign)


@_taking_over(5, 9)
def assign_and_draw(
    rule: Any,
    state: Any,
    slots: Array,
    priorities: Array,
    key: Array,
    batch_size: int,
    size: Array,
    beta: Array,
    items: list[Array],
    lanes: tuple[int, ...],
    highest: Array,
) -> tuple[Any, tuple[Array, tuple[Array, Array] | None, list[Array]]]:
    """`assign` and then `draw`: one program takes less than two, and half as much where other work came between."""
    state = _assign(rule, state, slots, priorities, highest)
    return state, _draw(rule, state, key, batch_size, size, beta, items, lanes)


@_taking_over()
def update(rule: Any, state: Any, slots: Array, priorities: Array, highest: Array) -> Any:
    """The sampler's state after items were given priorities; `highest` is the highest of all that the host knows."""
    return _topped(rule, rule.update(state, slots.astype(jnp.int32), priorities), highest)


@_taking_over()
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


@_taking_over()
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
