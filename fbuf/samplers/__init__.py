"""Samplers: rules that name the slots of a batch."""

from fbuf.samplers.chances import Chances, Reason
from fbuf.samplers.fifo import Fifo, FifoState
from fbuf.samplers.prioritized import Prioritized, PrioritizedState
from fbuf.samplers.protocol import Draw, Excluding, InEpochs, Sampler, importance_weights
from fbuf.samplers.shuffled import Shuffled, ShuffledState
from fbuf.samplers.slices import PerTrajectory, Slices, SlicesState
from fbuf.samplers.uniform import Uniform

__all__ = [
    "Chances",
    "Draw",
    "Excluding",
    "Fifo",
    "FifoState",
    "InEpochs",
    "PerTrajectory",
    "Prioritized",
    "PrioritizedState",
    "Reason",
    "Sampler",
    "Shuffled",
    "ShuffledState",
    "Slices",
    "SlicesState",
    "Uniform",
    "importance_weights",
]
