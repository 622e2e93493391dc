"""All public names of `fbuf`, which it imports at the first use of one of them."""

from fbuf import checkpoint, looking, priority_tree, returns, storage, trajectories
from fbuf.buffer import Buffer, BufferState
from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch, load_state, save_state
from fbuf.frames import Frames, FrameState
from fbuf.hash_table import HashTable, HashTableState
from fbuf.highest_ranked import HighestRanked, HighestRankedState
from fbuf.looking import Description, Why, describe, why
from fbuf.memory_plan import NotEnoughDiskError, NotEnoughMemoryError, Plan, Share, plan
from fbuf.mixture import Mixture, MixtureDraw
from fbuf.rate_limits import RateLimiter, RateLimiterState
from fbuf.resizing import resize
from fbuf.returns import NStep, n_step, n_step_of_slots, returns_to_go
from fbuf.samplers import (
    Chances,
    Draw,
    Fifo,
    FifoState,
    PerTrajectory,
    Prioritized,
    PrioritizedState,
    Reason,
    Sampler,
    Shuffled,
    ShuffledState,
    Slices,
    SlicesState,
    Uniform,
    importance_weights,
)
from fbuf.sharded import Sharded
from fbuf.trajectories import Trajectories, TrajectoryPlace, TrajectoryState
from fbuf.writers import RingState, RoundRobin, Writer

__all__ = [
    "Buffer",
    "BufferState",
    "Chances",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "Description",
    "Draw",
    "Fifo",
    "FifoState",
    "FrameState",
    "Frames",
    "HashTable",
    "HashTableState",
    "HighestRanked",
    "HighestRankedState",
    "Mixture",
    "MixtureDraw",
    "NStep",
    "NotEnoughDiskError",
    "NotEnoughMemoryError",
    "PerTrajectory",
    "Plan",
    "Prioritized",
    "PrioritizedState",
    "RateLimiter",
    "RateLimiterState",
    "Reason",
    "RingState",
    "RoundRobin",
    "Sampler",
    "Sharded",
    "Share",
    "Shuffled",
    "ShuffledState",
    "Slices",
    "SlicesState",
    "Trajectories",
    "TrajectoryPlace",
    "TrajectoryState",
    "Uniform",
    "Why",
    "Writer",
    "checkpoint",
    "describe",
    "importance_weights",
    "load_state",
    "looking",
    "n_step",
    "n_step_of_slots",
    "plan",
    "priority_tree",
    "resize",
    "returns",
    "returns_to_go",
    "save_state",
    "storage",
    "trajectories",
    "why",
]
