"""Every stored item equally often."""

from typing import Any

import jax
import numpy as np
import torch

import fbuf
from fbuf.samplers import Chances
from interop.data import bridge, randomness
from interop.host import compiled
from interop.host.device_rows import JaxRows
from interop.samplers.drawing import DrawingSampler
from interop.samplers.shares import ShardContents
from interop.samplers.slot_draws import SlotDraws, rows_on_device, stored
from interop.shared.processes import may_use_jax
from interop.storages import Storage, TensorStorage

_CPU = torch.device("cpu")
_STATELESS = jax.tree.structure(())
_FEW = 2048  # draws for which scaled floats take less time than bounded integers


class UniformDraws(SlotDraws):
    """Draws each stored item equally often, with replacement."""

    rule = fbuf.Uniform()

    def slots(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[torch.Tensor, dict[Any, Any]]:
        return self._drawn(storage, batch_size, key)[0], {}

    def read(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray
    ) -> tuple[torch.Tensor, dict[Any, Any], list[torch.Tensor]]:
        slots, leaves = self._drawn(storage, batch_size, key, rows_on_device(storage))
        return slots, {}, leaves

    def _drawn(
        self, storage: Storage, batch_size: int, key: np.ndarray, rows: JaxRows | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Slots, and copies of the items there."""
        size = stored(storage)
        place = _CPU if size >= 2**31 or not may_use_jax() else place_of(storage)
        if place.type == "cpu":
            draw = randomness.generator_of(key)
            if batch_size > _FEW:
                return torch.from_numpy(draw.integers(size, size=batch_size)), []
            # Of 53 random bits each. Below `size`: a float64 below 1 times size is.
            return torch.from_numpy((draw.random(batch_size) * size).astype(np.int64)), []
        items, lanes = ([], ()) if rows is None else (rows.arrays, rows.lanes)
        words = compiled.request_words(key, size)
        with bridge.exact(place) if items else bridge.on(place):
            at, _, _, leaves = compiled.draw(self.rule, _STATELESS, batch_size, [], words, lanes, items)
        [slots, *found] = bridge.crossing(place).take([at, *leaves])
        return slots.to(torch.int64), found

    def chances(self, storage: Storage, batch_size: int | None = None) -> Chances:
        return self.rule.chances((), len(storage))

    def share(self, storage: Storage, batch_size: int) -> ShardContents:
        return ShardContents(len(storage), float(len(storage)))


class RandomSampler(DrawingSampler):
    """Uniform draws with replacement over all stored items. O(batch).

    Args:
        replacement: `RandomSampler(replacement=False, drop_last=..., shuffle=...)` makes a `SamplerWithoutReplacement`.
    """

    _library_draws = UniformDraws()  # it has no state

    def __init__(self, *, replacement: bool = True) -> None:
        if replacement is not True:
            raise TypeError(f"replacement must be True or False, got {replacement!r}")


def place_of(storage: Storage) -> torch.device:
    """The device on which draws for a storage are wanted."""
    device = getattr(storage, "device", None)
    if not isinstance(device, torch.device) or device.type == "cpu":
        return _CPU
    return device if bridge.jax_device(device) is not None else _CPU
