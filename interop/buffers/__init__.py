"""Replay buffers: a storage, a sampler and a writer joined."""

from interop.buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.tensordict_buffer import TensorDictReplayBuffer

__all__ = [
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]
