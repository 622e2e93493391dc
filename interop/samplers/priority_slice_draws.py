"""Draws of slices that begin with items in proportion to their priority."""

import dataclasses
import weakref
from typing import Any

import numpy as np
import torch

from fbuf.samplers import Chances
from interop.host.trajectories import Trajectories
from interop.samplers.item_priorities import ItemPriorities
from interop.samplers.shares import ShardContents
from interop.samplers.slice_draws import SliceDraws, SliceShape
from interop.samplers.slice_info import DrawnSlices
from interop.samplers.slice_law import SliceLaw
from interop.samplers.trajectory_source import TrajectorySource
from interop.storages import Storage


class PrioritySliceDraws(SliceDraws):
    """Draws slices whose first items are drawn by priority. Items that cannot begin a slice are excluded."""

    _of: weakref.ref[Storage] | None  # the storage whose items have the priorities

    def __init__(self, source: TrajectorySource, shape: SliceShape, priorities: ItemPriorities) -> None:
        super().__init__(source, shape)
        self._priorities = priorities
        self._of = None
        self._allow_all()

    def _allow_all(self) -> None:
        self._replaced = self._priorities.replaced  # of the priorities that exclude the items
        # Index, need, length and time of `_items`.
        self._allowed_for: tuple[Trajectories, int, int, int] | None = None
        self._items = np.zeros(0, np.int32)  # by slot: items of a slice from there, 0 where none begins

    def forget(self) -> None:
        super().forget()
        self._of = None
        self._allow_all()

    @property
    def settings(self) -> tuple[Any, ...]:
        return *super().settings, self._priorities.alpha, self._priorities.beta

    def _slices(self, storage: Storage, count: int, length: int, key: np.ndarray) -> DrawnSlices:
        self._bind(storage)
        index = self.trajectories(storage)
        self._candidates(index, length)
        with self._priorities.lock:
            self._allow(storage, index, length)
            drawn, weights, _ = self._priorities.draw(storage, count, key)
        starts = drawn.cpu().numpy()
        times = index.times_of(starts // index.lanes)
        slices = DrawnSlices.at(index, times, starts % index.lanes, length, self._items[starts], False)
        counts = slices.row_counts()
        repeats: Any = length if counts is None else torch.from_numpy(counts).to(weights.device)
        return slices._replace(weights=weights.repeat_interleave(repeats))

    def _law(self, storage: Storage, length: int, batch_size: int | None) -> Chances:
        rows = self._rows_from(storage, length)
        return SliceLaw(self.trajectories(storage)).from_starts(self._priorities.chances(storage), rows)

    def starts_that_reach(self, storage: Storage, slot: int, batch_size: int | None = None) -> np.ndarray | None:
        length = self.shape.length(batch_size)
        if length is None:
            return None
        return SliceLaw(self.trajectories(storage)).reached_from_starts(slot, self._rows_from(storage, length))

    def _rows_from(self, storage: Storage, length: int) -> np.ndarray:
        """The number of rows of a slice from each slot, 0 where none begins, int32 [slots]."""
        self._bind(storage)
        if not self._eligible(storage, length):
            return np.zeros(len(storage), np.int32)
        with self._priorities.lock:
            self._priorities.take_over(storage)
            self._allow(storage, self.trajectories(storage), length)
        return self._items

    def share(self, storage: Storage, batch_size: int) -> ShardContents | None:
        """The sum and the smallest of (priority + eps) ** alpha over the items that can begin a slice."""
        _, length = self.shape.of(batch_size)
        priorities = self._priorities
        self._bind(storage)
        with priorities.lock:
            if self._eligible(storage, length):
                self._allow(storage, self.trajectories(storage), length)
                return dataclasses.replace(priorities.share(storage), unit=length)
        return ShardContents(len(storage), 0.0, beta=priorities.beta, unit=length, highest=priorities.highest)

    def _bind(self, storage: Storage) -> None:
        """RuntimeError for another storage than the one whose items have the priorities."""
        if self._of is None:
            self._of = weakref.ref(storage)
        if self._of() is not storage:
            raise RuntimeError(
                "this sampler has the priorities of the items of another storage: give each storage a sampler of its own, "
                "or put it in by set_sampler()"
            )

    def _allow(self, storage: Storage, index: Trajectories, length: int) -> None:
        """Exclude the items that cannot begin a slice. O(rows written since the last draw + length)."""
        self._priorities.prepare(storage)
        if self._priorities.replaced != self._replaced:
            self._allow_all()
        right = self.shape.span[1]
        since = index.oldest
        need = min(2, length) if right is True else length - int(right)
        if self._allowed_for is not None and self._allowed_for[0] is index and self._allowed_for[1:3] == (need, length):
            since = self._allowed_for[3]
            if since == index.now:
                return
        if len(storage) > len(self._items):
            size = max(len(storage), min(2 * len(self._items), storage.max_size))
            self._items = np.append(self._items, np.ones(size - len(self._items), np.int32))
        slots, items = items_from(index, need, length, self.shape.strict_length, since)
        changed = slots[(self._items[slots] > 0) != (items > 0)]
        self._items[slots] = items
        self._allowed_for = index, need, length, index.now
        if changed.size:
            self._priorities.exclude(changed, self._items[changed] > 0, storage)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_of": None, "_allowed_for": None, "_items": np.zeros(0, np.int32)}


def items_from(index: Trajectories, need: int, length: int, strict: bool, since: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of items of a slice from each slot, 0 where none begins; of the slots where it may have changed.

    A slice begins where `need` stored items of a trajectory are left, which has `length` items if strict; otherwise also
    with the first stored item of a trajectory. `since` is the time of the last call. O((rows since + length) * lanes +
    trajectories).
    """
    trajectories = index.stored()
    first = index.first_stored(trajectories)
    stop = trajectories[:, 2] + 1
    grown = (stop > since).nonzero()[0]
    cut = (first == index.oldest).nonzero()[0]
    numbers = np.concatenate([grown, cut])
    low = np.concatenate([np.maximum(first[grown], since - length), first[cut]])
    high = np.concatenate([stop[grown], np.minimum(first[cut] + length, stop[cut])])
    count = high - low
    of = np.repeat(numbers, count)
    times = np.arange(of.size) + np.repeat(low + count - count.cumsum(), count)
    first = first[of]
    left = stop[of] - times
    allowed = (left >= need) & (left + times - first >= length) if strict else (left >= need) | (times == first)
    return index.slots_at(times, trajectories[of, 0]), np.where(allowed, np.minimum(left, length), 0)
