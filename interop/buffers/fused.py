"""A draw and the read of its rows without what only an index from outside needs: checks, and a second dispatch."""

from typing import Any

import numpy as np

from interop import bridge
from interop.samplers import PrioritizedSampler, RandomSampler, Sampler
from interop.samplers.uniform import unravel
from interop.storages import Storage, TensorStorage
from interop.storages.rows import JaxRows


class Fused:
    """Sampling where the methods of storage and sampler are the library's own."""

    def __init__(self, storage: TensorStorage, sampler: RandomSampler | PrioritizedSampler) -> None:
        self._storage = storage
        self._sampler = sampler

    @classmethod
    def of(cls, storage: Storage, sampler: Sampler) -> "Fused | None":
        """None where a user's own method would be passed by."""
        own_read = isinstance(storage, TensorStorage) and type(storage).get is TensorStorage.get
        own_draw = any(
            isinstance(sampler, kind) and type(sampler).sample is kind.sample
            for kind in (RandomSampler, PrioritizedSampler)
        )
        return cls(storage, sampler) if own_read and own_draw else None  # type: ignore[arg-type]  # as just found

    def sample(self, batch_size: int, key: np.ndarray | None) -> tuple[Any, dict[Any, Any]]:
        """A batch and what to tell about it. RuntimeError where there is nothing to draw."""
        storage, rows = self._storage, self._storage._rows
        arrays = rows.arrays if isinstance(rows, JaxRows) else []
        slots, info, leaves = self._sampler._draw(storage, batch_size, key, arrays)
        assert rows is not None  # an empty storage was refused by the sampler
        info["index"] = unravel(slots, storage)
        tensors = [bridge.hand_over(leaf) for leaf in leaves] if leaves else rows.read(slots)
        return storage.build(tensors, (batch_size,)), info
