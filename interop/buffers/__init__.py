"""Replay buffers: a storage, a sampler and a writer joined, on a CPU run by the host engine, on accelerators by `fbuf`."""

from interop import samplers, storages, writers
from interop.buffers.conditional import ConditionalUpdateResult
from interop.buffers.ensemble import ReplayBufferEnsemble
from interop.buffers.hindsight import HERReplayBuffer, HindsightStrategy
from interop.buffers.predicates import TrajectoryPredicate, traj
from interop.buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from interop.buffers.rate_limited import RateLimitedReplayBuffer
from interop.buffers.rate_limiter import RateLimiter
from interop.buffers.replay_buffer import ReplayBuffer
from interop.buffers.tensordict_buffer import TensorDictReplayBuffer
from interop.buffers.trajectory import Trajectory, filter_trajectories, iter_trajectories
from interop.checkpoint.layouts import may_import
from interop.data.untraced import untraced
from interop.samplers import Sampler
from interop.storages import Storage
from interop.writers import Writer

__all__ = [
    "ConditionalUpdateResult",
    "HERReplayBuffer",
    "HindsightStrategy",
    "PrioritizedReplayBuffer",
    "RateLimitedReplayBuffer",
    "RateLimiter",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "Trajectory",
    "TrajectoryPredicate",
    "filter_trajectories",
    "iter_trajectories",
    "traj",
]

may_import("interop.llm", "interop.maps")  # whose classes items of a checkpoint may be of
_COMPONENTS = (ReplayBuffer, Storage, Sampler, Writer)
_PUBLIC = [*globals().values(), *vars(storages).values(), *vars(samplers).values(), *vars(writers).values()]
untraced(*(each for each in _PUBLIC if isinstance(each, type) and issubclass(each, _COMPONENTS)))
