"""The coordinator: the common state of the shards and clients of one remote buffer, in one small process."""

import time
from typing import Any

import numpy as np

from interop.remote.epochs import EpochPlan, Plan
from interop.remote.wire import Wire
from interop.samplers.shares import Share


class Coordinator:
    """The epoch of draws without replacement, the layout of items, the latest checkpoint, and the one that is made now.

    Clients and shards call it only for these; writes and other draws pass it by.
    """

    def __init__(self, shards: int) -> None:
        self._epochs = EpochPlan()
        self._layout: Any = None
        self._first = 0  # the shard whose layout that is
        self._checkpoint: list[str | None] = [None] * shards
        self._changes: list[tuple[str, Wire]] = []
        self._token, self._until, self._held = "", 0.0, set[int]()

    def plan(self, shares: list[Share], units: int, key: np.ndarray) -> Plan:
        """The units of the next batch without replacement; see `EpochPlan`."""
        return self._epochs.plan(shares, units, key)

    def restart(self) -> None:
        """Begin another epoch: the shards hold other rows."""
        self._epochs.restart()

    def agree(self, shard: int, layout: Any) -> None:
        """Fix the layout of items at the first write of all. ValueError where a shard is to get items of another one."""
        if self._layout is None:
            self._layout, self._first = layout, shard
        elif layout != self._layout:
            raise ValueError(
                f"shard {shard} would get items {_shown(layout)}, shard {self._first} has items {_shown(self._layout)}: "
                "all shards hold items of one layout"
            )

    def change(self, name: str, call: Wire) -> None:
        """Record a call that exchanges a component or adds a transform or hook; shards that restart repeat it."""
        if name.startswith("set_"):
            self._changes = [each for each in self._changes if each[0] != name]
        if name == "set_storage":
            self._layout = None
        self._changes.append((name, call))

    def changes(self) -> list[tuple[str, Wire]]:
        """These calls, in order."""
        return self._changes

    def latest(self, shard: int) -> str | None:
        """The folder of a shard in the latest checkpoint."""
        return self._checkpoint[shard]

    def commit(self, checkpoint: list[str | None]) -> None:
        """Set the folders from which restarting shards continue; None for empty."""
        self._checkpoint = checkpoint

    def begin(self, token: str, seconds: float) -> bool:
        """Begin a checkpoint that must hold the shards within `seconds`. False if another one is running."""
        now = time.monotonic()
        if self._token and now < self._until:
            return False
        self._token, self._until, self._held = token, now + seconds, set()
        return True

    def hold(self, token: str, shard: int) -> bool:
        """Whether all shards are held for this checkpoint, now that this one is."""
        if token == self._token:
            self._held.add(shard)
        return token == self._token and len(self._held) == len(self._checkpoint)

    def end(self, token: str) -> None:
        """End a checkpoint; nothing happens where another one was begun since."""
        if self._token == token:
            self._token = ""


def _shown(layout: Any) -> str:
    return ", ".join(f"{'.'.join(map(str, path)) or 'tensor'}: {dtype}{list(shape)}" for path, dtype, shape in layout)
