"""How often items were drawn, for samplers that consume them, in a file beside the items."""

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt
from interop.engine.kept_values import KeptValues


class KeptUses(KeptValues):
    """A number of at least 0 for each item, of a meaning that its sampler knows; 0 for new items."""

    def read(self, length: int) -> np.ndarray:
        """The numbers of the first items, int64. CheckpointCorrupt for damage."""
        values = self._values[:length].copy()
        if (values < 0).any():
            raise CheckpointCorrupt(f"{self.memory.path}: the uses of items are damaged")
        return values

    def give(self, sampler: object, slots: np.ndarray, values: np.ndarray) -> None:
        """Write the numbers of items in one transaction. No effect if another sampler is bound."""
        if slots.size and self.writes_for(sampler):
            with self:
                self.put(slots, values)

    def give_all(self, sampler: object, slots: np.ndarray, values: np.ndarray) -> None:
        """Replace the numbers of all items."""
        if self.writes_for(sampler):
            uses = np.zeros(max(self._stored, int(slots.max(initial=-1)) + 1), np.int64)
            uses[slots] = values
            self.give(sampler, np.arange(uses.size), uses)
