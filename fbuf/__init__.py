"""Replay buffers as pure functions over immutable pytrees, for programs inside `jax.jit`."""

from fbuf import priority_tree, storage
from fbuf._version import __version__
from fbuf.buffer import Buffer, BufferState
from fbuf.samplers import Draw, Prioritized, PrioritizedState, Sampler, Uniform, importance_weights
from fbuf.writers import RingState, RoundRobin

__all__ = [
    "Buffer",
    "BufferState",
    "Draw",
    "Prioritized",
    "PrioritizedState",
    "RingState",
    "RoundRobin",
    "Sampler",
    "Uniform",
    "__version__",
    "importance_weights",
    "priority_tree",
    "storage",
]
