"""Epochs over the units of all shards: which of them a batch without replacement is made of."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from interop.host.epochs import Epoch
from interop.remote.shares import masses_of
from interop.samplers.shares import Share


class Planned(NamedTuple):
    """The units that one shard draws for a batch."""

    positions: np.ndarray  # int64: among the units that the shard had when the batch was planned
    version: int  # `Share.version` then


class Plan(NamedTuple):
    """The units of one batch."""

    parts: list[Planned | None]  # of each shard; None where it draws nothing
    counts: np.ndarray  # int64 [shards]
    ran_out: bool  # whether the batch is the end of an epoch


class EpochPlan:
    """Plans batches without replacement: every unit of all shards once an epoch. One process plans for all clients.

    The rules are those of `SamplerWithoutReplacement` for one buffer. Another epoch begins where the number of units of a
    shard or its `Share.version` has changed. The shards may draw the parts of several batches in any order. A plan costs
    O(units of the batch + shards), and four bytes for each unit of all shards. Not safe from several threads.
    """

    def __init__(self) -> None:
        self._epoch = Epoch()
        self._known: list[tuple[float, int]] = []  # units and version of each shard

    def plan(self, shares: Sequence[Share], units: int, key: np.ndarray) -> Plan:
        """The units of the next batch.

        Args:
            shares: of all shards, at the moment.
            units: wanted; fewer come at the end of an epoch.
            key: random bits, [2] uint32.

        RuntimeError where no shard has units; ValueError with `drop_last` where all have fewer than a batch.
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
        return Plan(parts, np.bincount(homes, minlength=len(parts)), self._epoch.ran_out)

    def restart(self) -> None:
        """Begin another epoch: the shards were emptied, loaded, or one of them was lost."""
        self._known = []
