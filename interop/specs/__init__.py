"""Specs: what shape, dtype, device and range the values of an environment or of a buffer have."""

import torch

from interop.specs.bounded import (
    Bounded,
    BoundedContinuous,
    BoundedDiscrete,
    Unbounded,
    UnboundedContinuous,
    UnboundedDiscrete,
)
from interop.specs.boxes import BinaryBox, BoxList, CategoricalBox, ContinuousBox, DiscreteBox
from interop.specs.categorical import Binary, Categorical
from interop.specs.choice import Choice
from interop.specs.composite import Composite
from interop.specs.consolidation import (
    check_no_exclusive_keys,
    consolidate_spec,
    contains_lazy_spec,
    make_composite_from_td,
)
from interop.specs.deprecated import (
    BinaryDiscreteTensorSpec,
    BoundedTensorSpec,
    CompositeSpec,
    DiscreteTensorSpec,
    LazyStackedCompositeSpec,
    LazyStackedTensorSpec,
    MultiDiscreteTensorSpec,
    MultiOneHotDiscreteTensorSpec,
    NonTensorSpec,
    OneHotDiscreteTensorSpec,
    UnboundedContinuousTensorSpec,
    UnboundedDiscreteTensorSpec,
)
from interop.specs.gymnasium_spaces import from_gymnasium, to_gymnasium
from interop.specs.jax_structs import from_jax as from_jax  # not in __all__: `interop.to_jax` is that of tensors
from interop.specs.jax_structs import to_jax as to_jax
from interop.specs.multi_categorical import MultiCategorical
from interop.specs.non_tensor import NonTensor
from interop.specs.one_hot import MultiOneHot, OneHot
from interop.specs.spec import TensorSpec
from interop.specs.stacked import Stacked, StackedComposite

DEVICE_TYPING = torch.device | str | int

__all__ = [
    "DEVICE_TYPING",
    "Binary",
    "BinaryBox",
    "BinaryDiscreteTensorSpec",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "BoundedTensorSpec",
    "BoxList",
    "Categorical",
    "CategoricalBox",
    "Choice",
    "Composite",
    "CompositeSpec",
    "ContinuousBox",
    "DiscreteBox",
    "DiscreteTensorSpec",
    "LazyStackedCompositeSpec",
    "LazyStackedTensorSpec",
    "MultiCategorical",
    "MultiDiscreteTensorSpec",
    "MultiOneHot",
    "MultiOneHotDiscreteTensorSpec",
    "NonTensor",
    "NonTensorSpec",
    "OneHot",
    "OneHotDiscreteTensorSpec",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedContinuousTensorSpec",
    "UnboundedDiscrete",
    "UnboundedDiscreteTensorSpec",
    "check_no_exclusive_keys",
    "consolidate_spec",
    "contains_lazy_spec",
    "from_gymnasium",
    "make_composite_from_td",
    "to_gymnasium",
]
