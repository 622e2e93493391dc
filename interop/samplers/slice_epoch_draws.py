"""Draws of slices of trajectories, each trajectory once an epoch."""

from typing import Any

import numpy as np

from fbuf.samplers import Chances, Reason
from interop.data import randomness
from interop.host.epochs import Epoch, EpochState
from interop.host.trajectories import Trajectories
from interop.samplers.epoch_draws import EpochDraws
from interop.samplers.shares import ShardContents
from interop.samplers.slice_draws import SliceDraws, SliceShape
from interop.samplers.slice_info import DrawnSlices
from interop.samplers.slice_law import SliceLaw
from interop.samplers.trajectory_source import TrajectorySource
from interop.storages import Storage


class SliceEpochDraws(SliceDraws, EpochDraws):
    """Draws slices whose trajectories are the positions of an epoch. A write begins an epoch."""

    reads_to_reserve = True

    def __init__(self, source: TrajectorySource, shape: SliceShape, epoch: Epoch) -> None:
        SliceDraws.__init__(self, source, shape)
        EpochDraws.__init__(self, epoch)
        self._version: int | None = None  # of the trajectories of this epoch; None before the first draw
        self._order: np.ndarray | None = None  # of the trajectories in the storage; None until it is needed

    def before_draw(self) -> dict[str, Any]:
        return {**super().before_draw(), "version": self._version, "order": self._order}

    def put_back(self, before: dict[str, Any]) -> None:
        super().put_back(before)
        self._version = before["version"]
        self._order = before["order"]

    def forget(self) -> None:
        super().forget()
        self._version = None
        self._order = None

    def clear(self) -> None:
        EpochDraws.clear(self)
        self.forget()

    def written(self) -> None:
        """Begin an epoch after a write between a load and the next draw, which no version shows."""
        if self._version is None:
            self.epoch.restart()

    def trajectories(self, storage: Storage) -> Trajectories:
        index = super().trajectories(storage)
        if self.source.version != self._version:
            if self._version is not None:
                self.epoch.begin_anew()  # reserved slices are stale: their rows may hold other items now
            self._order = None
            self._version = self.source.version
        return index

    def share(self, storage: Storage, batch_size: int) -> ShardContents | None:
        """The trajectories of which one slice each is drawn in an epoch."""
        share = SliceDraws.share(self, storage, batch_size)
        assert share is not None
        return self._in_epochs(share, self.source.version)

    def catch_up(self, storage: Storage) -> None:
        with self.epoch.lock:
            self.trajectories(storage)

    def _slices(self, storage: Storage, count: int, length: int, key: np.ndarray) -> DrawnSlices:
        index = self.trajectories(storage)
        trajectories = self._candidates(index, length)
        positions = self._take(count, len(trajectories), key)
        if not self.epoch.shuffle:  # lane by lane, by the oldest stored row
            if self._order is None or self._order.size != len(trajectories):
                self._order = np.lexsort((index.rows_at(index.first_stored(trajectories)), trajectories[:, 0]))
            positions = self._order[positions]
        shares = randomness.generator_of(key ^ np.uint32(0x9E3779B9)).random(positions.size)
        return self._within(index, trajectories.take(positions, 0), shares, length)

    def _law(self, storage: Storage, length: int, batch_size: int | None) -> Chances:
        count = 1 if batch_size is None else self.shape.of(batch_size)[0]
        law = SliceLaw(self.source.of(storage))
        units = np.flatnonzero(law.lengths >= self.shape.least(length))
        of_units = self._law_of_positions(units.size, count, anew=self._version not in (None, self.source.version))
        if not self.epoch.shuffle:  # positions are ranks
            units = units[law.in_order_of_storage()[units].argsort()]
        share, reason = np.zeros(law.lengths.size), np.full(law.lengths.size, Reason.TOO_SHORT, np.uint8)
        share[units], reason[units] = of_units.probability, of_units.reason
        return law.evenly(share, reason, length, *self.shape.spans(length))

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        return SliceDraws.chances(self, storage, batch_size)

    def state(self) -> EpochState:
        """The state of a new epoch where trajectories have changed since the last draw."""
        state = super().state()
        version = self._version
        if version is None or (self.source.refresh() and self.source.version == version):
            return state
        return state._replace(position=0, over=False)

    def __getstate__(self) -> dict[str, Any]:
        epoch = Epoch(self.epoch.shuffle, self.epoch.drop_last)
        epoch.with_state(self.state())
        return {**super().__getstate__(), "epoch": epoch, "_version": None, "_order": None}
