"""Draws of items without replacement: each once an epoch."""

import dataclasses
from typing import Any

import numpy as np
import torch

from fbuf.memory_plan import Share
from fbuf.samplers import Chances, Reason
from interop.host.epochs import Epoch, EpochState
from interop.samplers.draws import host_share
from interop.samplers.shares import ShardContents
from interop.samplers.slot_draws import SlotDraws, stored
from interop.storages import Storage


class EpochDraws(SlotDraws):
    """Draws the positions of an epoch: those of the stored items here, of trajectories in a subclass.

    Attributes:
        epoch: what was drawn of the positions.
        planned: int64 positions chosen by a plan over shards, instead of the epoch.
    """

    has_state = True

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.planned: np.ndarray | None = None

    def slots(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[torch.Tensor, dict[Any, Any]]:
        return torch.from_numpy(self._take(batch_size, stored(storage), key)), {}

    def _take(self, count: int, length: int, key: np.ndarray) -> np.ndarray:
        """Positions of the epoch, or the planned ones."""
        return self.epoch.take(count, length, key) if self.planned is None else self.planned

    def reserve(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, Any] | None:
        epoch = self.epoch
        if self.planned is not None:
            return None

        def take() -> tuple[torch.Tensor, dict[Any, Any]]:
            drawn = self.slots(storage, batch_size, key)
            epoch.reserve(key)
            return drawn

        with epoch.lock:
            self.catch_up(storage)  # before: an epoch that it begins stays begun
            return epoch.whole(take)

    @property
    def of_requests(self) -> Epoch | None:
        return self.epoch

    def before_draw(self) -> dict[str, Any]:
        return {"epoch": self.epoch.before_draw()}

    def put_back(self, before: dict[str, Any]) -> None:
        self.epoch.put_back(before["epoch"])

    def let_go(self) -> None:
        self.epoch.lock.let_go()

    @property
    def has_more(self) -> bool | None:
        return not self.epoch.over

    def remaining(self, storage: Storage) -> tuple[int, np.ndarray]:
        """How many items the epoch has, and those it still has to draw, prefetched ones too. The storage's lock is held."""
        self.catch_up(storage)
        state = self.epoch.state()
        return state.length, state.left()

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        count = 1 if batch_size is None else batch_size
        return self._law_of_positions(len(storage), count)

    def _law_of_positions(self, length: int, count: int, anew: bool = False) -> Chances:
        """The chances of `length` positions in a take of `count`; `anew` begins a new epoch."""
        drop_last, shuffle = self.epoch.drop_last, self.epoch.shuffle
        if drop_last and count > length:  # `take` raises
            return Chances.of(np.zeros(length), np.full(length, Reason.TOO_FEW, np.uint8))
        state = self.epoch.state()
        left = state.left()
        ends = not left.size or (drop_last and left.size < count)
        return Chances.in_epoch(length, np.arange(length) if anew or ends or state.length != length else left, shuffle)

    def state(self) -> EpochState:
        """A copy of what decides the next draws, without those that are reserved."""
        return self.epoch.state()

    def share(self, storage: Storage, batch_size: int) -> ShardContents | None:
        return self._in_epochs(ShardContents(len(storage), float(len(storage))))

    def _in_epochs(self, share: ShardContents, version: int = 0) -> ShardContents:
        own: dict[str, Any] = {"in_epochs": True, "drop_last": self.epoch.drop_last, "shuffle": self.epoch.shuffle}
        return dataclasses.replace(share, **own, version=version)

    def memory_shares(self, storage: Storage, capacity: int) -> list[Share]:
        return [host_share("order", 2 * 4 * capacity)] if self.epoch.shuffle else []  # it may have doubled

    def clear(self) -> None:
        self.epoch.restart()
