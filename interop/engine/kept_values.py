"""A number of each item in a file beside the rows, for one sampler."""

import weakref
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from interop.host.ring import Ring
from interop.shared.folder import Folder
from interop.shared.journal import Undo, settle
from interop.shared.memory import Memory

LOG = 1 << 20  # bytes
CELLS = 6  # counters of a subclass


class Binding(NamedTuple):
    """Whose values a file keeps."""

    of: weakref.ref[object] | None
    unread: bool


class KeptValues(Undo):
    """8 bytes for each item; zero where it has none. One update of up to 40,000 items is one transaction.

    Items that are overwritten lose their value in the transaction of the write.
    """

    memory: Memory

    def __init__(self, memory: Memory, per_row: int, ring: Ring, owner: Folder | None, *, opened: bool = False) -> None:
        self.memory = memory
        self._ring, self._owner = ring, owner
        self._per_row = per_row
        self._unread = opened  # whether no sampler has read the values of an earlier process
        self._of: weakref.ref[object] | None = None
        before = Undo.before_log(CELLS) + LOG
        if owner is None:
            settle(memory, CELLS)
        self._begin(memory.bytes[:before], CELLS)
        self._values = memory.bytes[before:].view(np.int64)
        self._watch([self._values])
        self._most = self.most
        self.recover()

    @staticmethod
    def size(items: int) -> int:
        """Bytes of the file."""
        return Undo.before_log(CELLS) + LOG + 8 * items

    @property
    def by_row(self) -> np.ndarray:
        """What the file holds, [rows, items of a row]."""
        return self._values.reshape(-1, self._per_row)

    @property
    def _stored(self) -> int:
        """How many items are stored. What the file holds of others does not count: a write drops it."""
        return self._ring.size * self._per_row

    def bind(self, sampler: object) -> bool:
        """Keep the values of this sampler alone from now on. Returns whether it must read those in the file first.

        It does so again, if it was interrupted, until `was_read`.
        """
        self._of = weakref.ref(sampler)
        return self._unread

    def was_read(self) -> None:
        """The sampler that is bound has the values of an earlier process, or has replaced them."""
        self._unread = False

    @property
    def binding(self) -> Binding:
        """Which sampler is bound, and whether the values were read."""
        return Binding(self._of, self._unread)

    @binding.setter
    def binding(self, binding: Binding) -> None:
        self._of, self._unread = binding

    def forget(self, rows: Any) -> None:
        """Drop the values of rows that get new items. Inside a transaction of the storage."""
        if self._owner is not None and not self._owner.is_open:
            return
        if isinstance(rows, range):
            self.by_row[rows.start : rows.stop] = 0
        else:
            self.by_row[rows.numpy() if isinstance(rows, Tensor) else rows] = 0

    def put(self, slots: np.ndarray, words: np.ndarray) -> None:
        """Write values of items, of equal slots the last. In a transaction of this file."""
        if slots.size <= self._most:
            self.save(slots)
            self._values[slots] = words
            return
        words = np.broadcast_to(words, slots.shape)
        for start in range(0, slots.size, self._most):
            self.cut()
            part = slice(start, start + self._most)
            self.save(slots[part])
            self._values[slots[part]] = words[part]

    def writes_for(self, sampler: object) -> bool:
        """Whether this sampler is bound, in the process that owns the folder."""
        return self._owner is not None and self._owner.is_here and self._of is not None and self._of() is sampler
