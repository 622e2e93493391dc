"""What data goes through on its way into and out of a buffer."""

from interop.transforms.burn_in import BurnInTransform
from interop.transforms.casts import DeviceCastTransform, DoubleToFloat, DTypeCastTransform, PinMemoryTransform
from interop.transforms.cat_frames import CatFrames
from interop.transforms.cat_tensors import CatTensors, Stack
from interop.transforms.chain import Compose
from interop.transforms.crop_tensordict import RandomCropTensorDict
from interop.transforms.images import CenterCrop, Crop, GrayScale, Resize, ToTensorImage
from interop.transforms.keys import ExcludeTransform, RenameTransform, SelectTransform
from interop.transforms.multi_step import MultiStepTransform
from interop.transforms.normalization import ObservationNorm, RewardScaling
from interop.transforms.reward_sum import RewardSum
from interop.transforms.reward_to_go import Reward2GoTransform
from interop.transforms.running_norm import VecNorm, VecNormV2
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
