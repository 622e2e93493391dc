"""How often items were drawn, and which of them may be drawn again."""

from typing import Any

import numpy as np

from fbuf.memory_plan import Share
from interop.checkpoint.state import Apply, Entries, integers, permutation
from interop.data import randomness
from interop.data.arguments import whole
from interop.engine.kept_uses import KeptUses
from interop.host.threads import uninterrupted
from interop.samplers.draws import host_share
from interop.samplers.item_values import ItemValues
from interop.samplers.validation import flat_slots
from interop.shared.processes import OneProcess
from interop.storages import Storage

_EMPTY = "Cannot sample from an empty storage."
_ONE_PROCESS = (
    "a buffer that consumes its items cannot be used in another process, which would not know what others consume: sample "
    "and write in the process that made it"
)


class ItemUses(ItemValues):
    """Draws of each item, in memory and in a file of the storage. An item is consumed after `most` draws.

    Attributes:
        most: how often an item is drawn.
        ran_out: whether the last draw took the last item.
    """

    are_uses = True
    _process: OneProcess
    _order: np.ndarray  # the known slots: `_live` that can be drawn, then the consumed ones
    _place: np.ndarray  # of each slot in `_order`
    _drawn: np.ndarray  # draws of each slot
    _item_count: int
    _live: int
    _file: KeptUses | None
    # What changed in place since `before_write`: an array, places, and what was there.
    _log: list[tuple[np.ndarray, Any, np.ndarray]]

    def __init__(self, most: int) -> None:
        self.most = most
        self._process = OneProcess(_ONE_PROCESS)
        self.clear()

    def clear(self) -> None:
        self._order = np.zeros(0, np.int64)
        self._place = np.zeros(0, np.int64)
        self._drawn = np.zeros(0, np.int64)
        self._item_count = self._live = 0
        self._file = None
        self.ran_out = False
        self._log = []

    def before_write(self) -> dict[str, Any]:
        self._log = []
        return self.__dict__.copy()

    def put_back(self, before: dict[str, Any]) -> None:
        drawn = [at for array, at, _ in self._log if array is self._drawn and isinstance(at, np.ndarray)]
        for array, at, entries in reversed(self._log):
            array[at] = entries
        self.__dict__.update(before)
        self._log = []
        if self._file is not None and drawn:
            slots = np.unique(np.concatenate(drawn))
            self._file.give(self, slots, self._drawn[slots])

    def _set(self, array: np.ndarray, at: np.ndarray | slice, entries: Any) -> None:
        """Set entries of an array; `put_back` sets those from before."""
        self._log.append((array, at, array[at].copy()))
        array[at] = entries

    @property
    def live(self) -> int:
        """How many known items can be drawn."""
        return self._live

    def left(self, storage: Storage) -> int:
        """How many stored items can be drawn."""
        self._follow(storage)
        return self._live

    def drawable(self, storage: Storage) -> np.ndarray:
        """The slots of stored items that can be drawn, int64 [n], in no order."""
        self._follow(storage)
        return self._order[: self._live].copy()

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> np.ndarray:
        """Slots of items that are not consumed, int64 [at most batch_size], each once. Counts this draw of each.

        RuntimeError where nothing is left.
        """
        self.refuse_forked_child()
        if not self.left(storage):
            consumed = f" All {self._item_count} items were drawn {self.most} times." if self._item_count else ""
            raise RuntimeError(f"{_EMPTY}{consumed} Call extend() or add() first.")
        count = min(whole("batch_size", batch_size, least=0), self._live)
        slots = self._order[randomness.generator_of(key).choice(self._live, count, replace=False)]
        with uninterrupted():  # memory and file agree after a signal
            self._set(self._drawn, slots, self._drawn[slots] + 1)
            self._consume(slots[self._drawn[slots] >= self.most])
            self.ran_out = self._live == 0
            if self._file is not None:
                self._file.give(self, slots, self._drawn[slots])
        return slots

    def _consume(self, slots: np.ndarray) -> None:
        """Move slots that can be drawn to the consumed ones."""
        self._live -= slots.size
        self._move(slots, self._live)

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        return [host_share(name, 8 * capacity) for name in ("order", "places", "draws")]

    def vacant(self, count: int) -> np.ndarray:
        """At most `count` slots of consumed items."""
        return self._order[self._live : min(self._live + count, self._item_count)].copy()

    def written(self, index: object, *, storage: Storage | None = None) -> None:
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
        self._keep(storage)

    def reloaded(self, storage: Storage) -> None:
        self._keep(storage)
        self._keep_all()

    def _keep(self, storage: Storage) -> None:
        """Keep the draws in the file of the storage; start from those of an earlier process."""
        uses = storage.contents.keep_other(KeptUses, self._file)
        if uses is None:
            return
        if uses.bind(self) and not self._item_count and len(storage):
            drawn = uses.read(len(storage))
            with uninterrupted():
                try:
                    self._follow(storage)
                    self._drawn[: self._item_count] = drawn
                    self._consume(np.flatnonzero(drawn >= self.most))
                except BaseException:  # who knows items, but not their draws, would write zeros over those of the file
                    self._item_count = self._live = 0
                    raise
        else:
            uses.give_all(self, np.arange(self._item_count), self._drawn[: self._item_count])
        uses.was_read()
        self._file = uses  # the last: the next call does what an interrupted one has not done

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
        """The tree of a checkpoint."""
        return {
            "max_sample_count": self.most,
            "order": self._order[: self._item_count].copy(),
            "drawn": self._drawn[: self._item_count].copy(),
            "live": self._live,
            "ran_out": self.ran_out,
        }

    def with_state(self, entries: Entries) -> Apply:
        """Check a result of `state`. The returned function puts it in."""
        most = entries.parameter("max_sample_count", entries.whole("max_sample_count", least=1), self.most)
        drawn = integers(entries, "drawn", None, 0, 2**62)
        order = permutation(entries, "order", drawn.size)
        live = entries.whole("live", most=drawn.size)
        ran_out = entries.flag("ran_out")
        if not np.array_equal(drawn[order] < most, np.arange(drawn.size) < live):
            raise entries.wrong("live", "the number of items that can be drawn, which come first", live)
        place = np.empty_like(order)
        place[order] = np.arange(order.size)

        def put() -> None:
            self.most = most
            self._order = order
            self._place = place
            self._drawn = drawn
            self._item_count = drawn.size
            self._live = live
            self.ran_out = ran_out

        return put

    def refuse_forked_child(self) -> None:
        self._process.check()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}
