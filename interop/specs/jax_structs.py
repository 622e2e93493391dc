"""Specs as pytrees of `jax.ShapeDtypeStruct`, such as `fbuf.Buffer.init` takes for an item, and back."""

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
    """A `jax.ShapeDtypeStruct` of the shape and dtype of a spec; for a Composite a dict of them, nested as it is.

    The example item of `fbuf.Buffer.init`; for a buffer with lanes take the spec of one of them, such as `spec[0]`.
    Where JAX's 64-bit types are off, those of 64 bits become 32 bits, as NumPy's arrays do in a buffer.

    Raises:
        TypeError: an entry describes no tensors, or has a dtype that JAX has not.
        ValueError: a dim is dynamic.
    """

    def leaf(spec: TensorSpec, at: str) -> jax.ShapeDtypeStruct:
        if spec.dtype not in DTYPES:
            raise TypeError(f"{at} is {spec.dtype}, which JAX has not: cast it with to(dtype)")
        return jax.ShapeDtypeStruct(tuple(spec.shape), jax.dtypes.canonicalize_dtype(DTYPES[spec.dtype]))

    return converted(spec, leaf, lambda _, entries: entries)


def from_jax(tree: Any) -> TensorSpec:
    """The spec of an item: Unbounded, and `Categorical(2, dtype=bool)` for bools. Containers become Composites.

    Args:
        tree: a pytree of arrays or `jax.ShapeDtypeStruct`, as `fbuf.Buffer.init` takes it. The keys are those of dicts,
            the names of fields in NamedTuples and registered dataclasses, and places in tuples and lists, "0" the first.
            NumPy's arrays of 64 bits are of 32 bits where JAX's 64-bit types are off.

    Raises:
        TypeError: a leaf is no array, or has a dtype that torch has not, or one of 64 bits that JAX would narrow.
        ValueError: there is no array.
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
