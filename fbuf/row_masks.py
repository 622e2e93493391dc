"""Masks of rows: which rows of a batch are written. All sizes are known while tracing, the numbers of rows are not."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

_FEWER = 8  # so many times smaller is each part than the one before it


def count(mask: Bool[Array, " n"]) -> Int[Array, ""]:
    """How many rows are written."""
    return jnp.sum(mask, dtype=jnp.int32)


def ranks(mask: Bool[Array, " n"]) -> Int[Array, " n"]:
    """How many rows are written before each row."""
    return jnp.cumsum(mask, dtype=jnp.int32) - mask.astype(jnp.int32)


def last_true(mask: Bool[Array, " n"], most: int) -> Bool[Array, " n"]:
    """The last `most` rows of those that are written."""
    return mask if mask.shape[0] <= most else mask & (ranks(mask) >= count(mask) - most)


def order(mask: Bool[Array, " n"]) -> Int[Array, " n"]:
    """The rows that are written, in their order; the other entries are 0."""
    own = jnp.arange(mask.shape[0], dtype=jnp.int32)
    at = jnp.where(mask, ranks(mask), mask.shape[0])
    return jnp.zeros_like(own).at[at].set(own, mode="drop")


def over(mask: Array, ndim: int) -> Array:
    """A mask or numbers of rows, [n], in a shape that broadcasts against leaves of `ndim` dims, [n, ...]."""
    return mask.reshape(-1, *(1 for _ in range(ndim - 1)))


def spread(values: Int[Array, "*rows"], mask: Bool[Array, " n"]) -> Int[Array, "*rows"]:
    """Values of the rows that are written, in their order, at the places of these rows; -1 at the others."""
    found = values.at[ranks(mask)].get(mode="clip")
    return jnp.where(over(mask, values.ndim), found, -1)


def first_of_each_run(mask: Bool[Array, "runs time"]) -> Bool[Array, "runs time"]:
    """The first row of each run that is written."""
    return mask & (jnp.cumsum(mask, axis=1, dtype=jnp.int32) == 1)


def part_sizes(rows: int) -> list[int]:
    """Sizes of parts, the largest first, that make up any number of up to `rows` rows: all, an eighth, and so on to 1.

    Each but the first occurs fewer than 16 times.
    """
    sizes = [rows]
    while sizes[-1] > 1:
        sizes.append(max(sizes[-1] // _FEWER, 1))
    return sizes
