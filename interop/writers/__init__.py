"""Which slots new items take."""

from interop.writers.ensemble import WriterEnsemble
from interop.writers.immutable import ImmutableDatasetWriter
from interop.writers.max_value import TensorDictMaxValueWriter
from interop.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter
from interop.writers.writer import Writer

__all__ = [
    "ImmutableDatasetWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
    "WriterEnsemble",
]
