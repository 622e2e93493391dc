"""Conversion between specs and pytrees of `jax.ShapeDtypeStruct`, the example items of `fbuf.Buffer.init`."""

from typing import Any

import jax
import torch

from fbuf import checks
from interop.data.bridge import DTYPES, FROM_NUMPY
from interop.specs.bounded import Unbounded
from interop.specs.categorical import Categorical
from interop.specs.composite import Composite
from interop.specs.leaves import converted
from interop.specs.spec import TensorSpec


def to_jax(spec: TensorSpec) -> Any:
    """The `jax.ShapeDtypeStruct` of a spec; for a Composite, a nested dict of them.

    Pass it to `fbuf.Buffer.init` as the example item. For a buffer with lanes, convert the spec of one lane, such as
    `spec[0]`. If JAX's 64-bit types are disabled, 64-bit dtypes become 32-bit ones, as NumPy arrays do in a buffer.

    Raises:
        TypeError: an entry describes no tensors, or has a dtype that JAX lacks.
        ValueError: a dim is dynamic.
    """

    def leaf(spec: TensorSpec, at: str) -> jax.ShapeDtypeStruct:
        if spec.dtype not in DTYPES:
            raise TypeError(f"{at} is {spec.dtype}, which JAX does not support: cast it with to(dtype)")
        return jax.ShapeDtypeStruct(tuple(spec.shape), jax.dtypes.canonicalize_dtype(DTYPES[spec.dtype]))

    return converted(spec, leaf, lambda _, entries: entries)


def from_jax(tree: Any) -> TensorSpec:
    """The spec of an item: Unbounded, or `Categorical(2, dtype=bool)` for bools. Containers become Composites.

    Args:
        tree: a pytree of arrays or `jax.ShapeDtypeStruct`, as for `fbuf.Buffer.init`. Keys come from dict keys, field names
            of NamedTuples and registered dataclasses, and positions in tuples and lists ("0" first). 64-bit NumPy arrays
            become 32-bit if JAX's 64-bit types are disabled.

    Raises:
        TypeError: a leaf is no array, or has a dtype that torch lacks or a 64-bit dtype that JAX would narrow.
        ValueError: the tree has no array.
    """
    made = Composite()
    for path, leaf in jax.tree_util.tree_leaves_with_path(checks.item_spec(tree)):
        if leaf.dtype not in FROM_NUMPY:
            where = jax.tree_util.keystr(path) or "the item"
            raise TypeError(f"{where} is {leaf.dtype}, which has no counterpart among {list(DTYPES)}: cast it first")
        dtype = FROM_NUMPY[leaf.dtype]
        is_bool = dtype == torch.bool
        spec = Categorical(2, leaf.shape, dtype=dtype) if is_bool else Unbounded(leaf.shape, dtype=dtype)
        if not path:
            return spec
        made[tuple(jax.tree_util.keystr((key,), simple=True) for key in path)] = spec
    return made
