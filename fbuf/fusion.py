"""Values computed once and now, where XLA would compute them again for every use, or later."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

T = TypeVar("T")


@jax.jit  # called outside of any program, it would otherwise compile its loop in every call
def computed_once(values: T) -> T:
    """The same arrays, kept from being fused into what uses them; all are there before one of them is used.

    XLA fuses the arithmetic behind an index into every gather and scatter that takes it: random bits, or a search, are
    then repeated for each leaf and each level of a tree. And a read that is fused into a later use comes after a write
    in place, for which XLA copies the whole array. On the CPU `jax.lax.optimization_barrier` is gone before fusion is
    decided. A loop is not: here one that turns integers into their complement, or floats into their negative, and back.
    Cost: about 3 microseconds.
    """

    def turn(held: Array) -> Array:
        return jnp.negative(held) if jnp.issubdtype(held.dtype, jnp.floating) else jnp.invert(held)

    return jax.lax.fori_loop(0, 2, lambda _, held: jax.tree.map(turn, held), values)
