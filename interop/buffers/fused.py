"""A draw and the read of its rows without what only an index from outside needs: checks, and a second dispatch."""

from typing import Any

import numpy as np

from interop import bridge
from interop.samplers import DrawingSampler, Sampler
from interop.samplers.drawing import unravel
from interop.storages import Storage, TensorStorage
from interop.storages.rows import JaxRows, TorchRows

_DRAW = DrawingSampler.sample
_READ = TensorStorage.get


def takes_keys(sampler: Sampler) -> bool:
    """Whether draws are the library's own, of which each can be given its random key."""
    return isinstance(sampler, DrawingSampler) and getattr(sampler.sample, "__func__", None) is _DRAW


class Fused:
    """Sampling where the methods of storage and sampler are the library's own."""

    def __init__(self, storage: TensorStorage, sampler: DrawingSampler) -> None:
        self._storage = storage
        self._sampler = sampler
        self._place: int | None = None  # as `_numbers` finds it; -1 where there is none

    @classmethod
    def of(cls, storage: Storage, sampler: Sampler) -> "Fused | None":
        """None for another kind of storage or sampler."""
        fits = isinstance(storage, TensorStorage) and isinstance(sampler, DrawingSampler)
        return cls(storage, sampler) if fits else None  # type: ignore[arg-type]  # as just found

    @property
    def holds(self) -> bool:
        """False where a method of the user's would be passed by: of a subclass, or put in the place of ours."""
        return takes_keys(self._sampler) and getattr(self._storage.get, "__func__", None) is _READ

    def sample(self, batch_size: int, key: np.ndarray | None, marks: bool) -> tuple[Any, dict[Any, Any]]:
        """A batch and what to tell about it; with `marks` its "index" may already be what the info says.

        RuntimeError where there is nothing to draw.
        """
        storage, rows = self._storage, self._storage._rows
        arrays = rows.arrays if isinstance(rows, JaxRows) else []
        slots, info, leaves = self._sampler._draw(storage, batch_size, key, arrays)
        assert rows is not None  # an empty storage was refused by the sampler
        info["index"] = unravel(slots, storage)
        if leaves:
            tensors = [bridge.hand_over(leaf) for leaf in leaves]
        elif marks and isinstance(rows, TorchRows):
            tensors = rows.read(slots, self._numbers())
        else:
            tensors = rows.read(slots)
        return storage.build(tensors, (batch_size,)), info

    def _numbers(self) -> int:
        """Which leaf is the row number of each item."""
        if self._place is None:
            assert self._storage._layout is not None
            found = [spec.path == ("index",) and spec.shape == () for spec in self._storage._layout.leaves]
            self._place = found.index(True) if True in found and self._storage.ndim == 1 else -1
        return self._place
