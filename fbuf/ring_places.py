"""Places around a ring. No sum passes what its type holds, whatever the size of the ring."""

import jax.numpy as jnp
from jax import Array


def wrapped(place: Array, size: int) -> Array:
    """Places below 2 * size, uint32, as int32 places of a ring of that size."""
    return jnp.where(place >= size, place - jnp.uint32(size), place).astype(jnp.int32)


def count_up(written: Array, by: Array) -> Array:
    """A count of [2] uint32, low and high word, after it grew by less than 2^32."""
    low = written[0] + by.astype(jnp.uint32)
    return jnp.stack([low, written[1] + (low < written[0]).astype(jnp.uint32)])


def onward(place: Array, steps: Array, size: int) -> Array:
    """Places fewer than `size` steps on."""
    return jnp.where(steps >= size - place, steps - (size - place), place + steps)


def backward(place: Array, steps: Array | int, size: int) -> Array:
    """Places fewer than `size` steps back."""
    return jnp.where(place < steps, place - steps + size, place - steps)


def moved(place: Array, steps: Array, size: int) -> Array:
    """Places that many steps, fewer than `size` either way, on."""
    back = jnp.where(place + jnp.minimum(steps, 0) < 0, place + jnp.minimum(steps, 0) + size, place + steps)
    return jnp.where(steps >= 0, onward(place, steps, size), back)
