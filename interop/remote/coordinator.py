"""The coordinator: the shared state of the shards and clients of a remote buffer, in a small process."""

import time
from typing import Any

import numpy as np

from interop.remote.epochs import BatchPlan, EpochPlan
from interop.remote.wire import Wire
from interop.samplers.shares import ShardContents


class Coordinator:
    """Holds the epoch of draws without replacement, the item layout, the latest checkpoint and the running checkpoint.

    Clients and shards call it only for these. Writes and other draws bypass it.
    """

    def __init__(self, shards: int) -> None:
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
