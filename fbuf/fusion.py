"""A value computed once, where XLA would compute it again for every use."""

import jax
import jax.numpy as jnp
from jax import Array


def computed_once(values: Array) -> Array:
    """The same values, kept from being fused into what uses them.

    XLA fuses the arithmetic behind an index into every gather and scatter that takes it: random bits, or a search, are
    then repeated for each leaf and each level of a tree. On the CPU `jax.lax.optimization_barrier` is gone before that
    fusion is decided. A loop is not: here one that turns integers into their complement, or floats into their negative,
    and back. Cost: about 3 microseconds.
    """
    turn = jnp.negative if jnp.issubdtype(values.dtype, jnp.floating) else jnp.invert
    return jax.lax.fori_loop(0, 2, lambda _, held: turn(held), values)
