"""Ways to keep the sums by which a draw in proportion to priorities is found: which is best on this device?

They answer the same two questions: in whose share a mass falls, and what is to be recomputed when values change. Masses come
in random order and sorted (those of a stratified draw are). These are for timing: the exactness, the corners and the
minima of `fbuf.priority_tree` are its own, and it is measured beside them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import gpu_parts
import jax
import jax.numpy as jnp
import measure
from jax import Array

from fbuf import priority_tree

_IN_BOUNDS = "promise_in_bounds"


class Sums(Protocol):
    """A rule: state is a pytree, `capacity` is a multiple of whatever the rule needs."""

    def of(self, values: Array) -> Any: ...
    def find(self, state: Any, masses: Array) -> Array: ...
    def update(self, state: Any, slots: Array, values: Array) -> Any: ...


@dataclasses.dataclass(frozen=True)
class FanOut:
    """A tree in which a parent is the sum of `fanout` children; one gather of a family a level."""

    fanout: int

    def of(self, values: Array) -> list[Array]:
        levels = [_padded(values, self.fanout)]
        while levels[-1].size > self.fanout:
            levels.append(_padded(levels[-1].reshape(-1, self.fanout).sum(1), self.fanout))
        return levels

    def find(self, state: list[Array], masses: Array) -> Array:
        node = jnp.zeros(masses.shape, jnp.int32)
        for level in reversed(state):
            family = level.reshape(-1, self.fanout).at[node].get(mode=_IN_BOUNDS)
            child, masses = _child(family, masses)
            node = node * self.fanout + child
        return node

    def update(self, state: list[Array], slots: Array, values: Array) -> list[Array]:
        levels = [state[0].at[slots].set(values, mode=_IN_BOUNDS)]
        for level in state[1:]:
            slots = slots // self.fanout
            family = levels[-1].reshape(-1, self.fanout).at[slots].get(mode=_IN_BOUNDS)
            levels.append(level.at[slots].set(family.sum(1), mode=_IN_BOUNDS))
        return levels


@dataclasses.dataclass(frozen=True)
class BlockSums:
    """Sums of blocks only: a draw sums these up anew, searches the running sum, and then one block."""

    block: int

    def of(self, values: Array) -> tuple[Array, Array]:
        leaves = _padded(values, self.block)
        return leaves, leaves.reshape(-1, self.block).sum(1)

    def find(self, state: tuple[Array, Array], masses: Array) -> Array:
        leaves, blocks = state
        running = jnp.cumsum(blocks)
        at = jnp.minimum(jnp.searchsorted(running, masses, side="right"), blocks.size - 1).astype(jnp.int32)
        before = jnp.where(at > 0, running.at[jnp.maximum(at - 1, 0)].get(mode=_IN_BOUNDS), 0)
        child, _ = _child(leaves.reshape(-1, self.block).at[at].get(mode=_IN_BOUNDS), masses - before)
        return at * self.block + child

    def update(self, state: tuple[Array, Array], slots: Array, values: Array) -> tuple[Array, Array]:
        leaves, blocks = state
        leaves = leaves.at[slots].set(values, mode=_IN_BOUNDS)
        at = slots // self.block
        family = leaves.reshape(-1, self.block).at[at].get(mode=_IN_BOUNDS)
        return leaves, blocks.at[at].set(family.sum(1), mode=_IN_BOUNDS)


@dataclasses.dataclass(frozen=True)
class RunningSum:
    """No sums at all: a draw sums up every value and searches."""

    def of(self, values: Array) -> Array:
        return values

    def find(self, state: Array, masses: Array) -> Array:
        return jnp.minimum(jnp.searchsorted(jnp.cumsum(state), masses, side="right"), state.size - 1).astype(jnp.int32)

    def update(self, state: Array, slots: Array, values: Array) -> Array:
        return state.at[slots].set(values, mode=_IN_BOUNDS)


@dataclasses.dataclass(frozen=True)
class Ours:
    """`fbuf.priority_tree`, whose draws are exact where these round; with the minima that weights need, or without."""

    minima: bool = True

    def of(self, values: Array) -> priority_tree.PriorityTree:
        return priority_tree.fill(priority_tree.init(values.size, minima=self.minima), values)

    def find(self, state: priority_tree.PriorityTree, masses: Array) -> Array:
        return priority_tree.find(state, masses)

    def update(self, state: priority_tree.PriorityTree, slots: Array, values: Array) -> priority_tree.PriorityTree:
        return priority_tree.update(state, slots, values, settled=True)


WAYS: dict[str, Sums] = {
    measure.OURS: Ours(),
    "ours, no minima": Ours(minima=False),
    "8": FanOut(8),
    "16": FanOut(16),
    "32": FanOut(32),
    "64": FanOut(64),
    "128": FanOut(128),
    "blocks of 32": BlockSums(32),
    "blocks of 128": BlockSums(128),
    "blocks of 512": BlockSums(512),
    "running sum": RunningSum(),
}


def _padded(values: Array, multiple: int) -> Array:
    return jnp.pad(values, (0, -values.size % multiple))


def _child(family: Array, masses: Array) -> tuple[Array, Array]:
    """Into which of each row its mass falls, the last that is not empty for one beyond, and what is left of the mass."""
    running = jnp.cumsum(family, axis=1)
    passed = (running <= masses[:, None]).sum(1, dtype=jnp.int32)
    last = family.shape[1] - 1 - jnp.argmax(family[:, ::-1] > 0, axis=1).astype(jnp.int32)
    child = jnp.minimum(passed, last)
    before = (
        jnp.take_along_axis(running, child[:, None], axis=1)[:, 0]
        - jnp.take_along_axis(family, child[:, None], axis=1)[:, 0]
    )
    return child, masses - before


def measured(place: gpu_parts.Place) -> gpu_parts.Part:
    """`find` and `update` of every way, by items and batch, per one of 16 in a scan."""
    sizes = (10_000,) if place.quick else (10**6, 10**8)
    timings = []
    for items in sizes:
        values = jax.random.uniform(jax.random.key(0), (items,)) + 1e-3
        states = {name: jax.jit(way.of)(values) for name, way in WAYS.items()}
        for batch in (256,) if place.quick else (256, 65_536):
            total = float(values.astype(jnp.float32).sum())
            shape = (gpu_parts.STEPS, batch)
            masses = jax.random.uniform(jax.random.key(1), shape, maxval=0.999) * total
            slots = jax.random.randint(jax.random.key(2), shape, 0, items)
            new = (slots % 997 + 1) / 997  # equal slots, equal values
            for order, given in (("random", masses), ("sorted", jnp.sort(masses, axis=1))):
                calls = {name: _finds(way, states[name], given) for name, way in WAYS.items()}
                timings.append(place.compare(f"find {batch} of {items}, {order}", calls, gpu_parts.STEPS))
            # Updates take over the states, which are donated: those of the next batch size are what these leave.
            held = {name: [state] for name, state in states.items()}
            calls = {name: _updates(way, held[name], slots, new) for name, way in WAYS.items()}
            timings.append(place.compare(f"update {batch} of {items}", calls, gpu_parts.STEPS))
            states = {name: each[0] for name, each in held.items()}
    return timings, {}


def _finds(way: Sums, state: Any, masses: Array) -> Callable[[], Any]:
    """Each on sums that have changed, as far as the compiler knows: running sums are not taken out of the loop."""

    def touched(leaf: Array, some: Array) -> Array:
        return jax.lax.dynamic_update_slice(leaf, leaf[:1] + 0 * some[:1], (0,))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state: Any, masses: Array) -> tuple[Any, Array]:
        def body(held: Any, some: Array) -> tuple[Any, Array]:
            held = jax.tree.map(lambda leaf: touched(leaf, some), held)
            return held, way.find(held, some)

        return jax.lax.scan(body, state, masses)

    held = [jax.tree.map(jnp.copy, state)]

    def call() -> None:
        held[0], slots = run(held[0], masses)
        slots.block_until_ready()

    return call


def _updates(way: Sums, held: list[Any], slots: Array, values: Array) -> Callable[[], Any]:
    def run(state: Any, slots: Array, values: Array) -> Any:
        return jax.lax.scan(lambda held, some: (way.update(held, *some), None), state, (slots, values))[0]

    jitted = jax.jit(run, donate_argnums=0)

    def call() -> None:
        held[0] = jax.block_until_ready(jitted(held[0], slots, values))

    return call
