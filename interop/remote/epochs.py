"""Epochs over the units (items or slices) of all shards, for draws without replacement."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from interop.host.epochs import Epoch
from interop.remote.shares import masses_of
from interop.samplers.shares import ShardContents


class Planned(NamedTuple):
    """The units that one shard draws for a batch."""

    positions: np.ndarray  # int64: unit numbers, at the time of planning
    version: int  # `ShardContents.version` at the time of planning


class BatchPlan(NamedTuple):
    """The units of one batch."""

    parts: list[Planned | None]  # by shard; None if it draws nothing
    counts: np.ndarray  # int64 [shards]
    ran_out: bool  # whether the batch ends an epoch


class EpochPlan:
    """Plans batches without replacement: every unit of all shards once per epoch. One process plans for all clients.

    The rules are those of `SamplerWithoutReplacement`. A new epoch begins when the number of units or the
    `ShardContents.version` of a shard changes. Shards may draw the parts of several batches in any order. A plan costs
    O(units of the batch + shards), and four bytes per unit of all shards. Not thread-safe.
    """

    def __init__(self) -> None:
        self._epoch = Epoch()
        self._known: list[tuple[float, int]] = []  # (units, version) by shard

    def plan(self, shares: Sequence[ShardContents], units: int, key: np.ndarray) -> BatchPlan:
        """Plan the next batch.

        Args:
            shares: the current shares of all shards.
            units: the number of units of the batch; the last batch of an epoch may have fewer.
            key: random bits, [2] uint32.

        RuntimeError if no shard has units. ValueError with `drop_last` if all together have fewer than a batch.
        """
        sizes = masses_of(shares).astype(np.int64)
        if (self._epoch.shuffle, self._epoch.drop_last) != (shares[0].shuffle, shares[0].drop_last):
            self._epoch = Epoch(shares[0].shuffle, shares[0].drop_last)
        known = [(share.mass, share.version) for share in shares]
        if known != self._known:
            self._epoch.restart()
            self._known = known
        taken, ends = self._epoch.take(units, int(sizes.sum()), key), sizes.cumsum()
        homes = ends.searchsorted(taken, side="right")
        parts = [
            Planned(taken[homes == shard] - (ends[shard] - sizes[shard]), share.version) if shard in homes else None
            for shard, share in enumerate(shares)
        ]
        return BatchPlan(parts, np.bincount(homes, minlength=len(parts)), self._epoch.ran_out)

    def restart(self) -> None:
        """Begin a new epoch, after the shards were emptied or loaded, or one was lost."""
        self._known = []
