"""Which slots a batch is drawn from."""

from fbuf.samplers.prioritized import Prioritized, PrioritizedState
from fbuf.samplers.protocol import Draw, Sampler, importance_weights
from fbuf.samplers.uniform import Uniform

__all__ = ["Draw", "Prioritized", "PrioritizedState", "Sampler", "Uniform", "importance_weights"]
