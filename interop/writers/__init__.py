"""Which slots new items take."""

from interop.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter
from interop.writers.writer import Writer

__all__ = ["RoundRobinWriter", "TensorDictRoundRobinWriter", "Writer"]
