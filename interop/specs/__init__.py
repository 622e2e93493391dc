"""Specs describe the shape, dtype, device and range of the tensors of an environment or buffer."""

import torch

from interop.specs import deprecated
from interop.specs.beside_torchrl import from_torchrl, to_torchrl
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
from interop.specs.deprecated import *  # noqa: F403
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
    *deprecated.__all__,
    "DEVICE_TYPING",
    "Binary",
    "BinaryBox",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "BoxList",
    "Categorical",
    "CategoricalBox",
    "Choice",
    "Composite",
    "ContinuousBox",
    "DiscreteBox",
    "MultiCategorical",
    "MultiOneHot",
    "NonTensor",
    "OneHot",
    "Stacked",
    "StackedComposite",
    "TensorSpec",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "check_no_exclusive_keys",
    "consolidate_spec",
    "contains_lazy_spec",
    "from_gymnasium",
    "from_torchrl",
    "make_composite_from_td",
    "to_torchrl",
    "to_gymnasium",
]
