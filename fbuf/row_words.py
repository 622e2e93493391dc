"""Rows of any structure and dtype as 32-bit words, bit for bit, and their exchange between devices.

Each exchange is one collective, whatever the leaves. Unsigned words are moved and added without a change of any bit.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, UInt32


def packed(rows: Any) -> UInt32[Array, "n words"]:
    """Leaves [n, ...] side by side; each takes whole words in a row. O(bytes)."""
    return jnp.concatenate([_packed_leaf(leaf) for leaf in jax.tree.leaves(rows)], 1)


def unpacked(words: UInt32[Array, "n words"], like: Any) -> Any:
    """The inverse of `packed`: leaves with the structure, dtypes and shapes of `like`; n may differ."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([jax.eval_shape(_packed_leaf, leaf).shape[1] for leaf in leaves])
    parts = jnp.split(words, ends[:-1], axis=1)
    return jax.tree.unflatten(structure, [_unpacked_leaf(*each) for each in zip(parts, leaves, strict=True)])


def _packed_leaf(leaf: Array) -> UInt32[Array, "n words"]:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], -1)
    leaf = leaf.astype(_carrier(leaf.dtype))
    rows, size, count = leaf.shape[0], leaf.dtype.itemsize, math.prod(leaf.shape[1:])
    flat = jax.lax.bitcast_convert_type(leaf, f"uint{8 * min(size, 4)}").reshape(rows, count * max(size // 4, 1))
    if size >= 4:
        return flat
    flat = jnp.pad(flat, ((0, 0), (0, -count % (4 // size)))).reshape(rows, -(-count * size // 4), 4 // size)
    return jax.lax.bitcast_convert_type(flat, jnp.uint32)


def _unpacked_leaf(words: UInt32[Array, "n words"], like: Array) -> Array:
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        parts = _unpacked_leaf(words, jax.eval_shape(lambda leaf: jnp.stack([leaf.real, leaf.imag], -1), like))
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    carrier, shape = _carrier(like.dtype), (words.shape[0], *like.shape[1:])
    size, count = carrier.itemsize, math.prod(like.shape[1:])
    if size < 4:
        split = jax.lax.bitcast_convert_type(words, f"uint{8 * size}")
        words = split.reshape(shape[0], words.shape[1] * (4 // size))[:, :count]
    words = words.reshape(shape if size <= 4 else (*shape, size // 4))
    return jax.lax.bitcast_convert_type(words, carrier).astype(like.dtype)


def _carrier(dtype: Any) -> np.dtype:
    """A dtype of whole bytes that holds all values of a dtype."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.dtype(np.uint8)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.dtype(np.int8 if jnp.iinfo(dtype).bits < 8 else dtype)
    return np.dtype(jnp.bfloat16 if jnp.finfo(dtype).bits < 8 else dtype)


# ---------------------------------------------------------------------- between the devices of a mesh axis


def differs(value: Array, axis: str) -> bool:
    """Whether an array has a type that varies over the axis. Always False without `check_vma`."""
    try:
        jax.lax.pcast(value, axis, to="varying")
    except ValueError:  # its type says so already
        return True
    return False


def varying(values: Any, axis: str) -> Any:
    """The same arrays with types that vary over the axis, so that the carries of loops keep their type."""
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
