"""The base class of the samplers of the library, which draw flat slots."""

from abc import abstractmethod
from typing import Any, TypeGuard

import numpy as np
import torch

from interop.host.device_rows import JaxRows
from interop.samplers.reservation import Reservation
from interop.samplers.sampler import Sampler
from interop.storages import Storage, TensorStorage


class DrawingSampler(Sampler):
    """A sampler of flat slots. A buffer reads them without checks, unless a subclass overrides `draw` or `sample`."""

    planned: np.ndarray | None = None  # int64 positions chosen by a plan over shards, instead of the epoch

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        """int64 [batch_size], or a tuple of such per item dim, and the info of the batch.

        RuntimeError if there is nothing to draw.
        """
        slots, info = self._draw(storage, batch_size, key)
        return self.index_of(slots, storage), info

    def index_of(self, slots: torch.Tensor, storage: Storage) -> Any:
        """The index of flat slots: a tuple of coordinates for several item dims."""
        return unravel(slots, storage)

    def draw_slots(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray
    ) -> tuple[torch.Tensor, dict[Any, Any], list[torch.Tensor]]:
        """Flat slots, their info, and the leaves of the items if the drawing program has read them."""
        return *self._draw(storage, batch_size, key), []

    def draw_batch(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray, marks: bool
    ) -> tuple[Any, dict[Any, Any]] | None:
        """A whole batch and its info, if the sampler can read it faster than by slots; else None.

        With `marks` the info is also in the batch.
        """
        return None

    def reserve(self, storage: Storage, batch_size: int, key: np.ndarray) -> Reservation | None:
        return None if names_slots(self) else super().reserve(storage, batch_size, key)

    def before_draw(self) -> dict[str, Any] | None:
        return None if names_slots(self) else super().before_draw()

    @property
    def reads_to_reserve(self) -> bool:
        return not names_slots(self)

    @abstractmethod
    def _draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Flat slots and their info."""


def rows_on_device(storage: TensorStorage) -> JaxRows | None:
    """The rows of a storage on an accelerator, which the drawing program can read; else None."""
    rows = storage.table.rows
    return rows if isinstance(rows, JaxRows) else None


def names_slots(sampler: Sampler) -> TypeGuard[DrawingSampler]:
    """Whether the sampler draws flat slots: `draw` and `sample` are not overridden."""
    kind = type(sampler)
    return kind.draw is DrawingSampler.draw and kind.sample is Sampler.sample


def stored(storage: Storage) -> int:
    """The number of stored items. RuntimeError if there are none."""
    size = len(storage)
    if size == 0:
        raise RuntimeError("Cannot sample from an empty storage. Call extend() or add() first.")
    return size


def unravel(slots: torch.Tensor, storage: Storage) -> Any:
    """Flat slots as an index: unchanged for one item dim, a tuple of coordinates for more."""
    if storage.ndim == 1:
        return slots
    assert storage.shape is not None
    if slots.is_cpu:  # a sixth of the time
        return tuple(map(torch.from_numpy, np.unravel_index(slots.numpy(), tuple(storage.shape))))
    return torch.unravel_index(slots, storage.shape)
