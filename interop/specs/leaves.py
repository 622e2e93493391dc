"""Specs as trees of something else, such as spaces or arrays, for which every size has to be known."""

from collections.abc import Callable
from typing import Any

from interop.specs.composite import Composite
from interop.specs.non_tensor import NonTensor
from interop.specs.spec import TensorSpec
from interop.specs.stacked import StackedComposite


def converted(
    spec: Any,
    leaf: Callable[[TensorSpec, str], Any],
    node: Callable[[Composite, dict[str, Any]], Any],
    at: str = "the spec",
    objects: Callable[[NonTensor], Any] | None = None,
) -> Any:
    """Fold a spec: `leaf` for a spec of tensors; `node` for a Composite, given the results of its entries.

    Args:
        spec: to be converted; stays as it is.
        leaf: is given a spec, whose sizes are known, and its place for an error.
        node: is given a Composite, and its entries converted.
        at: the place of the spec.
        objects: is given specs of Python objects, which are a TypeError without it.

    Raises:
        TypeError: an entry is None or describes no tensors, or the members of a lazy stack have different keys.
        ValueError: a dim is dynamic.
    """
    if isinstance(spec, StackedComposite) and spec.exclusive():
        raise TypeError(f"{at} is a lazy stack of specs with different keys: convert its members, unbind(stack_dim)")
    if isinstance(spec, Composite):
        return node(spec, {key: converted(each, leaf, node, f"{at}[{key!r}]", objects) for key, each in spec.items()})
    if isinstance(spec, NonTensor) and objects is not None:
        return objects(spec)
    if not isinstance(spec, TensorSpec) or spec.dtype is None:
        raise TypeError(
            f"{at} is {type(spec).__name__}, which describes no tensors: delete it from a clone of the spec"
        )
    if -1 in spec.shape:
        raise ValueError(f"{at} has a dynamic dim (-1), shape {list(spec.shape)}: build it with a size that is known")
    return leaf(spec, at)
