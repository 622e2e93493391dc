"""Draws of items in proportion to their priority."""

from typing import Any

import numpy as np
from torch import Tensor

from fbuf.samplers import Chances
from interop.samplers.item_priorities import ItemPriorities
from interop.samplers.shares import ShardContents
from interop.samplers.slot_draws import SlotDraws, rows_on_device
from interop.storages import Storage, TensorStorage


class PriorityDraws(SlotDraws):
    """Draws items by their priorities, with importance weights under "priority_weight"."""

    def __init__(self, priorities: ItemPriorities) -> None:
        self._priorities = priorities

    @property
    def settings(self) -> tuple[Any, ...]:
        return self._priorities.alpha, self._priorities.beta

    def slots(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Tensor, dict[Any, Any]]:
        slots, weights, _ = self._priorities.draw(storage, batch_size, key)
        return slots, {"priority_weight": weights}

    def read(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray
    ) -> tuple[Tensor, dict[Any, Any], list[Tensor]]:
        slots, weights, leaves = self._priorities.draw(storage, batch_size, key, rows_on_device(storage))
        return slots, {"priority_weight": weights}, leaves

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        return self._priorities.chances(storage)

    def share(self, storage: Storage, batch_size: int) -> ShardContents | None:
        return self._priorities.share(storage)
