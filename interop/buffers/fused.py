"""A draw and the read of its rows without what only an index from outside needs: checks, and a second dispatch."""

from typing import Any

import numpy as np
from torch import Tensor

from interop.data import bridge
from interop.host.device_rows import JaxRows
from interop.host.rows import TorchRows
from interop.samplers import DrawingSampler, Sampler
from interop.samplers.assembly import Assemblies
from interop.samplers.drawing import names_slots
from interop.samplers.reservation import Reservation
from interop.storages import Storage, TensorStorage

_READ = TensorStorage.get
_NO_RUNS = (None, 1)


class Fused:
    """Sampling where the methods of storage and sampler are the library's own."""

    def __init__(self, storage: TensorStorage, sampler: DrawingSampler) -> None:
        self._storage = storage
        self._sampler = sampler
        self._assemblies = Assemblies()

    @classmethod
    def of(cls, storage: Storage, sampler: Sampler) -> "Fused | None":
        """None for another kind of storage or sampler."""
        fits = isinstance(storage, TensorStorage) and isinstance(sampler, DrawingSampler)
        return cls(storage, sampler) if fits else None  # type: ignore[arg-type]  # as just found

    @property
    def storage(self) -> TensorStorage:
        """What is read."""
        return self._storage

    @property
    def holds(self) -> bool:
        """False where a method of the user's would be passed by: of a subclass, or put in the place of ours."""
        return names_slots(self._sampler) and getattr(self._storage.get, "__func__", None) is _READ

    def sample(
        self, batch_size: int, key: np.ndarray, marks: bool, drawn: Reservation | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """A batch and what to tell about it; with `marks` it may already have in it what the info says.

        RuntimeError where there is nothing to draw.
        """
        if drawn is None and (batch := self._sampler._batch(self._storage, batch_size, key, marks)) is not None:
            return batch
        slots, info, tensors = self.draw(batch_size, key, drawn)
        rows = self._storage._rows
        assert rows is not None  # an empty storage was refused by the sampler
        if isinstance(rows, TorchRows) and rows.on_host and slots.is_cpu:
            return self._assemblies.read(self._storage, slots, _NO_RUNS, info, marks)
        return self._storage.build(tensors or rows.read(slots), (slots.shape[0],)), info

    def draw(
        self, batch_size: int, key: np.ndarray, drawn: Reservation | None = None
    ) -> tuple[Tensor, dict[Any, Any], list[Tensor]]:
        """Flat slots, what to tell about them, and the items where the program that draws has read them."""
        rows = self._storage._rows
        if drawn is None:
            arrays = rows.arrays if isinstance(rows, JaxRows) else []
            slots, info, leaves = self._sampler._draw(self._storage, batch_size, key, arrays)
        else:
            slots, info, leaves = drawn.slots, drawn.info, []
        info["index"] = self._sampler._index_of(slots, self._storage)
        return slots, info, [bridge.hand_over(leaf) for leaf in leaves]


def as_entry(told: Any) -> Tensor | None:
    """What the info tells of items as one tensor on the host; None for what is none, or would have to be made."""
    if isinstance(told, tuple):
        return told[0].unsqueeze(-1) if len(told) == 1 and isinstance(told[0], Tensor) else None
    return told if isinstance(told, Tensor) else None
