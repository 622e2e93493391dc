"""Rows of any leaves as rows of 32-bit words, and back, bit for bit: so that one collective moves them all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import UInt32

_WORD = 32


def packed(rows: Any) -> UInt32[Array, "n words"]:
    """Leaves [n, ...] side by side as words; a leaf takes the words that its bytes in one row need. O(bytes)."""
    return jnp.concatenate([_packed(leaf) for leaf in jax.tree.leaves(rows)], 1)


def unpacked(words: UInt32[Array, "n words"], like: Any) -> Any:
    """The rows that `packed` made words of: leaves with the dtypes and the shapes [any, ...] of `like`. O(bytes)."""
    leaves, structure = jax.tree.flatten(like)
    found, start = [], 0
    for leaf in leaves:
        count = width(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype))
        found.append(_unpacked(words[:, start : start + count], leaf.shape[1:], leaf.dtype))
        start += count
    return jax.tree.unflatten(structure, found)


def width(item: Any) -> int:
    """Words that an item takes; leaves are arrays or `jax.ShapeDtypeStruct` without the dimension of rows."""
    return sum(-(-leaf.size * _bytes_held(leaf.dtype) // 4) for leaf in jax.tree.leaves(item))


def _bits(dtype: Any) -> int:
    """Bits of a dtype's values: also of those of less than a byte, which take a byte each."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return 8
    return int((jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits)


def _bytes_held(dtype: Any) -> int:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(dtype).itemsize
    return max(_bits(dtype) // 8, 1)


def _packed(leaf: Array) -> UInt32[Array, "n words"]:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], -1)
    bits = _bits(leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.bool_):
        leaf = leaf.astype(jnp.uint8)
    elif bits < 8:
        leaf = jax.lax.bitcast_convert_type(leaf, f"uint{bits}").astype(jnp.uint8)
        bits = 8
    flat = leaf.reshape(leaf.shape[0], -1)
    if bits >= _WORD:
        words: Array = jax.lax.bitcast_convert_type(flat, jnp.uint32)
        return words.reshape(leaf.shape[0], -1)
    together = _WORD // bits
    flat = jnp.pad(jax.lax.bitcast_convert_type(flat, f"uint{bits}"), ((0, 0), (0, -flat.shape[1] % together)))
    words = jax.lax.bitcast_convert_type(flat.reshape(flat.shape[0], -1, together), jnp.uint32)
    return words


def _unpacked(words: UInt32[Array, "n words"], shape: tuple[int, ...], dtype: Any) -> Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = _unpacked(words, (*shape, 2), jnp.finfo(dtype).dtype)
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    rows, bits, size = words.shape[0], _bits(dtype), int(np.prod(shape, dtype=int))
    if bits >= _WORD:
        kept = words.reshape(rows, size, bits // _WORD)
        return jax.lax.bitcast_convert_type(kept[..., 0] if bits == _WORD else kept, dtype).reshape(rows, *shape)
    held = max(bits, 8)
    flat = jax.lax.bitcast_convert_type(words, f"uint{held}").reshape(rows, -1)[:, :size].reshape(rows, *shape)
    if jnp.issubdtype(dtype, jnp.bool_):
        return flat.astype(jnp.bool_)
    return jax.lax.bitcast_convert_type(flat.astype(f"uint{bits}"), dtype)
