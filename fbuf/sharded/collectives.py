"""Rows and numbers of all devices of a mesh axis, one collective for each call, whatever the leaves."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from fbuf.sharded.words import packed, unpacked


def differs(value: Array, axis: str) -> bool:
    """Whether the type of an array says that it may differ between the devices. Never without `check_vma`."""
    try:
        jax.lax.pcast(value, axis, to="varying")
    except ValueError:  # it is of that type already
        return True
    return False


def varying(values: Any, axis: str) -> Any:
    """The same arrays with the type of those that may differ between devices, as a carry of a loop needs them."""
    return jax.tree.map(lambda leaf: leaf if differs(leaf, axis) else jax.lax.pcast(leaf, axis, to="varying"), values)


def of_all(numbers: Any, axis: str) -> Any:
    """Scalars of this device as arrays [devices] of all of them, the same on every device. One all-reduce."""
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], numbers)
    own = jnp.arange(jax.lax.axis_size(axis))[:, None] == jax.lax.axis_index(axis)
    return unpacked(jax.lax.psum(jnp.where(own, packed(rows), 0), axis), rows)


def gathered(rows: Any, axis: str) -> Any:
    """Leaves [n, ...] of this device as [devices * n, ...] of all of them in their order. One all-gather."""
    return unpacked(jax.lax.all_gather(packed(rows), axis, tiled=True), rows)


def delivered(rows: Any, own: Bool[Array, " batch"], axis: str, split: bool) -> Any:
    """Rows of a batch, each from the one device where `own` says so, bit for bit.

    With `split` this device's part of the batch, [batch / devices, ...], by one reduce-scatter; without, all of it on
    every device by one all-reduce.
    """
    words = jnp.where(own[:, None], packed(rows), 0)
    if split:
        return unpacked(jax.lax.psum_scatter(words, axis, scatter_dimension=0, tiled=True), rows)
    return unpacked(jax.lax.psum(words, axis), rows)
