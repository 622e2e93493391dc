"""The law of slices: how often a slice has each row, from how often it starts at each row."""

import numpy as np

from fbuf.samplers import Chances, Reason
from interop.host.trajectories import Trajectories


class SliceLaw:
    """The stored rows one trajectory after the other, and how slices lie in them. O(rows) memory.

    Attributes:
        lengths: int64 [trajectories]: stored rows of each, in the order of the index.
        slots: int64 [rows]: flat slots, trajectory by trajectory, each in the order of time.
        of: int64 [rows]: the trajectory of each row.
        step: int64 [rows]: its place among the stored rows of the trajectory.
    """

    def __init__(self, index: Trajectories) -> None:
        stored = index.stored()
        first = index.first_stored(stored)
        self.lengths = index.lengths()
        self._lane = stored[:, 0].copy()
        self._first = first
        self.of = np.repeat(np.arange(len(stored)), self.lengths)
        self.step = np.arange(self.of.size) - np.repeat(self.lengths.cumsum() - self.lengths, self.lengths)
        self.slots = index.slots_at(first[self.of] + self.step, self._lane[self.of])
        self._index = index

    def in_order_of_storage(self) -> np.ndarray:
        """The rank of each trajectory, lane by lane, by its oldest stored row, int64 [trajectories]."""
        rank = np.empty(self.lengths.size, np.int64)
        rank[np.lexsort((self._index.rows_at(self._first), self._lane))] = np.arange(rank.size)
        return rank

    def evenly(self, share: np.ndarray, reason: np.ndarray, length: int, left: int, right: int) -> Chances:
        """The law of slices that lie anywhere in a drawn trajectory. O(rows).

        Args:
            share: float64 [trajectories]: the probability of each.
            reason: uint8 [trajectories]: why those of probability 0 are not drawn.
            length: rows of a whole slice.
            left: so many rows may a slice begin before its trajectory, which cuts it.
            right: so many rows may a whole slice reach behind it.
        """
        last_start = self._last_start(length, right)[self.of]
        choices = last_start + left + 1
        reached = np.minimum(self.step, last_start) - np.maximum(self.step - length + 1, -left) + 1
        begun = np.where(self.step, self.step <= last_start, left + 1)
        own = share[self.of] / choices
        mass = own * np.maximum(reached, 0)
        why = np.where(share > 0, np.uint8(Reason.TOO_SHORT), reason)[self.of]
        return self._by_slot(mass, why, own * begun)

    def from_starts(self, start: Chances, rows: np.ndarray) -> Chances:
        """The law of slices of drawn starts. O(rows * longest slice).

        Args:
            start: the law of the start, by slot.
            rows: int64 [slots]: rows of the slice from each slot; 0 where no slice starts.
        """
        assert start.probability is not None
        chance, count, own = start.probability[self.slots], rows[self.slots], start.reason[self.slots]
        mass, why = np.zeros(self.slots.size), np.full(self.slots.size, Reason.TOO_SHORT, np.uint8)
        for offset in range(int(count.max(initial=0)) - 1, -1, -1):
            at = np.flatnonzero(count > offset)
            mass[at + offset] += chance[at]
            why[at + offset] = own[at]
        return self._by_slot(mass, why, np.where(count > 0, chance, 0))

    def _by_slot(self, mass: np.ndarray, why: np.ndarray, start: np.ndarray) -> Chances:
        probability, starts = np.zeros((2, self.slots.size))
        reason = np.zeros(self.slots.size, np.uint8)
        probability[self.slots], starts[self.slots] = mass, start
        reason[self.slots] = np.where(mass > 0, np.uint8(Reason.NONE), why)
        return Chances(probability, reason, starts)

    def _last_start(self, length: int, right: int) -> np.ndarray:
        """The step of the last start in each trajectory, int64 [trajectories]."""
        found: np.ndarray = np.minimum(np.maximum(self.lengths - length, 0) + right, self.lengths - 1)
        return found

    def reached_from(self, slot: int, length: int, right: int, least: int) -> np.ndarray:
        """Slots of the starts of `evenly` from which slices have the item at a slot, the oldest first. O(rows).

        None where its trajectory has fewer than `least` rows.
        """
        rows, step = self._trajectory_of(slot)
        number = self.of[rows[0]]
        if self.lengths[number] < least:
            return rows[:0]
        last_start = int(self._last_start(length, right)[number])
        return self.slots[rows[max(step - length + 1, 0) : min(step, last_start) + 1]]

    def reached_from_starts(self, slot: int, rows: np.ndarray) -> np.ndarray:
        """The same for slices of `rows` rows from each slot, int64 [slots]."""
        those, step = self._trajectory_of(slot)
        before = self.slots[those[: step + 1]]
        return before[rows[before] > step - np.arange(step + 1)]

    def _trajectory_of(self, slot: int) -> tuple[np.ndarray, int]:
        """The places of the rows of a trajectory, and the step of the item at a slot."""
        [at] = np.flatnonzero(self.slots == slot)
        first = at - self.step[at]
        return np.arange(first, first + self.lengths[self.of[at]]), int(self.step[at])
