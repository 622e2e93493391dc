"""Tells specs from data, without loading the specs of this library or of torchrl."""

import sys
from types import ModuleType

TORCHRL = "torchrl.data.tensor_specs"


class ItemSpec:
    """The base class of the specs in `interop.specs`: enough for modules that only ask whether something is a spec."""


def is_spec(value: object) -> bool:
    """Whether the value is a spec, of `interop.specs` or of torchrl."""
    return isinstance(value, ItemSpec) or is_torchrl_spec(value)


def is_torchrl_spec(value: object) -> bool:
    """Whether the value is a spec of torchrl. False while the program has not imported torchrl completely."""
    specs = imported(TORCHRL, "StackedComposite")
    return specs is not None and specs.TensorSpec in type(value).__mro__


def imported(name: str, last: str) -> ModuleType | None:
    """A module of which the name `last` exists: a module that is still being imported may lack it. None is imported here."""
    found = sys.modules.get(name)
    return found if found is not None and last in vars(found) else None
