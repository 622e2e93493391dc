"""Conversion of specs to torchrl's classes and from them."""

import sys
from typing import Any

import torch

from interop.specs import torchrl_classes
from interop.specs.bounded import Bounded, Unbounded
from interop.specs.categorical import Binary, Categorical
from interop.specs.choice import Choice
from interop.specs.composite import Composite
from interop.specs.multi_categorical import MultiCategorical
from interop.specs.non_tensor import NonTensor
from interop.specs.one_hot import MultiOneHot, OneHot
from interop.specs.spec import TensorSpec
from interop.specs.stacked import Stacked, StackedComposite

# The attributes of a class that are its arguments, beside shape, device and dtype: the same in torchrl.
_ARGUMENTS: dict[type[TensorSpec], tuple[str, ...]] = {  # subclasses before their bases
    Bounded: ("low", "high", "domain"),
    Unbounded: ("domain",),
    Binary: (),
    MultiCategorical: ("nvec", "mask", "remove_singleton"),
    Categorical: ("n", "mask"),
    MultiOneHot: ("nvec", "use_register", "mask"),
    OneHot: ("n", "use_register", "mask"),
    NonTensor: ("example_data", "feature_dims"),
}


_OF_COMPOSITES = ("shape", "device", "data_cls", "step_mdp_static", "names")


def to_torchrl(spec: Any) -> Any:
    """Convert a spec to the torchrl class of the same kind. A spec of another library is returned unchanged.

    Torchrl takes most specs as they are. Convert a spec that is compared with torchrl's own (`theirs == ours` is False), or
    whose class is asked for by `type(spec)`.

    A Composite of torchrl that holds specs of this package, as an environment's may, becomes one without them. A user's
    subclass becomes the torchrl class of its base. The register of a OneHot is not copied.

    Raises:
        ImportError: torchrl.data is not imported. This function never imports it.
        TypeError: torchrl has no such class.
    """
    data = sys.modules.get("torchrl.data")
    if data is None and isinstance(spec, TensorSpec):
        raise ImportError("to_torchrl() needs torchrl.data, which is not imported: import it in your program first")
    if data is None or not (isinstance(spec, TensorSpec) or _holds_ours(spec, data)):
        return spec
    if isinstance(spec, data.Stacked | data.StackedComposite):  # torchrl's, and those of this package
        return torch.stack([to_torchrl(each) for each in spec.unbind(spec.dim)], spec.dim)
    if isinstance(spec, Choice):
        return data.Choice([to_torchrl(each) for each in spec])
    if isinstance(spec, data.Composite):
        about = {name: getattr(spec, name) for name in _OF_COMPOSITES}
        return data.Composite({key: to_torchrl(each) for key, each in spec.items()}, **about)
    for kind, names in _ARGUMENTS.items():
        if isinstance(spec, kind):
            return getattr(data, kind.__name__)(**_about(spec, names))
    raise TypeError(f"torchrl.data has no spec for a {type(spec).__name__}: give one of its own classes")


@torchrl_classes.converts
def from_torchrl(spec: Any) -> Any:
    """Convert a spec of torchrl to the class of the same name here. A spec of this package is returned unchanged.

    An instance of a user's subclass becomes one of its torchrl base. The register of a OneHot is not copied.

    Raises:
        TypeError: the object is no spec, or is of a class that has no counterpart here.
    """
    if isinstance(spec, TensorSpec):
        return spec
    names = [each.__name__ for each in type(spec).__mro__ if each.__module__ == "torchrl.data.tensor_specs"]
    if "Stacked" in names or "StackedComposite" in names:
        members: Any = [from_torchrl(each) for each in spec.unbind(spec.stack_dim)]
        return (StackedComposite if "StackedComposite" in names else Stacked)(*members, dim=spec.stack_dim)
    if "Choice" in names:
        return Choice([torchrl_classes.converted(each) for each in vars(spec)["_choices"]])  # there is no public name
    if "Composite" in names:
        about = {name: getattr(spec, name) for name in _OF_COMPOSITES}
        return Composite({key: None if each is None else from_torchrl(each) for key, each in spec.items()}, **about)
    for kind, arguments in _ARGUMENTS.items():
        if kind.__name__ in names:
            return kind(**_about(spec, arguments))
    raise TypeError(f"interop.specs has no class for a {type(spec).__name__}: give one of its own classes")


def _holds_ours(spec: Any, data: Any) -> bool:
    """Whether a spec is a Composite of torchrl that holds a spec of this package."""
    if not isinstance(spec, data.Composite):
        return False
    return any(isinstance(each, TensorSpec) or _holds_ours(each, data) for each in spec.values())


def _about(spec: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments of a leaf: those of all leaves, and the named ones."""
    found = {name: getattr(spec, name) for name in ("shape", "device", "dtype", *names) if name != "n"}
    if "n" in names:
        try:
            found["n"] = spec.n
        except RuntimeError:  # the number of choices is not known yet
            found["n"] = -1
    return found
