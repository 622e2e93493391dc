"""Items by slot: a pytree of [capacity, *lanes, ...] arrays."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int


def init(capacity: int, lanes: tuple[int, ...], example: Any) -> Any:
    """Zeros for `capacity` rows of items like `example`, a pytree of arrays or `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: jnp.zeros((capacity, *lanes, *leaf.shape), leaf.dtype), example)


def write(items: Any, rows: Int[Array, " n"], batch: Any, *, repeating: bool = False) -> Any:
    """Items with batch at rows, which are in range. In place when `items` is donated. O(batch).

    Rows are all different; or `repeating`, equal ones then with equal items.
    """
    return jax.tree.map(
        lambda kept, new: kept.at[rows].set(new, mode="promise_in_bounds", unique_indices=not repeating), items, batch
    )


@functools.partial(jax.jit, static_argnums=2)  # outside of any program the reshape would copy all items
def read(items: Any, slots: Int[Array, " batch"], lanes: tuple[int, ...] = ()) -> Any:
    """A copy of the items at slots, which are in range; lanes are folded into the slot. O(batch)."""

    def gather(kept: Array) -> Array:
        flat = kept.reshape(kept.shape[0] * math.prod(lanes), *kept.shape[1 + len(lanes) :])
        return flat.at[slots].get(mode="promise_in_bounds")

    return jax.tree.map(gather, items)
