"""Epochs over the units of all shards: which of them a batch without replacement is made of."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interop.samplers.epoch import Epoch
from interop.samplers.shares import Share


@dataclass(frozen=True)
class Planned:
    """The units that one shard draws for a batch: positions among its units, as they were when the batch was planned."""

    positions: np.ndarray  # int64
    size: int  # how many units the shard had
    version: int  # `Share.version` of the shard


@dataclass(frozen=True)
class Plan:
    """The units of one batch."""

    parts: tuple[Planned | None, ...]  # of each shard; None where it draws nothing
    counts: np.ndarray  # int64 [shards]
    ran_out: bool  # whether the batch is the end of an epoch


class EpochPlan:
    """Plans batches without replacement: every unit of all shards once an epoch. It lives in one process for all clients.

    The rules are those of `SamplerWithoutReplacement` for one buffer: in random order, or in order without `shuffle`; the
    last batch of an epoch is short, or left out with `drop_last`; another number of units of a shard begins an epoch, and
    so does another `Share.version`. The shards may draw the parts of several batches in any order. Safe from several
    threads. A plan costs O(units of the batch), and four bytes for each unit of all shards.
    """

    def __init__(self) -> None:
        self._epoch: Epoch | None = None
        self._known: list[tuple[int, int]] = []  # units and version of each shard

    def plan(self, shares: Sequence[Share], units: int, key: np.ndarray) -> Plan:
        """The units of the next batch.

        Args:
            shares: of all shards, at the moment: another number of units than before begins an epoch.
            units: wanted; fewer come at the end of an epoch.
            key: random bits, [2] uint32.

        RuntimeError where nothing is stored; ValueError with `drop_last` where fewer units are.
        """
        known = [(int(share.mass), share.version) for share in shares]
        sizes = np.array([size for size, _ in known], np.int64)
        total = int(sizes.sum())
        if not total:
            raise RuntimeError("Cannot sample from an empty storage. Call extend() or add() first.")
        epoch = self._of(shares[0].shuffle, shares[0].drop_last)
        with epoch.lock:
            epoch.check(units, total)
            if known != self._known:
                self._known = known
                epoch.restart()
            taken = epoch.take(units, total, key)
            ran_out = epoch.ran_out
        ends = sizes.cumsum()
        home = ends.searchsorted(taken, side="right")
        counts = np.bincount(home, minlength=len(known)).astype(np.int64)
        parts = [
            Planned(taken[home == shard] - (ends[shard] - size), size, version) if counts[shard] else None
            for shard, (size, version) in enumerate(known)
        ]
        return Plan(tuple(parts), counts, ran_out)

    def _of(self, shuffle: bool, drop_last: bool) -> Epoch:
        if self._epoch is None or (self._epoch.shuffle, self._epoch.drop_last) != (shuffle, drop_last):
            self._epoch = Epoch(shuffle, drop_last)
        return self._epoch

    def restart(self) -> None:
        """Begin another epoch: the shards were emptied, loaded, or one of them was lost."""
        self._known = []
