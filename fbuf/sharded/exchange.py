"""Rows between the devices of a mesh axis: one collective for each call, whatever the leaves, and bit for bit.

Rows travel as 32-bit words: unsigned integers are moved and added without a change of any bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool

from fbuf.row_words import packed, unpacked


def differs(value: Array, axis: str) -> bool:
    """Whether an array has a type that varies over the axis. Always False without `check_vma`."""
    try:
        jax.lax.pcast(value, axis, to="varying")
    except ValueError:  # its type says so already
        return True
    return False


def varying(values: Any, axis: str) -> Any:
    """The same arrays with types that vary over the axis, so that carries of loops keep one type."""
    return jax.tree.map(lambda leaf: leaf if differs(leaf, axis) else jax.lax.pcast(leaf, axis, to="varying"), values)


def of_all(rows: Any, axis: str) -> Any:
    """Leaves [n, ...] or [] of this device as [devices * n, ...] of all, typed as replicated. One all-reduce."""
    rows = jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf[None], rows)
    own = jnp.arange(jax.lax.axis_size(axis))[:, None, None] == jax.lax.axis_index(axis)
    words = packed(rows)
    return unpacked(jax.lax.psum(jnp.where(own, words[None], 0).reshape(-1, words.shape[1]), axis), rows)


def gathered(rows: Any, axis: str) -> Any:
    """Leaves [n, ...] of this device as [devices * n, ...] of all, typed as varying. One all-gather, half the bytes."""
    return unpacked(jax.lax.all_gather(packed(rows), axis, tiled=True), rows)


def delivered(rows: Any, own: Bool[Array, " batch"], axis: str, split: bool) -> Any:
    """Rows [batch, ...], each from the one device where `own` is True.

    With `split` this device's part of them, [batch / devices, ...], by one reduce-scatter; else all, by one all-reduce.
    """
    words = jnp.where(own[:, None], packed(rows), 0)
    if split and own.size:  # XLA refuses to scatter none
        return unpacked(jax.lax.psum_scatter(words, axis, scatter_dimension=0, tiled=True), rows)
    return unpacked(jax.lax.psum(words, axis), rows)
