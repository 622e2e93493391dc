"""Keeps the draws and the writes of a buffer in step: a call that would run too far ahead waits for the other side."""

import math
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from fbuf import rate_limits
from fbuf.checkpoint import Fields
from interop.buffers.rate_counts import Call, LimiterNumbers, RateCounts, refuse_endless
from interop.checkpoint.state import Apply
from interop.host.threads import finished
from interop.storages import Storage

_T = TypeVar("_T")

_SHORTEST, _LONGEST = 50e-6, 10e-3  # seconds between two looks, which are a tenth of the time waited so far


class MustWaitError(Exception):
    """A limiter does not allow a call now. The call has changed nothing; it waits when it has released its locks."""

    def __init__(self, call: Call, items: int) -> None:
        super().__init__(call, items)
        self.call = call
        self.items = items


class RateLimiter(LimiterNumbers):
    """Has writes wait for draws, and draws for writes, as the rate limiters of Reverb do (arXiv:2102.04736).

    `samples_per_insert`, `min_size` and `error_buffer` are those of `fbuf.RateLimiter`, which has the rule. Given to a
    buffer as `limiter`, calls of `extend`, `add` and `sample` that it does not allow wait, without a lock, in all threads
    and processes that share the buffer, until others have drawn or written enough.

        >>> limiter = RateLimiter(samples_per_insert=8, min_size=1_000, error_buffer=2_000, timeout=60)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256, limiter=limiter)
        >>> rb.limiter.can_sample(256)
        False

    A write counts the items that the writer keeps, a draw those of the batch. Where these are known only after the draw, as
    of a `PromptGroupSampler` with a `size_key`, the draw waits until the largest batch is allowed. `rb[...] = rows` and
    other edits count as neither. Counters belong to the storage: buffers on it share them. A write that is rolled back does
    not count; a call that is killed while it waits leaves nothing. Checkpoints and folders of memory maps have the counters.
    `empty()` begins at zero, unless `write_count` stays.

    The counters begin in balance on a storage that was filled without a limiter, after a load without one or of another
    rule, and by `restart()`: with as many draws as the ratio wants for the items ever written.

    A wait looks again after a tenth of the time waited so far, at least 50 us and at most 10 ms.

    Args:
        samples_per_insert: how many items are drawn for each that is written; None for no bound but `min_size`.
        min_size: stored items from which on draws are allowed.
        error_buffer: how far draws may run ahead or behind, in items; or (min_diff, max_diff).
        timeout: seconds after which a call that waits raises TimeoutError, which says who waits for whom; 0 to raise at
            once, None to wait without end.

    ValueError where calls could wait for each other without end: here, at the construction of the buffer for its
    `batch_size`, and at a call of more items than the band has room for.

    Attributes:
        rule: the `fbuf.RateLimiter`.
    """

    def __init__(
        self,
        samples_per_insert: float | None = None,
        min_size: int = 1,
        error_buffer: float | tuple[float, float] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        self.rule = rate_limits.RateLimiter(samples_per_insert, min_size, error_buffer)
        self.timeout = timeout
        self._begin()

    def _begin(self) -> None:
        self._reference: Callable[[], Storage | None] = _none
        self._stopped = False
        self._waits: dict[Call, int] = {"extend": 0, "sample": 0}
        self._seconds: dict[Call, float] = {"extend": 0.0, "sample": 0.0}

    @property
    def timeout(self) -> float | None:
        """Seconds that a call waits; None for no limit. Can be set."""
        return self._timeout

    @timeout.setter
    def timeout(self, value: float | None) -> None:
        if value is not None and (isinstance(value, bool | str) or not value >= 0):
            raise ValueError(f"timeout must be at least 0 seconds, or None to wait without end, got {value!r}")
        self._timeout = None if value is None or value == math.inf else float(value)

    def stop(self) -> None:
        """Have calls of this process that wait, and later ones that would, raise RuntimeError: the other side has ended.

        `restart()` undoes it.
        """
        self._stopped = True

    def restart(self) -> None:
        """Begin in balance: with as many draws as the ratio wants for the items ever written."""
        self._stopped = False
        if (storage := self._reference()) is not None:
            with storage.lock.held():
                self._put(self.counts().balanced(self.rule))

    def stats(self) -> dict[str, int | float | bool]:
        """Plain numbers for logs: the counters, the band, and the waits of this process, in calls and seconds."""
        numbers = self.counts().numbers(self.rule)
        for call in self._waits:
            numbers[f"limiter/{call}_waits"] = self._waits[call]
            numbers[f"limiter/{call}_wait_seconds"] = self._seconds[call]
        return numbers

    # ------------------------------------------------------------------ for buffers

    def check_fit(self, storage: Storage, batch_size: int | None, prefetches: bool) -> None:
        """ValueError or RuntimeError for a buffer whose calls could wait without end, or whose draws it cannot count."""
        if prefetches:
            raise ValueError("prefetch and limiter exclude each other: batches are drawn ahead of what is asked for")
        if self.rule.min_size > storage.max_size:
            raise ValueError(
                f"min_size={self.rule.min_size} items are never stored: the storage has room for {storage.max_size}"
            )
        refuse_endless(self.rule, 1, batch_size or 1)
        if storage.guard.is_read_only:
            raise RuntimeError("a limiter counts draws beside the rows, and this storage can only be read")
        for buffer in storage.followers.buffers():
            other = getattr(buffer, "limiter", None)
            if isinstance(other, RateLimiter) and other.rule != self.rule:
                raise ValueError(
                    f"another buffer limits this storage by {other.rule}, this one would by {self.rule}: give both the same"
                )

    def refuse_other(self, storage: Storage) -> None:
        """ValueError where a buffer on another storage has this limiter."""
        if self._reference() not in (None, storage):
            raise ValueError(
                "a limiter counts for one storage, and this one belongs to another buffer: make one for each"
            )

    def join(self, storage: Storage) -> None:
        """Count what is written to this storage and drawn from it. Its lock is held."""
        self._reference = weakref.ref(storage)
        if not storage.ring.is_limited:
            counts = self.counts()
            self._put(RateCounts(max(counts.inserted, counts.size), 0, counts.size).balanced(self.rule))

    def refuse_insert(self, items: int, largest_draw: Callable[[], int]) -> None:
        """MustWaitError if so many items may not be written now. The lock is held.

        ValueError where it could wait without end for a batch of `largest_draw()` items, which is asked for only then.
        """
        counts = self.counts()
        if not counts.allow(self.rule, "extend", items):
            refuse_endless(self.rule, items, largest_draw())
            raise MustWaitError("extend", items)

    def refuse_draw(self, items: int) -> None:
        """MustWaitError if so many items may not be drawn now. The lock is held."""
        self._storage.guard.refuse_forked_child()
        if not self.counts().allow(self.rule, "sample", items):
            refuse_endless(self.rule, 1, items)
            raise MustWaitError("sample", items)

    def wrote(self, index: object, count: int) -> None:
        """Items were written to an index. `count` is that of the ring before. The lock is held."""
        ring = self._storage.ring
        if ring.count == count:  # a writer that does not count in the ring
            ring.uncounted += int((index >= 0).sum()) if isinstance(index, Tensor) else 1

    def drawn(self, items: int) -> "CountedDraw":
        """What counts a draw of so many items, when its batch is returned."""
        return CountedDraw(self._storage, items)

    def emptied(self) -> None:
        """Begin at zero: the storage was emptied, and the count of its ring is zero. Inside a transaction."""
        self._put(RateCounts(0, 0, 0))

    def when_allowed(self, call: Callable[[], _T]) -> _T:
        """Make a call, again whenever it raises MustWaitError and is allowed since.

        TimeoutError when the time is over; RuntimeError after `stop`, and where this thread holds the lock that the other
        side needs.
        """
        begun: float | None = None
        while True:
            try:
                return call()
            except MustWaitError as refused:
                waits_for = refused.call, refused.items
            begun = self._waited(*waits_for, begun)

    def _waited(self, call: Call, items: int, begun: float | None) -> float:
        """Wait until a call of so many items is allowed. Returns when the first wait of the call began."""
        if self._storage.lock.threads.is_mine():
            raise RuntimeError(
                f"{call}() would have to wait for the limiter, while this thread holds the lock of the storage, which the "
                f"other side needs: {self.counts().account(self.rule, call, items)}. Release it first"
            )
        start = time.monotonic()
        if begun is None:
            self._waits[call] += 1
            begun = start
        try:
            for waited in looks(begun, self._timeout):  # noqa: B007
                if self._allows(call, items):
                    return begun
                if self._stopped:
                    raise RuntimeError(f"{call}(): the limiter was stopped; {self._message(call, items)}")
            other = "sample" if call == "extend" else "extend"
            raise TimeoutError(
                f"{call}() of {items} items has waited {waited:.3g} s for {other}() of another thread or process: "
                f"{self._message(call, items)}"
            )
        finally:
            self._seconds[call] += time.monotonic() - start

    def _message(self, call: Call, items: int) -> str:
        done = "written" if call == "extend" else "drawn"
        return f"{self.counts().account(self.rule, call, items)}. Nothing was {done}"

    def _allows(self, call: Call, items: int) -> bool:
        storage = self._storage
        if storage.lock.hooked:  # what other processes did is seen under the lock
            with storage.lock.held():
                return self.counts().allow(self.rule, call, items)
        return self.counts().allow(self.rule, call, items)

    # ------------------------------------------------------------------ counters

    @property
    def _storage(self) -> Storage:
        storage = self._reference()
        if storage is None:
            raise RuntimeError("the limiter belongs to no buffer: pass it as ReplayBuffer(limiter=...)")
        return storage

    def counts(self) -> RateCounts:
        """What was written and drawn until now; zeros without a buffer. Takes no lock."""
        storage = self._reference()
        if storage is None:
            return RateCounts(0, 0, 0)
        ring = storage.ring
        return RateCounts(self._in_ring(storage) + ring.uncounted, ring.sampled, len(storage))

    @staticmethod
    def _in_ring(storage: Storage) -> int:
        """Items that the ring counts as written."""
        count = storage.ring.count
        return count * storage.contents.items_per_row if count else 0

    def _put(self, counts: RateCounts) -> None:
        """Have these counts. The lock is held."""
        storage = self._storage

        def put() -> None:
            with storage.guard.transaction():
                storage.ring.uncounted = counts.inserted - self._in_ring(storage)
                storage.ring.sampled = counts.sampled

        finished(put)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The rule as text, and the counters. The lock is held."""
        counts = self.counts()
        return {"rule": repr(self.rule), "inserted": counts.inserted, "sampled": counts.sampled}

    def with_state(self, tree: object, where: str) -> Apply:
        """Check a result of `state`, or None. The returned function puts the counters in; in balance for another rule.

        CheckpointCorrupt for something else. The rows and their writer were loaded before.
        """
        if tree is None:
            return self.restart
        fields = Fields(tree, f"{where}, limiter")
        inserted, sampled = fields.whole("inserted"), fields.whole("sampled")
        if fields.text("rule") != repr(self.rule):
            return self.restart
        return partial(self.carry, RateCounts(inserted, sampled, 0))

    def carry(self, counts: RateCounts) -> None:
        """Go on from these counters, under the lock: after a load, or on another storage with the same rows."""
        self._put(counts)

    def __getstate__(self) -> dict[str, Any]:
        return {"rule": self.rule, "_timeout": self._timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def waits(self) -> dict[Call, int]:
        """How many calls of this process had to wait, or were refused."""
        return dict(self._waits)

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        rule = self.rule
        yield from (("samples_per_insert", rule.samples_per_insert), ("min_size", rule.min_size))
        yield from (("error_buffer", rule.error_buffer), ("timeout", self._timeout))
        if self._reference() is not None:
            counts = self.counts()
            yield from (("inserted", counts.inserted), ("sampled", counts.sampled))


def looks(begun: float, timeout: float | None, shortest: float = _SHORTEST) -> Iterator[float]:
    """Yields the seconds waited since the monotonic time `begun`, and sleeps in between; ends when the time is over."""
    while True:
        waited = time.monotonic() - begun
        yield waited
        left = math.inf if timeout is None else timeout - waited
        if left <= 0:
            return
        time.sleep(min(max(waited / 10, shortest), _LONGEST, left))


class CountedDraw:
    """Counts a draw when it is called, once, however often: a call that a signal interrupts is made again."""

    __slots__ = ("_after", "_items", "_storage")

    def __init__(self, storage: Storage, items: int) -> None:
        self._storage = storage
        self._items = items
        self._after: int | None = None

    def __call__(self) -> None:
        ring = self._storage.ring
        if self._after is None:
            self._after = ring.sampled + self._items
        ring.sampled = self._after


def _none() -> None:
    return None
