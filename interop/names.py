"""The public names of the core of `interop`, which it imports together at the first use of one of them."""

from interop.data import settings  # noqa: F401  # first: it says what to install, and sets up JAX before that starts

# isort: split
from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch
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
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.data.bridge import to_jax, to_torch
from interop.postprocs import DensifyReward, MultiStep, split_trajectories
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
from interop.storages import (
    CompressedListStorage,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    Storage,
    StorageEnsemble,
    StoreStorage,
    TensorStorage,
)
from interop.storages.checkpointers import (
    CompressedListStorageCheckpointer,
    ListStorageCheckpointer,
    StorageEnsembleCheckpointer,
    TensorStorageCheckpointer,
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
    "H5Combine",
    "H5Split",
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
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "PromptGroupSampler",
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
    "StorageCheckpointerBase",
    "StorageEnsemble",
    "StorageEnsembleCheckpointer",
    "StoreStorage",
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
    "find_start_stop_traj",
    "split_trajectories",
    "to_jax",
    "to_torch",
]
