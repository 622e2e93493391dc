"""Conversion of specs to torchrl's classes, which torchrl's environments require."""

import sys
from typing import Any

import torch

from interop.specs.bounded import Bounded, Unbounded
from interop.specs.categorical import Binary, Categorical
from interop.specs.choice import Choice
from interop.specs.composite import Composite
from interop.specs.multi_categorical import MultiCategorical
from interop.specs.non_tensor import NonTensor
from interop.specs.one_hot import MultiOneHot, OneHot
from interop.specs.spec import TensorSpec
from interop.specs.stacked import Stacked, StackedComposite

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


def to_torchrl(spec: Any) -> Any:
    """Convert a spec to the torchrl class of the same kind. A spec of another library is returned unchanged.

    A user's subclass becomes the torchrl class of its base. The register of a OneHot is not copied.

    Raises:
        ImportError: torchrl.data is not imported. This function never imports it.
        TypeError: torchrl has no such class.
    """
    if not isinstance(spec, TensorSpec):
        return spec
    data = sys.modules.get("torchrl.data")
    if data is None:
        raise ImportError("to_torchrl() needs torchrl.data, which is not imported: import it in your program first")
    if isinstance(spec, Stacked | StackedComposite):
        return torch.stack([to_torchrl(each) for each in spec.unbind(spec.dim)], spec.dim)
    if isinstance(spec, Choice):
        return data.Choice([to_torchrl(each) for each in spec])
    if isinstance(spec, Composite):
        about = {name: getattr(spec, name) for name in ("shape", "device", "data_cls", "step_mdp_static", "names")}
        return data.Composite({key: to_torchrl(each) for key, each in spec.items()}, **about)
    for kind, names in _ARGUMENTS.items():
        if isinstance(spec, kind):
            about = {name: getattr(spec, name) for name in ("shape", "device", "dtype", *names)}
            return getattr(data, kind.__name__)(**about)
    raise TypeError(f"torchrl.data has no spec for a {type(spec).__name__}: give one of its own classes")
