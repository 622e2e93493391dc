"""Draws of flat slots, which buffers read without checks."""

from abc import abstractmethod
from typing import Any

import numpy as np
import torch

from interop.data.arguments import EMPTY
from interop.host.device_rows import JaxRows
from interop.samplers.draws import Draws
from interop.storages import Storage, TensorStorage


class SlotDraws(Draws):
    """Draws of flat slots. A subclass defines `slots`."""

    reads_to_reserve = False
    has_state = False

    @abstractmethod
    def slots(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Flat slots, int64 [batch_size], and their info. RuntimeError if there is nothing to draw."""

    def draw(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, dict[Any, Any]]:
        slots, info = self.slots(storage, batch_size, key)
        return self.index_of(slots, storage), info

    def index_of(self, slots: torch.Tensor, storage: Storage) -> Any:
        """The index of flat slots: a tuple of coordinates for several item dims."""
        return unravel(slots, storage)

    def read(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray
    ) -> tuple[torch.Tensor, dict[Any, Any], list[torch.Tensor]]:
        """Flat slots, their info, and the leaves of the items if the drawing program has read them."""
        return *self.slots(storage, batch_size, key), []

    def batch(
        self, storage: TensorStorage, batch_size: int, key: np.ndarray, marks: bool
    ) -> tuple[Any, dict[Any, Any]] | None:
        """A whole batch and its info, if it can be read faster than by slots; else None.

        With `marks` the info is also in the batch.
        """
        return None

    def reserve(self, storage: Storage, batch_size: int, key: np.ndarray) -> tuple[Any, Any] | None:
        return None


def rows_on_device(storage: TensorStorage) -> JaxRows | None:
    """The rows of a storage on an accelerator, which the drawing program can read; else None."""
    rows = storage.table.rows
    return rows if isinstance(rows, JaxRows) else None


def stored(storage: Storage) -> int:
    """The number of stored items. RuntimeError if there are none."""
    size = len(storage)
    if size == 0:
        raise RuntimeError(EMPTY)
    return size


def unravel(slots: torch.Tensor, storage: Storage) -> Any:
    """Flat slots as an index: unchanged for one item dim, a tuple of coordinates for more."""
    if storage.ndim == 1:
        return slots
    assert storage.shape is not None
    if slots.is_cpu:  # a sixth of the time
        return tuple(map(torch.from_numpy, np.unravel_index(slots.numpy(), tuple(storage.shape))))
    return torch.unravel_index(slots, storage.shape)
