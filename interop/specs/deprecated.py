"""Deprecated names of the specs. Constructing one warns and returns a spec of the new class."""

import warnings
from typing import Any

from interop.specs.bounded import Bounded, UnboundedContinuous, UnboundedDiscrete
from interop.specs.categorical import Binary, Categorical
from interop.specs.composite import Composite
from interop.specs.multi_categorical import MultiCategorical
from interop.specs.non_tensor import NonTensor
from interop.specs.one_hot import MultiOneHot, OneHot
from interop.specs.spec import TensorSpec
from interop.specs.stacked import Stacked, StackedComposite


class _Alias(type):
    """Metaclass of the deprecated names. `isinstance` accepts instances of the new class."""

    new: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "new" not in cls.__dict__:  # a user's subclass
            return super().__call__(*args, **kwargs)
        warnings.warn(f"{cls.__name__} is deprecated: use {cls.new.__name__}", DeprecationWarning, stacklevel=2)
        return cls.new(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.new) if "new" in cls.__dict__ else super().__instancecheck__(instance)


def _alias(name: str, new: type[TensorSpec]) -> Any:
    text = f"The earlier name of `{new.__name__}`; constructing it warns."
    return _Alias(name, (new,), {"__doc__": text, "__module__": __name__, "new": new})


BinaryDiscreteTensorSpec = _alias("BinaryDiscreteTensorSpec", Binary)
BoundedTensorSpec = _alias("BoundedTensorSpec", Bounded)
CompositeSpec = _alias("CompositeSpec", Composite)
DiscreteTensorSpec = _alias("DiscreteTensorSpec", Categorical)
LazyStackedCompositeSpec = _alias("LazyStackedCompositeSpec", StackedComposite)
LazyStackedTensorSpec = _alias("LazyStackedTensorSpec", Stacked)
MultiDiscreteTensorSpec = _alias("MultiDiscreteTensorSpec", MultiCategorical)
MultiOneHotDiscreteTensorSpec = _alias("MultiOneHotDiscreteTensorSpec", MultiOneHot)
NonTensorSpec = _alias("NonTensorSpec", NonTensor)
OneHotDiscreteTensorSpec = _alias("OneHotDiscreteTensorSpec", OneHot)
UnboundedContinuousTensorSpec = _alias("UnboundedContinuousTensorSpec", UnboundedContinuous)
UnboundedDiscreteTensorSpec = _alias("UnboundedDiscreteTensorSpec", UnboundedDiscrete)

__all__ = [name for name, each in globals().items() if type(each) is _Alias]
