"""The stateful torch and tensordict replay-buffer API, run by `fbuf` and exchanged over DLPack."""

from interop import _settings  # noqa: F401  # first: it must see whether JAX was imported before
from interop.bridge import to_jax, to_torch
from interop.buffers import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.samplers import PrioritizedSampler, RandomSampler, Sampler
from interop.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage, TensorStorage
from interop.transforms import Compose
from interop.writers import RoundRobinWriter, TensorDictRoundRobinWriter, Writer

__all__ = [
    "Compose",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "Storage",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Writer",
    "to_jax",
    "to_torch",
]
