"""Replay buffers: a storage, a sampler and a writer joined, on a CPU run by the host engine, on accelerators by `fbuf`."""

from interop.buffers.conditional import ConditionalUpdateResult
from interop.buffers.ensemble import ReplayBufferEnsemble
from interop.buffers.hindsight import HERReplayBuffer, HindsightStrategy
from interop.buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.tensordict_buffer import TensorDictReplayBuffer

__all__ = [
    "ConditionalUpdateResult",
    "HERReplayBuffer",
    "HindsightStrategy",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]
