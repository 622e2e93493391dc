"""Steps of a buffer as programs: calls of one, and many of them in one."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Step = Callable[[Any, Array, Any], tuple[Any, Any]]


def scanned(step: Step, count: int) -> Step:
    """`count` steps in a scan: of a state, a key and the rows of each step, the state and what the last step drew.

    What is drawn rides in the carry, so that every step has to make it.
    """

    def steps(state: Any, key: Array, rows: Any) -> tuple[Any, Any]:
        def body(carry: tuple[Any, Any], key: Array) -> tuple[tuple[Any, Any], None]:
            return step(carry[0], key, rows), None

        drawn = jax.eval_shape(step, state, key, rows)[1]
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), drawn)
        found: tuple[Any, Any] = jax.lax.scan(body, (state, nothing), jax.random.split(key, count))[0]
        return found

    return steps


def donated_calls(state: Any, step: Step, rows: Any, keys: Iterator[Array] | None = None) -> Callable[[], None]:
    """Calls of a jitted step, each of the state that the one before left, that wait for their results."""
    keys = itertools.cycle(jax.random.split(jax.random.key(0), 64)) if keys is None else keys
    jitted = jax.jit(step, donate_argnums=0)

    def call() -> None:
        nonlocal state
        state, drawn = jitted(state, next(keys), rows)
        jax.block_until_ready((state, drawn))

    return call
