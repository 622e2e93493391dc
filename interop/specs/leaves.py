"""Conversion of nested specs with static sizes to trees of other objects, such as spaces or arrays."""

from collections.abc import Callable
from typing import Any

from interop.specs import torchrl_classes
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
    """Fold a spec: apply `leaf` to specs of tensors, and `node` to Composites with the results of their entries.

    Args:
        spec: the spec to convert, of this package or of torchrl; it is not modified.
        leaf: called with a spec without dynamic dims, and its path for errors.
        node: called with a Composite and its converted entries.
        at: the path of the spec, for errors.
        objects: called with a NonTensor. By default a NonTensor is a TypeError.

    Raises:
        TypeError: an entry is None or describes no tensors, or the members of a lazy stack have different keys.
        ValueError: a dim is dynamic.
    """
    spec = torchrl_classes.converted(spec)
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
