"""The buffers that follow a storage: each is told of every write, whichever buffer or process has made it."""

import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from interop.host.ring import Ring

Counts = tuple[int, int, int, int]


class Follower(Protocol):
    """A buffer, or anything else with this method."""

    def mark_update(self, index: Any) -> None:
        """New items are at index."""


class HasRows(Protocol):
    """The items of a storage."""

    @property
    def filled_rows(self) -> int: ...

    def row_ages(self) -> np.ndarray: ...

    def coordinates(self, rows: Any) -> Any: ...


class Followed(Protocol):
    """A storage."""

    ring: Ring

    @property
    def contents(self) -> HasRows: ...

    def __len__(self) -> int: ...

    def row_capacity(self, data: Any) -> int: ...


def counts_of(storage: Followed) -> Counts:
    """The counters of the ring and the length. They differ after any write."""
    return (*storage.ring.counts, len(storage))


class Followers:
    """Weak references to the followers of one storage. A copy is empty: its own buffers attach themselves.

    Attributes:
        is_watching: whether writes of other processes are reported to samplers.
        seen: the counts when the lock was last released, if other processes may write since.
        in_write: whether a buffer tells the followers of its write.
    """

    def __init__(self) -> None:
        self._references: list[Callable[[], Any]] = []
        self.is_watching = False
        self.seen: Counts | None = None
        self.in_write = False

    def attach(self, follower: Follower) -> None:
        """Tell it of each write. Does not keep it alive."""
        if any(each is follower for each in self.all()):
            return
        try:
            reference: Callable[[], Any] = weakref.ref(follower)
        except TypeError:  # a kind of object that cannot be referred to weakly
            reference = partial(_itself, follower)
        self._keep([*(each for each in self._references if each() is not None), reference])

    def detach(self, follower: Follower) -> None:
        """Undo `attach`."""
        self._keep(each for each in self._references if each() is not follower)

    def _keep(self, references: Iterable[Callable[[], Any]]) -> None:
        self._references = list(references)  # another thread may be reading the old list

    def all(self) -> list[Follower]:
        """All followers, in the order of attaching."""
        return [follower for each in self._references if (follower := each()) is not None]

    def buffers(self) -> list[Any]:
        """The followers that are buffers: those with a sampler."""
        return [each for each in self.all() if hasattr(each, "sampler")]

    def observers(self) -> list[Any]:
        """The followers that are observers of buffers: see `Observer`."""
        return [each for each in self.all() if hasattr(each, "started_over")]

    def drop_prefetched(self) -> None:
        """Have the buffers drop the batches that they have drawn ahead."""
        for buffer in self.buffers():
            buffer.drop_prefetched()

    def start_over(self, storage: Followed, but: Collection[object]) -> None:
        """The rows were replaced: samplers of other buffers than these begin anew, with default priorities."""
        for buffer in self.buffers():
            if all(buffer is not other for other in but):
                buffer.sampler.clear()
                buffer.sampler.item_values.take_over(storage)
                buffer.drop_prefetched()
        self.tell_of_new_rows()

    def tell_of_new_rows(self) -> None:
        """Tell the observers that all rows were removed or replaced."""
        for observer in self.observers():
            observer.started_over()

    def report(self, storage: Followed, before: Counts, prepare: Callable[[], None] | None = None) -> None:
        """Call `mark_update` of the buffers and observers for all rows written since the counts were `before`.

        Rows are known if they were written around the ring; other writes are reported by the writer. Samplers of a storage
        that was emptied meanwhile are cleared first. `prepare` is called before the first call, if there is one.
        """
        if counts_of(storage) == before:
            return
        written, _, _, length = before
        capacity = storage.row_capacity(None)
        ring = storage.ring
        count = min(ring.written - written, capacity)
        rows = torch.arange(ring.cursor - count, ring.cursor, device="cpu") % max(capacity, 1)
        rows = rows[rows < storage.contents.filled_rows]
        was_emptied = len(storage) < length
        if was_emptied:
            rows = torch.arange(storage.contents.filled_rows, device="cpu")
        if prepare is not None and (was_emptied or len(rows)):
            prepare()
        for buffer in self.buffers():
            if buffer.sampler.hooks.follows_writes:
                if was_emptied:
                    buffer.sampler.clear()
                if len(rows):
                    buffer.mark_update(storage.contents.coordinates(rows))
        for observer in self.observers():
            if was_emptied:
                observer.started_over()
            if len(rows):
                observer.mark_update(storage.contents.coordinates(rows))

    def __reduce__(self) -> Any:
        return Followers, ()


def _itself(follower: Any) -> Any:
    return follower
