"""Which items a batch is drawn from."""

from interop.samplers.drawing import DrawingSampler
from interop.samplers.prioritized import PrioritizedSampler
from interop.samplers.sampler import Sampler
from interop.samplers.uniform import RandomSampler

__all__ = ["DrawingSampler", "PrioritizedSampler", "RandomSampler", "Sampler"]
