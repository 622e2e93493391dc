"""The stateful torch and tensordict replay-buffer API, run by `fbuf` and exchanged over DLPack."""

import importlib
from types import ModuleType

from interop.data import settings  # noqa: F401  # first: it must see whether JAX was imported before

# isort: split
from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from interop import llm, maps, specs
from interop.buffers import (
    ConditionalUpdateResult,
    HERReplayBuffer,
    HindsightStrategy,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.checkpoint.checkpointers import (
    CompressedListStorageCheckpointer,
    ListStorageCheckpointer,
    StorageCheckpointerBase,
    StorageEnsembleCheckpointer,
    TensorStorageCheckpointer,
)
from interop.data.bridge import to_jax, to_torch
from interop.data.untraced import untraced
from interop.doors.functional_buffer import FunctionalReplayBuffer, from_fbuf
from interop.formats.h5 import H5StorageCheckpointer
from interop.formats.ted_formats import FlatStorageCheckpointer, NestedStorageCheckpointer
from interop.formats.torchrl_folder import convert_torchrl
from interop.llm import *  # noqa: F403
from interop.maps import *  # noqa: F403
from interop.postprocs import DensifyReward, MultiStep, split_trajectories
from interop.remote import (
    RayReplayBuffer,
    RemoteError,
    RemoteTensorDictReplayBuffer,
    RemoteTimeoutError,
    ShardLostError,
)
from interop.sample_units import SampleUnit, Sequence, Transition
from interop.samplers import (
    ConsumingSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
)
from interop.schedulers import LambdaScheduler, LinearScheduler, SchedulerList, StepScheduler
from interop.specs import *  # noqa: F403
from interop.storages import (
    CompressedListStorage,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    StorageEnsemble,
    TensorStorage,
)
from interop.ted import Flat2TED, H5Combine, H5Split, Nested2TED, TED2Flat, TED2Nested, TEDError, check_ted
from interop.trajectories import DEFAULT_DONE_KEYS, find_start_stop_traj
from interop.transforms import Compose
from interop.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
    WriterEnsemble,
)

_UNTRACED = (FunctionalReplayBuffer, ReplayBuffer, Storage, Sampler, Writer)

__all__ = [
    "DEFAULT_DONE_KEYS",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "Compose",
    "CompressedListStorage",
    "CompressedListStorageCheckpointer",
    "ConditionalUpdateResult",
    "ConsumingSampler",
    "DensifyReward",
    "Flat2TED",
    "FlatStorageCheckpointer",
    "FunctionalReplayBuffer",
    "H5Combine",
    "H5Split",
    "H5StorageCheckpointer",
    "HERReplayBuffer",
    "HindsightStrategy",
    "ImmutableDatasetWriter",
    "LambdaScheduler",
    "LazyFrameStorage",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "LinearScheduler",
    "ListStorage",
    "ListStorageCheckpointer",
    "MultiStep",
    "Nested2TED",
    "NestedStorageCheckpointer",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PromptGroupSampler",
    "RandomSampler",
    "RayReplayBuffer",
    "RemoteError",
    "RemoteTensorDictReplayBuffer",
    "RemoteTimeoutError",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RoundRobinWriter",
    "SampleUnit",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "Sequence",
    "ShardLostError",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "StepScheduler",
    "Storage",
    "StorageCheckpointerBase",
    "StorageEnsemble",
    "StorageEnsembleCheckpointer",
    "TED2Flat",
    "TED2Nested",
    "TEDError",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "TensorStorageCheckpointer",
    "Transition",
    "Writer",
    "WriterEnsemble",
    "check_ted",
    "convert_torchrl",
    "find_start_stop_traj",
    "from_fbuf",
    "split_trajectories",
    "to_jax",
    "to_torch",
]
__all__ += specs.__all__
__all__ += llm.__all__
__all__ += maps.__all__


def __getattr__(name: str) -> ModuleType:
    if name == "datasets":  # imported when it is first used
        return importlib.import_module("interop.datasets")
    raise AttributeError(f"module 'interop' has no attribute {name!r}")


untraced(*(each for each in [*globals().values()] if isinstance(each, type) and issubclass(each, _UNTRACED)))
