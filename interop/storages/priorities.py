"""Priorities of items in a file beside them."""

import weakref
from typing import Any

import numpy as np
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt
from interop.host.priorities import PriorityValues
from interop.host.ring import Ring
from interop.shared.folder import Folder
from interop.shared.journal import Undo, settle
from interop.shared.memory import Memory

_HIGHEST, _SLOT, _SINCE, _TOP = range(4)  # counters about the highest priority; _TOP is their number
_CELLS = 2 * _TOP  # since the storage was emptied, and before: emptying may be rolled back
_LOG = 1 << 20  # bytes
_BEFORE = Undo.before_log(_CELLS) + _LOG


class KeptPriorities(Undo):
    """A float64 for each item, and the highest priority ever given. One update of up to 40,000 items is one transaction.

    Items without a priority of their own have the default one. The file holds bitwise complements: the zeros of a new
    file are complements of NaN, which stands for "none".
    """

    memory: Memory

    def __init__(self, memory: Memory, per_row: int, ring: Ring, owner: Folder | None, *, opened: bool = False) -> None:
        self.memory = memory
        self._ring, self._owner = ring, owner
        self._per_row = per_row
        self._unread = opened  # whether no sampler has read the priorities of an earlier process
        self._of: weakref.ref[object] | None = None
        if owner is None:
            settle(memory, _CELLS)
        self._begin(memory.bytes[:_BEFORE], _CELLS)
        self._values = memory.bytes[_BEFORE:].view(np.int64)
        self._watch([self._values])
        self._most = self.most
        self._tops = [self._cells[at : at + 1].cast("B").cast("d") for at in (_HIGHEST, _TOP + _HIGHEST)]
        self.recover()

    @staticmethod
    def size(items: int) -> int:
        """Bytes of the file."""
        return _BEFORE + 8 * items

    @property
    def by_row(self) -> np.ndarray:
        """What the file holds, [rows, items of a row]."""
        return self._values.reshape(-1, self._per_row)

    # ------------------------------------------------------------------ sampler

    def bind(self, sampler: object) -> bool:
        """Keep the priorities of this sampler alone from now on. Returns whether it must read those in the file first."""
        self._of = weakref.ref(sampler)
        unread, self._unread = self._unread, False
        return unread

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

    def forget(self, rows: Any) -> None:
        """Drop the priorities of rows that get new items. Inside a transaction of the storage."""
        if self._owner is not None and not self._owner.is_open:
            return
        if isinstance(rows, range):
            self.by_row[rows.start : rows.stop] = 0
        else:
            self.by_row[rows.numpy() if isinstance(rows, Tensor) else rows] = 0

    def begin(self, sampler: object, slots: np.ndarray, value: float) -> None:
        """Give new items the highest priority."""
        if self._writes_for(sampler):
            self._values[slots] = ~np.float64(value).view(np.int64)

    def give_all(self, sampler: object, values: PriorityValues) -> None:
        """Replace the priorities of all items."""
        if self._writes_for(sampler):
            slots = np.flatnonzero(values.given >= 0)
            self.forget(slice(None))
            self.give(sampler, slots, values.given[slots], values.highest, values.highest_slot)

    def give(self, sampler: object, slots: np.ndarray, values: Any, highest: float, highest_slot: int = -1) -> None:
        """Write the priorities of items, of equal slots the last, and the highest priority."""
        if not self._writes_for(sampler):
            return
        bits = ~np.asarray(values, np.float64).view(np.int64)
        with self:
            if slots.size <= self._most:
                self.save(slots)
                self._values[slots] = bits
            else:
                bits = np.broadcast_to(bits, slots.shape)
                for start in range(0, slots.size, self._most):
                    self.cut()
                    part = slice(start, start + self._most)
                    self.save(slots[part])
                    self._values[slots[part]] = bits[part]
            which = self._ring.emptied % 2
            self._tops[which][0], self._cells[_TOP * which + _SLOT] = highest, highest_slot
            self._cells[_TOP * which + _SINCE] = self._ring.emptied + 1

    def _writes_for(self, sampler: object) -> bool:
        """Whether this sampler is bound, in the process that owns the folder."""
        return self._owner is not None and self._owner.is_here and self._of is not None and self._of() is sampler
