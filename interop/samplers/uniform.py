"""Every stored item equally often."""

import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

import fbuf
from interop import bridge, compiled, randomness
from interop.processes import may_use_jax
from interop.samplers.drawing import DrawingSampler, stored
from interop.storages import Storage

_CPU = torch.device("cpu")


class RandomSampler(DrawingSampler):
    """Uniform draws with replacement over all stored items. O(batch)."""

    rule = fbuf.Uniform()

    def _draw(
        self, storage: Storage, batch_size: int, key: Any, items: Sequence[jax.Array] = ()
    ) -> tuple[torch.Tensor, dict[Any, Any], list[jax.Array]]:
        size = stored(storage)
        key = randomness.key(self._rng) if key is None else key
        place = place_of(storage)
        if place.type == "cpu" or size >= 2**31 or not may_use_jax():
            return torch.from_numpy(_below(size, batch_size, key)), {}, []
        lanes = tuple(storage.shape[1:]) if items and storage.shape is not None else ()
        with bridge.exact(place) if items else bridge.on(place):
            slots, _, leaves = compiled.draw(self.rule, (), key, batch_size, np.int32(size), None, list(items), lanes)
        return bridge.hand_over(slots, torch.int64), {}, leaves

    @property
    def refuses_late(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Numbers(threading.local):
    """A generator of random integers, made once a thread: to set its state for a draw is cheaper than a new one."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(0)
        self.integers = np.random.Generator(self.bits).integers
        self.words: np.ndarray = np.zeros(2, np.uint64)
        zeros: np.ndarray = np.zeros(4, np.uint64)
        self.state: Any = {
            "bit_generator": "Philox",
            "state": {"counter": zeros, "key": self.words},
            "buffer": zeros,
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }


_numbers = _Numbers()


def _below(bound: int, count: int, key: np.ndarray) -> np.ndarray:
    """`count` random integers of [0, bound), int64, of a raw key: a JAX program takes five times as long to do it."""
    numbers = _numbers
    numbers.words[0] = key.view(np.uint64)[0]
    numbers.bits.state = numbers.state
    return numbers.integers(bound, size=count)


def place_of(storage: Storage) -> torch.device:
    """The device on which draws for a storage are wanted."""
    device = getattr(storage, "device", None)
    return device if isinstance(device, torch.device) and bridge.jax_device(device) is not None else _CPU
