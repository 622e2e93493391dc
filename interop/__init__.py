"""The stateful torch and tensordict replay-buffer API, run by `fbuf` and exchanged over DLPack."""

from interop import _settings  # noqa: F401  # first: it must see whether JAX was imported before
from interop.bridge import to_jax, to_torch
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
from interop.sample_units import SampleUnit, Sequence, Transition
from interop.samplers import (
    ConsumingSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
)
from interop.schedulers import LambdaScheduler, LinearScheduler, SchedulerList, StepScheduler
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

__all__ = [
    "DEFAULT_DONE_KEYS",
    "Compose",
    "CompressedListStorage",
    "ConditionalUpdateResult",
    "ConsumingSampler",
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
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RoundRobinWriter",
    "SampleUnit",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "Sequence",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "StepScheduler",
    "Storage",
    "StorageEnsemble",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Transition",
    "Writer",
    "WriterEnsemble",
    "find_start_stop_traj",
    "to_jax",
    "to_torch",
]
