"""Uniform draws of items, each of which is drawn a limited number of times."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fbuf.memory_plan import Share
from interop.checkpoint.state import EXACT, Apply, Entries, LoadOptions, integers, permutation
from interop.data import randomness
from interop.data.arguments import class_of, whole
from interop.engine.kept_uses import KeptUses
from interop.host.threads import uninterrupted
from interop.samplers.sampler import Sampler, host_share
from interop.samplers.validation import flat_slots
from interop.shared.processes import OneProcess
from interop.storages import LazyFrameStorage, ListStorage, Storage, TensorStorage
from interop.writers import RoundRobinWriter, Writer

_EMPTY = "Cannot sample from an empty storage."
_ONE_PROCESS = (
    "a buffer that consumes its items cannot be used in another process, which would not know what others consume: sample "
    "and write in the process that made it"
)


class ConsumingSampler(Sampler):
    """Uniform draws without repetition within a batch; an item is consumed after `max_sample_count` draws.

    A batch is shorter where fewer items are left; RuntimeError where none is. The length of the buffer is the number of
    items that are left, and iterating over it ends with the last one. New items take the slots of consumed items first, then
    those from the cursor on. Needs a storage with one item dim and a `RoundRobinWriter`, and no prefetching. A buffer with
    this sampler can be used in one process only. What was consumed of a memory map in a folder is consumed when it is opened
    again. O(batch).

    Args:
        max_sample_count: how often an item is drawn.
    """

    ran_out = False  # whether the last draw took the last item
    keeps_uses = True
    _most: int
    _process: OneProcess
    _order: np.ndarray  # the known slots: `_live` that can be drawn, then the consumed ones
    _place: np.ndarray  # of each slot in `_order`
    _drawn: np.ndarray  # draws of each slot
    _item_count: int
    _live: int
    _file: KeptUses | None
    # What changed in place since `before_draw` or `before_write`: an array, places, and what was there.
    _log: list[tuple[np.ndarray, Any, np.ndarray]]

    def __init__(self, max_sample_count: int = 1) -> None:
        self._most = whole("max_sample_count", max_sample_count)
        self._process = OneProcess(_ONE_PROCESS)
        self._empty()

    def _empty(self) -> None:
        self._order = np.zeros(0, np.int64)
        self._place = np.zeros(0, np.int64)
        self._drawn = np.zeros(0, np.int64)
        self._item_count = self._live = 0
        self._file = None
        self.ran_out = False
        self._log = []

    def before_draw(self) -> dict[str, Any]:
        return self.before_write()

    def before_write(self) -> dict[str, Any]:
        self._log = []
        return self.__dict__.copy()

    def put_back(self, before: dict[str, Any]) -> None:
        drawn = [at for array, at, _ in self._log if array is self._drawn and isinstance(at, np.ndarray)]
        for array, at, entries in reversed(self._log):
            array[at] = entries
        super().put_back(before)
        self._log = []
        if self._file is not None and drawn:
            slots = np.unique(np.concatenate(drawn))
            self._file.give(self, slots, self._drawn[slots])

    def _set(self, array: np.ndarray, at: np.ndarray | slice, entries: Any) -> None:
        """Set entries of an array; `put_back` sets those from before."""
        self._log.append((array, at, array[at].copy()))
        array[at] = entries

    @property
    def max_sample_count(self) -> int:
        """How often an item is drawn."""
        return self._most

    def sampleable(self, storage: Storage) -> int:
        self._follow(storage)
        return self._live

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        """int64 [at most batch_size], each slot once, and an empty info. RuntimeError where nothing is left."""
        self.refuse_forked_child()
        if not self.sampleable(storage):
            consumed = f" All {self._item_count} items were drawn {self._most} times." if self._item_count else ""
            raise RuntimeError(f"{_EMPTY}{consumed} Call extend() or add() first.")
        count = min(whole("batch_size", batch_size, least=0), self._live)
        slots = self._order[randomness.generator_of(key).choice(self._live, count, replace=False)]
        with uninterrupted():  # memory and file agree after a signal
            self._set(self._drawn, slots, self._drawn[slots] + 1)
            self._consume(slots[self._drawn[slots] >= self._most])
            self.ran_out = self._live == 0
            if self._file is not None:
                self._file.give(self, slots, self._drawn[slots])
        return torch.from_numpy(slots), {}

    def _consume(self, slots: np.ndarray) -> None:
        """Move slots that can be drawn to the consumed ones."""
        self._live -= slots.size
        self._move(slots, self._live)

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        return [host_share(name, 8 * capacity) for name in ("order", "places", "draws")]

    def vacant(self, count: int) -> np.ndarray:
        """At most `count` slots of consumed items."""
        return self._order[self._live : min(self._live + count, self._item_count)].copy()

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """The items at index are new."""
        if storage is not None:
            self._keep(storage)
            self._follow(storage)
        slots, _, high = flat_slots(index, storage)
        if high >= self._item_count:
            raise IndexError(f"index {high} is out of range: {self._item_count} items are stored")
        slots = np.unique(slots[slots >= 0]).astype(np.int64)
        if self._file is not None and self._drawn[slots].any():
            self._file.give(self, slots, np.zeros(slots.size, np.int64))
        self._set(self._drawn, slots, 0)
        again = slots[self._place[slots] >= self._live]
        self._move(again, self._live)
        self._live += again.size
        self.ran_out = self.ran_out and not self._live

    def take_over(self, storage: Storage) -> None:
        super().take_over(storage)
        self._keep(storage)

    def reloaded(self, storage: Storage) -> None:
        self._keep(storage)
        self._keep_all()

    def _keep(self, storage: Storage) -> None:
        """Keep the draws in the file of the storage; start from those of an earlier process."""
        if self._file is not None and storage.contents.kept is self._file:
            return
        uses = storage.contents.keep(KeptUses)
        if uses is None or uses is self._file:
            return
        self._file = uses
        if not (uses.bind(self) and not self._item_count and len(storage)):
            self._keep_all()
            return
        self._follow(storage)
        self._drawn[: self._item_count] = uses.read(self._item_count)
        self._consume(np.flatnonzero(self._drawn[: self._item_count] >= self._most))

    def _keep_all(self) -> None:
        if self._file is not None:
            self._file.give_all(self, np.arange(self._item_count), self._drawn[: self._item_count])

    def _follow(self, storage: Storage) -> None:
        """Follow the length of the storage; new slots are not consumed."""
        length = len(storage)
        if length > self._item_count:
            if length > self._order.size:
                size = max(length, min(2 * self._order.size, storage.max_size))
                self._order, self._place, self._drawn = (
                    np.append(by_slot[: self._item_count], np.zeros(size - self._item_count, np.int64))
                    for by_slot in (self._order, self._place, self._drawn)
                )
            new = np.arange(self._item_count, length)
            for array, entries in ((self._order, new), (self._place, new), (self._drawn, 0)):
                self._set(array, new, entries)
            self._item_count = length
            self._move(new, self._live)
            self._live += new.size
        elif length < self._item_count:  # a list was made shorter
            order = self._order[: self._item_count]
            is_left = order < length
            self._live = int(is_left[: self._live].sum())
            self._set(self._order, slice(0, length), order[is_left])
            self._set(self._place, self._order[:length].copy(), np.arange(length))
            self._item_count = length

    def _move(self, slots: np.ndarray, start: int) -> None:
        """Move different slots to the places from `start` on; the slots there take their places."""
        stop = start + slots.size
        there = self._order[start:stop].copy()
        places = self._place[slots]
        self._set(self._order, slice(start, stop), slots)
        self._set(self._place, slots, np.arange(start, stop))
        displaced = there[self._order[self._place[there]] != there]
        left = places[(places < start) | (places >= stop)]
        self._set(self._order, left, displaced)
        self._set(self._place, displaced, left)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        return {
            "max_sample_count": self._most,
            "order": self._order[: self._item_count].copy(),
            "drawn": self._drawn[: self._item_count].copy(),
            "live": self._live,
            "ran_out": self.ran_out,
        }

    def with_state(self, tree: object, options: LoadOptions = EXACT) -> Apply:
        with Entries.of(tree, self) as entries:
            most = entries.parameter("max_sample_count", entries.whole("max_sample_count", least=1), self._most)
            drawn = integers(entries, "drawn", None, 0, 2**62)
            order = permutation(entries, "order", drawn.size)
            live = entries.whole("live", most=drawn.size)
            ran_out = entries.flag("ran_out")
            if not np.array_equal(drawn[order] < most, np.arange(drawn.size) < live):
                raise entries.wrong("live", "the number of items that can be drawn, which come first", live)
            place = np.empty_like(order)
            place[order] = np.arange(order.size)

            def put() -> None:
                self._most = most
                self._order = order
                self._place = place
                self._drawn = drawn
                self._item_count = drawn.size
                self._live = live
                self.ran_out = ran_out

            return put

    # ------------------------------------------------------------------ where it can be used

    def check_fit(self, storage: Storage, writer: Writer, prefetches: bool, expands: bool) -> None:
        """TypeError or ValueError for a buffer whose items cannot be consumed."""
        if not isinstance(storage, ListStorage | TensorStorage) or isinstance(storage, LazyFrameStorage):
            raise TypeError(
                f"items cannot be consumed from a {type(storage).__name__}: use a ListStorage or a LazyTensorStorage, whose "
                "slots can be written in any order"
            )
        if storage.ndim != 1:
            raise ValueError(f"items can be consumed from a storage with one item dim, got ndim={storage.ndim}")
        if not isinstance(writer, RoundRobinWriter):
            raise TypeError(f"items can be consumed beside a RoundRobinWriter, got {class_of(writer)}")
        if prefetches:
            raise ValueError("prefetch and consuming exclude each other: dropped batches would consume their items")
        if expands:
            raise ValueError("sample_unit and consuming exclude each other: rows of an episode do not stay together")

    def refuse_forked_child(self) -> None:
        self._process.check()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_file": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_sample_count={self._most}, sampleable={self._live})"


def consuming(sampler: Any, count: Any) -> Any:
    """The sampler, or its factory, of a buffer with `consume_after_n_samples=count`; `given` may be one or None.

    TypeError for another sampler, ValueError for one with another count.
    """
    count = whole("consume_after_n_samples", count)
    if sampler is None:
        return ConsumingSampler(count)
    if not isinstance(sampler, Sampler) and callable(sampler):
        make: Callable[[], Any] = sampler
        return lambda: consuming(make(), count)
    if not isinstance(sampler, ConsumingSampler):
        raise TypeError(f"consume_after_n_samples needs a ConsumingSampler or none, got {class_of(sampler)}")
    if sampler.max_sample_count != count:
        raise ValueError(f"consume_after_n_samples={count}, but the sampler has {sampler.max_sample_count}")
    return sampler
