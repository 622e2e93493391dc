"""Errors about structure, shape and dtype, raised while tracing: before anything runs, at no cost later."""

from typing import Any

import jax
import jax.numpy as jnp


def item_spec(example: Any) -> Any:
    """Shape and dtype of each leaf of one item, as JAX will hold them under the present 64-bit setting."""

    def spec(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
            _refuse_narrowing(_name(path), leaf.dtype)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        try:
            return jax.eval_shape(jnp.asarray, leaf)
        except TypeError as error:
            raise TypeError(f"{_name(path)}: an item holds arrays or jax.ShapeDtypeStruct, got {type(leaf)}") from error

    specs = jax.tree_util.tree_map_with_path(spec, example)
    if not jax.tree.leaves(specs):
        raise ValueError("an item needs at least one array, got an empty structure")
    return specs


def batch_length(items: Any, batch: Any, lanes: tuple[int, ...]) -> int:
    """How many rows `batch` has. TypeError or ValueError, naming the leaf, if it does not fit the stored `items`."""
    stored: Any = jax.tree.structure(items)
    given: Any = jax.tree.structure(batch)
    if stored != given:
        raise ValueError(f"items have the structure {stored}, the batch has {given}")
    length = None
    for (path, kept), new in zip(jax.tree_util.tree_leaves_with_path(items), jax.tree.leaves(batch), strict=True):
        name, shape = _name(path), jnp.shape(new)
        if len(shape) != kept.ndim or shape[1:] != kept.shape[1:]:
            wanted = ("n", *kept.shape[1:])
            where = f" (n rows, then lanes {lanes}, then one item)" if lanes else " (n rows, then one item)"
            raise ValueError(f"{name}: the batch needs shape {_shape(wanted)}{where}, got {_shape(shape)}")
        if length is not None and shape[0] != length:
            raise ValueError(f"{name}: this leaf has {shape[0]} rows, the leaves before it have {length}")
        length = shape[0]
        if isinstance(new, jax.Array):
            _refuse_narrowing(name, new.dtype)
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(new))
        if dtype != kept.dtype:
            raise TypeError(f"{name}: items are {kept.dtype}, the batch is {dtype}: cast it first")
    assert length is not None
    return length


def _refuse_narrowing(name: str, dtype: Any) -> None:
    """TypeError for a 64-bit type where JAX would make 32 bits of it. (NumPy's arrays follow JAX's custom: they do.)"""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"{name}: items cannot hold {dtype}; store jax.random.key_data(key)")
    held = jax.dtypes.canonicalize_dtype(dtype)
    if held != dtype:
        raise TypeError(f"{name}: {dtype} needs 64-bit types on (jax_enable_x64), or cast to {held}")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "item"


def _shape(shape: tuple[Any, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
