"""A draw and the read of its rows without what only an index from outside needs: checks, and a second dispatch."""

from typing import Any

import numpy as np

from interop import bridge
from interop.samplers import PrioritizedSampler, RandomSampler, Sampler
from interop.samplers.uniform import unravel
from interop.storages import Storage, TensorStorage
from interop.storages.rows import JaxRows

_DRAWS = {RandomSampler.sample, PrioritizedSampler.sample}
_READ = TensorStorage.get


def takes_keys(sampler: Sampler) -> bool:
    """Whether draws are the library's own, of which each can be given its random key."""
    own = isinstance(sampler, RandomSampler | PrioritizedSampler)
    return own and getattr(sampler.sample, "__func__", None) in _DRAWS


class Fused:
    """Sampling where the methods of storage and sampler are the library's own."""

    def __init__(self, storage: TensorStorage, sampler: RandomSampler | PrioritizedSampler) -> None:
        self._storage = storage
        self._sampler = sampler

    @classmethod
    def of(cls, storage: Storage, sampler: Sampler) -> "Fused | None":
        """None for another kind of storage or sampler."""
        fits = isinstance(storage, TensorStorage) and isinstance(sampler, RandomSampler | PrioritizedSampler)
        return cls(storage, sampler) if fits else None  # type: ignore[arg-type]  # as just found

    @property
    def holds(self) -> bool:
        """False where a method of the user's would be passed by: of a subclass, or put in the place of ours."""
        sample, get = self._sampler.sample, self._storage.get
        return getattr(sample, "__func__", None) in _DRAWS and getattr(get, "__func__", None) is _READ

    def sample(self, batch_size: int, key: np.ndarray | None) -> tuple[Any, dict[Any, Any]]:
        """A batch and what to tell about it. RuntimeError where there is nothing to draw."""
        storage, rows = self._storage, self._storage._rows
        arrays = rows.arrays if isinstance(rows, JaxRows) else []
        slots, info, leaves = self._sampler._draw(storage, batch_size, key, arrays)
        assert rows is not None  # an empty storage was refused by the sampler
        info["index"] = unravel(slots, storage)
        tensors = [bridge.hand_over(leaf) for leaf in leaves] if leaves else rows.read(slots)
        return storage.build(tensors, (batch_size,)), info
