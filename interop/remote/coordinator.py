"""What the shards and the clients of one remote buffer agree on, kept in one small process."""

import time
from typing import Any

import numpy as np

from interop.remote.epochs import EpochPlan, Plan
from interop.remote.wire import Wire
from interop.samplers.shares import Share


class Coordinator:
    """The epoch of draws without replacement, the layout of items, the latest checkpoint, and the client that makes one.

    Clients and shards call it only for these; writes and other draws pass it by.
    """

    def __init__(self) -> None:
        self._epochs = EpochPlan()
        self._layout: Any = None
        self._first = 0  # the shard whose layout that is
        self._checkpoint: list[str] | None = None
        self._changes: list[Wire] = []
        self._holder, self._until = "", 0.0

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

    def forget_layout(self) -> None:
        """Have the next write fix the layout of items anew."""
        self._layout = None

    def change(self, call: Wire) -> None:
        """Have shards that restart repeat a call which exchanges a component or adds a transform or a hook."""
        self._changes.append(call)

    def changes(self) -> list[Wire]:
        """These calls, in order."""
        return self._changes

    def latest(self) -> list[str] | None:
        """The folder of each shard in the latest checkpoint."""
        return self._checkpoint

    def commit(self, checkpoint: list[str] | None) -> None:
        """Have shards that restart go on from these folders, or empty."""
        self._checkpoint = checkpoint

    def hold(self, client: str, seconds: float) -> bool:
        """Give a client the right to hold the shards for so long, or longer with each call. False: another one has it."""
        now = time.monotonic()
        if self._holder not in ("", client) and now < self._until:
            return False
        self._holder, self._until = client, now + seconds
        return True

    def release(self, client: str) -> None:
        """End the right of a client; nothing happens where it has none."""
        if self._holder == client:
            self._holder = ""


def _shown(layout: Any) -> str:
    return ", ".join(f"{'.'.join(map(str, path)) or 'tensor'}: {dtype}{list(shape)}" for path, dtype, shape in layout)
