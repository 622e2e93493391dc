"""The only programs that interop compiles and donates to. Each is traced once for a rule and shapes.

Call them inside `bridge.exact()`, or with 32-bit values only. Batches are padded to a power of two with copies of their
last entry, so that batch lengths share traces; equal entries at equal slots have a defined result.
"""

import dataclasses
import functools
import platform
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import PyTreeDef

import fbuf
from fbuf import Prioritized, PrioritizedState, priority_tree, storage

Leaves = tuple[Any, ...]
_WIDTHS = {"float32": 1, "float64": 2}  # words of a number

# By default XLA:CPU orders kernels for several threads. Then each kernel of a microsecond may wake a thread: a draw of 256
# takes three times as long.
IN_ORDER: dict[str, bool | str] = (
    {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    if jax.__version_info__ >= (0, 10)
    else {"xla_cpu_enable_concurrency_optimized_scheduler": False}
)
_OPTIONS = dict(IN_ORDER)
if platform.machine() in ("x86_64", "AMD64"):
    # XLA logs a mismatch of the processor whenever it loads a program with AVX-512 from the compilation cache.
    _OPTIONS["xla_cpu_max_isa"] = "AVX2"


def padded(values: np.ndarray, least: int = 1) -> np.ndarray:
    """A copy of a 1-d array, padded to the next power of two with its last entry.

    A copy, because JAX may read NumPy arguments after the call has returned.
    """
    count = values.shape[0]
    out = np.empty(max(1 << (count - 1).bit_length(), least), values.dtype)
    out[:count], out[count:] = values, values[-1]
    return out


# ---------------------------------------------------------------------- priorities on the host: see `HostPriorities`


def words_of(given: np.ndarray, slots: np.ndarray, alpha: float, beta: float, key: np.ndarray, size: int) -> np.ndarray:
    """The arguments of `assign_and_draw` in one int32 array, because each argument costs a microsecond or two.

    Priorities, alpha and beta; then the slots of the priorities, the two words of a random key, and the number of items.
    Priorities and slots are padded as by `padded`, to 64 at least, which cost little more than one.
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
    """Drawn slots, int64, their importance weights, and whether anything could be drawn: views of these words."""
    slots = 2 * ((drawn.size - 1) // (2 + _WIDTHS[dtype]))  # the words of all slots that were drawn
    return drawn[: 2 * batch_size].view(np.int64), drawn[slots:-1].view(dtype)[:batch_size], bool(drawn[-1])


def shared_size(batch_size: int) -> int:
    """The number of draws of the program for a batch size; batch sizes share programs. At most twice the batch.

    The first entries of a larger draw are those of a smaller one with the same key.
    """
    return 1 << (batch_size - 1).bit_length() if batch_size <= 1024 else -(-batch_size // 1024) * 1024


def _opened(words: Array, dtype: str) -> tuple[Array, Array]:
    """The floats and the integers of `words_of`."""
    width = _WIDTHS[dtype]
    floats = ((words.shape[0] - 2 * width - 3) // (width + 1) + 2) * width
    shape = (-1,) if width == 1 else (-1, width)
    return jax.lax.bitcast_convert_type(words[:floats].reshape(shape), dtype), words[floats:]


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=0)
def tree_of(rule: Prioritized, given: Array, alpha: Array) -> Leaves:
    """The arrays of the tree over items with these priorities, [capacity], -1 for items that cannot be drawn."""
    tree = priority_tree.fill(rule.init(given.shape[0]).tree, _weights(rule, given, alpha))
    return tree.leaves, tree.sums, tree.minima


def _weights(rule: Prioritized, given: Array, alpha: Array) -> Array:
    return jnp.where(given >= 0, rule.value(jnp.maximum(given, 0), alpha), 0)


def tree_with(arrays: Leaves, capacity: int) -> priority_tree.PriorityTree:
    """The tree of these arrays. (Plain tuples are faster arguments and results.)"""
    leaves, sums, minima = arrays
    return priority_tree.PriorityTree(leaves, sums, minima, None, capacity)


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1, 2), donate_argnums=3)
def assign_and_draw(
    rule: Prioritized, capacity: int, batch_size: int, arrays: Leaves, words: Array
) -> tuple[Leaves, Array | None]:
    """The tree with new priorities at slots, equal ones at equal slots, and a draw from it: see `read_words`."""
    floats, whole = _opened(words, rule.dtype)
    weights = _weights(rule, floats[:-2], floats[-2])
    tree = priority_tree.update(tree_with(arrays, capacity), whole[:-3], weights, settled=True)
    drawn = _drawn_words(rule, tree, batch_size, floats, whole) if batch_size else None
    return (tree.leaves, tree.sums, tree.minima), drawn


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1, 2))
def draw_words(rule: Prioritized, capacity: int, batch_size: int, arrays: Leaves, words: Array) -> Array:
    """The draw of `assign_and_draw` from an unchanged tree."""
    return _drawn_words(rule, tree_with(arrays, capacity), batch_size, *_opened(words, rule.dtype))


def _drawn_words(
    rule: Prioritized, tree: priority_tree.PriorityTree, batch_size: int, floats: Array, whole: Array
) -> Array:
    key = jax.lax.bitcast_convert_type(whole[-3:-1], jnp.uint32)
    drawn = rule.draw(tree, key, batch_size, whole[-1])
    slots = jnp.stack([drawn.slots, jnp.zeros_like(drawn.slots)], 1).reshape(-1)
    weights = jax.lax.bitcast_convert_type(fbuf.importance_weights(drawn, floats[-1]), jnp.int32).reshape(-1)
    return jnp.concatenate([slots, weights, drawn.valid[:1].astype(jnp.int32)])


# ---------------------------------------------------------------------- priorities on a device: see `DevicePriorities`


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1, 2))
def init(rule: Prioritized, capacity: int, excluding: bool) -> PrioritizedState:
    """Fresh state of a sampler; with `excluding` one in which items may be excluded from draws."""
    return rule.init_excluding(capacity) if excluding else rule.init(capacity)


_replacing = functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=0, donate_argnums=1)


exclude = _replacing(Prioritized.exclude)
reweight = _replacing(Prioritized.reweight)


@_replacing
def update(
    rule: Prioritized, state: PrioritizedState, slots: Array, priorities: Array, highest: Array
) -> PrioritizedState:
    """The state after new priorities; `highest` is the highest priority that the host knows."""
    return _topped(rule, rule.update(state, slots, priorities), highest)


def _topped(rule: Prioritized, state: PrioritizedState, highest: Array) -> PrioritizedState:
    """The state with the highest priority of an update, even if a later one of an equal slot replaced it."""
    if rule.new_items != "highest_ever":
        return state
    return dataclasses.replace(state, highest=jnp.maximum(state.highest, highest))


@functools.partial(jax.jit, compiler_options=_OPTIONS)
def masses(tree: priority_tree.PriorityTree) -> Array:
    """The sum and the smallest positive value of a tree, [2]."""
    return jnp.stack([priority_tree.total(tree), priority_tree.minimum(tree)])


@_replacing
def refill(rule: Prioritized, state: PrioritizedState, priorities: Array, alpha: Array) -> PrioritizedState:
    """The state of a fresh sampler with items of these priorities, [capacity], -1 for none."""
    state = dataclasses.replace(state, priorities=state.priorities.at[: state.tree.capacity].set(priorities))
    if state.ranks is not None:
        state = dataclasses.replace(state, ranks=priority_tree.fill(state.ranks, priorities))
    return rule.reweight(state, alpha)


# ---------------------------------------------------------------------- draws and writes on a device


def request_words(key: np.ndarray, size: int, beta: np.ndarray | None = None) -> np.ndarray:
    """The arguments of `draw` in one int32 array: a random key, the number of items, and beta where there are weights."""
    if beta is None:
        return np.array([*key.view(np.int32), size], np.int32)
    words = np.empty(3 + beta.itemsize // 4, np.int32)
    words[:2], words[2], words[3:] = key.view(np.int32), size, beta.reshape(1).view(np.int32)
    return words


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1, 2, 5))
def draw(
    rule: fbuf.Sampler,
    structure: PyTreeDef,
    batch_size: int,
    state: Sequence[Array],
    words: Array,
    lanes: tuple[int, ...],
    items: Sequence[Array],
) -> tuple[Array, Array | None, Array | None, list[Array]]:
    """Drawn slots, and copies of the items there. See `request_words`.

    With a beta also importance weights, and whether anything could be drawn. `state` has the leaves of `structure`. Slots
    are int64 where 64-bit types are on.
    """
    key = jax.lax.bitcast_convert_type(words[:2], jnp.uint32)
    drawn = rule.sample(jax.tree.unflatten(structure, state), key, batch_size, words[2])[1]
    weights = valid = None
    if words.shape[0] > 3:
        width = words.shape[0] - 3
        bits = words[3] if width == 1 else words[3:]
        beta = jax.lax.bitcast_convert_type(bits, jnp.float32 if width == 1 else jnp.float64)
        weights, valid = fbuf.importance_weights(drawn, beta), drawn.valid[0]
    slots = drawn.slots.astype(jax.dtypes.canonicalize_dtype(jnp.int64))
    return slots, weights, valid, storage.read(items, drawn.slots, lanes) if items else []


read = jax.jit(storage.read, compiler_options=_OPTIONS, static_argnums=2)  # copies of the items at slots


class RowsForm(NamedTuple):
    """What `change` does to the leaves of items: a batch is written at `size` rows.

    Words: the numbers of the rows; where `dims` is more than 1, their coordinates, one after the other. Equal rows have
    equal values. Arrays: a batch for each leaf, but for those that store the numbers of the rows.
    """

    size: int
    dims: int
    numbered: tuple[int, ...]

    @property
    def words(self) -> int:
        return self.size * self.dims

    def changed(self, items: list[Array], words: Array, given: Iterator[Array]) -> tuple[list[Array], Array]:
        at = words.reshape(self.dims, self.size)
        rows = at[0] if self.dims == 1 else tuple(at)
        held = []
        for place, kept in enumerate(items):
            new = at[0].astype(kept.dtype) if place in self.numbered else next(given)
            held.append(kept.at[rows].set(new, mode="promise_in_bounds"))
        return held, words[0]


class PrioritiesForm(NamedTuple):
    """What `change` does to priorities: `new` items get the highest one; then, with `updates`, items get given ones.

    An update is made as a whole or not at all: slots must be -1 or below the number of items, priorities finite and at
    least 0. The flag says whether it was.

    Words: the slots of new items and then the number of items; the `named` slots of the update. Arrays: priorities of the
    update, after its slots where these are not among the words. The state has the leaves of `structure` and behind them
    the number of items.
    """

    rule: Prioritized
    structure: PyTreeDef
    new: int
    updates: bool
    named: int

    @property
    def words(self) -> int:
        return self.new + bool(self.new) + self.named

    def changed(self, held: list[Array], words: Array, given: Iterator[Array]) -> tuple[list[Array], Array]:
        state, size = jax.tree.unflatten(self.structure, held[:-1]), held[-1]
        flag = size
        if self.new:
            state = self.rule.written(state, words[: self.new])
            flag = size = jnp.maximum(size, words[self.new].astype(size.dtype))
        if self.updates:
            slots = words[words.shape[0] - self.named :] if self.named else next(given)
            state, flag = _updated(self.rule, state, slots.astype(size.dtype), next(given), size)
        return [*jax.tree.leaves(state), size], flag


Form = RowsForm | PrioritiesForm


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=0, donate_argnums=1)
def change(
    forms: tuple[Form, ...], held: list[list[Array]], words: Array | None, given: list[Array]
) -> tuple[list[list[Array]], list[Array]]:
    """The arrays after changes of these forms, and a number of each that is there once the given arrays have been read.

    `words` and `given` have those of the first change, then those of the next.
    """
    begin, lent, changed, flags = 0, iter(given), [], []
    for form, arrays in zip(forms, held, strict=True):
        own = jnp.zeros(0, jnp.int32) if words is None else words[begin : begin + form.words]
        arrays, flag = form.changed(arrays, own, lent)
        begin += form.words
        changed.append(arrays)
        flags.append(flag)
    return changed, flags


def _updated(
    rule: Prioritized, state: PrioritizedState, slots: Array, priorities: Array, size: Array
) -> tuple[PrioritizedState, Array]:
    """The state after an update, if all of it is valid, and whether it is."""
    priorities = priorities.astype(state.priorities.dtype)
    fine = jnp.all((slots >= -1) & (slots < size) & jnp.isfinite(priorities) & (priorities >= 0))
    slots, priorities = jnp.where(fine, slots, -1), jnp.where(fine, priorities, 0)
    return _topped(rule, rule.update(state, slots, priorities), jnp.max(jnp.where(slots >= 0, priorities, 0))), fine


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=(0, 1))
def allocate(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]) -> list[Array]:
    """Zeros."""
    return [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
