"""The coordinator: the shared state of the shards and clients of a remote buffer, in a small process."""

import time
from typing import Any

import numpy as np

from fbuf import rate_limits
from interop.buffers.rate_counts import Call, RateCounts
from interop.remote.epochs import BatchPlan, EpochPlan
from interop.remote.wire import Wire
from interop.samplers.shares import ShardContents


class Coordinator:
    """Holds the epoch of draws without replacement, the item layout, the latest checkpoint and the running checkpoint.

    Clients and shards call it only for these. Writes and other draws bypass it, but for those of a buffer with a limiter.

    Args:
        shards: how many.
        rule: of the limiter; None without one.
    """

    def __init__(self, shards: int, rule: rate_limits.RateLimiter | None = None) -> None:
        self._rule = rule
        self._inserted = [0] * shards
        self._sampled = 0
        self._rooms: list[int] = []  # items that fit into each shard
        self._epochs = EpochPlan()
        self._layout: Any = None
        self._first = 0  # the shard that set the layout
        self._checkpoint: list[str | None] = [None] * shards
        self._changes: list[tuple[str, Wire]] = []
        self._token, self._until, self._held = "", 0.0, set[int]()

    def plan(self, shares: list[ShardContents], units: int, key: np.ndarray) -> BatchPlan:
        """Plan the next batch without replacement; see `EpochPlan`."""
        return self._epochs.plan(shares, units, key)

    def restart(self) -> None:
        """Begin a new epoch, after the rows of the shards were replaced."""
        self._epochs.restart()

    def set_rates(self, inserted: list[int], sampled: int | None, rooms: list[int]) -> None:
        """Have these counters of the limiter: items written, by shard, and drawn; None for as many as the ratio wants.

        `rooms` are the items that fit into each shard.
        """
        self._inserted, self._rooms = inserted, rooms
        self._sampled = 0 if sampled is None else sampled
        if sampled is None and self._rule is not None:
            self._sampled = self.rates().balanced(self._rule).sampled

    def rates(self) -> RateCounts:
        """What was written and drawn, by all clients."""
        size = sum(map(min, self._inserted, self._rooms))
        return RateCounts(sum(self._inserted), self._sampled, size)

    def admit(self, call: Call, items: int, shard: int) -> RateCounts | None:
        """Count a call of so many items, if it is allowed now; else return what was counted.

        LookupError in a process that has restarted, and has lost the counters: a client calls `set_rates` then.
        """
        if self._rule is not None and not self._rooms:
            raise LookupError("the coordinator of the shards has restarted without the counters of the limiter")
        counts = self.rates()
        if self._rule is not None and not counts.allow(self._rule, call, items):
            return counts
        self.correct(call, items, shard)
        return None

    def correct(self, call: Call, items: int, shard: int) -> None:
        """Count so many items more, or less, for a call that was admitted."""
        if call == "extend":
            self._inserted[shard] += items
        else:
            self._sampled += items

    def agree(self, shard: int, layout: Any) -> None:
        """Fix the item layout at the first write to any shard. ValueError for items of another layout."""
        if self._layout is None:
            self._layout, self._first = layout, shard
        elif layout != self._layout:
            raise ValueError(
                f"shard {shard} would get items {_shown(layout)}, shard {self._first} has items {_shown(self._layout)}: "
                "all shards hold items of one layout"
            )

    def change(self, name: str, call: Wire) -> None:
        """Record a call that changes components, transforms or hooks; restarting shards replay it."""
        if name.startswith("set_"):
            self._changes = [each for each in self._changes if each[0] != name]
        if name == "set_storage":
            self._layout = None
        self._changes.append((name, call))

    def changes(self) -> list[tuple[str, Wire]]:
        """The recorded calls, in order."""
        return self._changes

    def latest(self, shard: int) -> str | None:
        """The folder of a shard in the latest checkpoint."""
        return self._checkpoint[shard]

    def commit(self, checkpoint: list[str | None]) -> None:
        """Set the folders from which restarting shards load; None for an empty shard."""
        self._checkpoint = checkpoint

    def begin(self, token: str, seconds: float) -> bool:
        """Begin a checkpoint, which must hold all shards within `seconds`. False if another one is running."""
        now = time.monotonic()
        if self._token and now < self._until:
            return False
        self._token, self._until, self._held = token, now + seconds, set()
        return True

    def hold(self, token: str, shard: int) -> bool:
        """Record that a shard is held for this checkpoint. Returns whether all shards are."""
        if token == self._token:
            self._held.add(shard)
        return token == self._token and len(self._held) == len(self._checkpoint)

    def end(self, token: str) -> None:
        """End a checkpoint. Does nothing if another one has begun since."""
        if self._token == token:
            self._token = ""


def _shown(layout: Any) -> str:
    return ", ".join(f"{'.'.join(map(str, path)) or 'tensor'}: {dtype}{list(shape)}" for path, dtype, shape in layout)
