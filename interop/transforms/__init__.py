"""Transforms: change data when a buffer is written and read."""

from interop.transforms.casts import DeviceCastTransform, DoubleToFloat, DTypeCastTransform, PinMemoryTransform
from interop.transforms.cat_frames import CatFrames
from interop.transforms.chain import Compose
from interop.transforms.images import CenterCrop, Crop, GrayScale, Resize, ToTensorImage
from interop.transforms.keys import CatTensors, ExcludeTransform, RenameTransform, SelectTransform, Stack
from interop.transforms.normalization import ObservationNorm, RewardScaling, VecNorm, VecNormV2
from interop.transforms.returns import MultiStepTransform, Reward2GoTransform, RewardSum
from interop.transforms.sequences import BurnInTransform, RandomCropTensorDict
from interop.transforms.shapes import (
    ExpandAs,
    FlattenObservation,
    FlattenTensorDict,
    PermuteTransform,
    SqueezeTransform,
    UnsqueezeTransform,
)
from interop.transforms.torchrl_adapter import as_torchrl
from interop.transforms.transform import Transform
from interop.transforms.values import (
    BinarizeReward,
    ClipTransform,
    DiscreteActionProjection,
    FiniteTensorDictCheck,
    RewardClipping,
    SignTransform,
    UnaryTransform,
)

__all__ = [
    "BinarizeReward",
    "BurnInTransform",
    "CatFrames",
    "CatTensors",
    "CenterCrop",
    "ClipTransform",
    "Compose",
    "Crop",
    "DTypeCastTransform",
    "DeviceCastTransform",
    "DiscreteActionProjection",
    "DoubleToFloat",
    "ExcludeTransform",
    "ExpandAs",
    "FiniteTensorDictCheck",
    "FlattenObservation",
    "FlattenTensorDict",
    "GrayScale",
    "MultiStepTransform",
    "ObservationNorm",
    "PermuteTransform",
    "PinMemoryTransform",
    "RandomCropTensorDict",
    "RenameTransform",
    "Resize",
    "Reward2GoTransform",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SignTransform",
    "SqueezeTransform",
    "Stack",
    "ToTensorImage",
    "Transform",
    "UnaryTransform",
    "UnsqueezeTransform",
    "VecNorm",
    "VecNormV2",
    "as_torchrl",
]
