"""Priorities of items in a file beside them; a row that is overwritten loses its priority."""

from typing import Any

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt
from interop.engine.kept_values import KeptValues
from interop.host.priorities import PriorityValues
from interop.host.ring import Ring
from interop.shared.folder import Folder
from interop.shared.memory import Memory

_HIGHEST, _SLOT, _SINCE, _TOP = range(4)  # counters about the highest priority; _TOP is their number


class KeptPriorities(KeptValues):
    """A float64 for each item, and the highest priority ever given, since the storage was emptied and before that: emptying
    may be rolled back.

    Items without a priority of their own have the default one. The file holds bitwise complements: the zeros of a new
    file are complements of NaN, which stands for "none".
    """

    def __init__(self, memory: Memory, per_row: int, ring: Ring, owner: Folder | None, *, opened: bool = False) -> None:
        super().__init__(memory, per_row, ring, owner, opened=opened)
        self._tops = [self._cells[at : at + 1].cast("B").cast("d") for at in (_HIGHEST, _TOP + _HIGHEST)]

    def read(self, length: int) -> PriorityValues:
        """The priorities of the first items."""
        highest, slot = 1.0, -1
        which = self._ring.emptied % 2
        if length and self._cells[_TOP * which + _SINCE] == self._ring.emptied + 1:
            highest, slot = float(self._tops[which][0]), int(self._cells[_TOP * which + _SLOT])
        values = (~self._values[:length]).view(np.float64)
        values[np.isnan(values)] = highest
        if self._owner is None and length:  # another process may have written since the length was read
            slot = slot if slot < length else -1
            if values.max() > highest:
                highest, slot = float(values.max()), int(values.argmax())
        if not (np.isfinite(highest) and (values >= 0).all() and (values < np.inf).all() and -1 <= slot < length):
            raise CheckpointCorrupt(f"{self.memory.path}: the priorities are damaged")
        return PriorityValues(values, highest, slot)

    # ------------------------------------------------------------------ writing

    def begin(self, sampler: object, slots: np.ndarray, value: float) -> None:
        """Give new items the highest priority."""
        if self.writes_for(sampler):
            self._values[slots] = ~np.float64(value).view(np.int64)

    def give_all(self, sampler: object, values: PriorityValues) -> None:
        """Replace the priorities of all items."""
        if self.writes_for(sampler):
            none = np.full(max(self._stored, values.given.size), -1, np.int64).view(np.float64)  # a NaN: see the class
            slots = np.flatnonzero(values.given >= 0)
            none[slots] = values.given[slots]
            self.give(sampler, np.arange(none.size), none, values.highest, values.highest_slot)

    def give(self, sampler: object, slots: np.ndarray, values: Any, highest: float, highest_slot: int = -1) -> None:
        """Write the priorities of items, of equal slots the last, and the highest priority."""
        if not self.writes_for(sampler):
            return
        bits = ~np.asarray(values, np.float64).view(np.int64)
        with self:
            self.put(slots, bits)
            which = self._ring.emptied % 2
            self._tops[which][0], self._cells[_TOP * which + _SLOT] = highest, highest_slot
            self._cells[_TOP * which + _SINCE] = self._ring.emptied + 1
