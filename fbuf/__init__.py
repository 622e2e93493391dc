"""Replay buffers as pure functions over immutable pytrees, for programs inside `jax.jit`.

The names are imported at the first use of one of them: a program that only looks at files does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING

from fbuf._version import __version__

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
    "__version__",
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

_MODULES = (
    "checkpoint",
    "looking",
    "priority_tree",
    "returns",
    "storage",
    "trajectories",
)  # public names that are modules

if TYPE_CHECKING:
    from fbuf.names import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name in __all__ and name not in _MODULES:
            names = importlib.import_module("fbuf.names")
            globals().update({each: getattr(names, each) for each in __all__ if hasattr(names, each)})
            return globals()[name]
        try:
            return importlib.import_module(f"fbuf.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"fbuf.{name}":
                raise
        raise AttributeError(f"module 'fbuf' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
