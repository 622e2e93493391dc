"""What one would write without a library: rows in preallocated torch tensors, or NumPy arrays (`plain_numpy.py`).

No locks, no checks, no metadata of a batch, no second writer: what is beyond these, a library's user pays for. Prioritized
draws take the running sum of all priorities and search it.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from plain_numpy import NUMPY, Numpy, PrioritizedNumpy
from torch import Tensor

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "NUMPY",
    "TORCH",
    "Numpy",
    "PrioritizedNumpy",
    "PrioritizedTorch",
    "Torch",
    "arrays",
    "rings",
    "rows_for",
    "tensors",
]
TORCH = "plain torch"


class Torch:
    """A ring of rows in a dict of tensors."""

    def __init__(self, rows: dict[str, Tensor], capacity: int) -> None:
        """Full of copies of `rows`."""
        device = next(iter(rows.values())).device
        self._capacity, self._cursor, self._device = capacity, 0, device
        self._offsets = torch.arange(capacity, device=device)
        source = self._offsets % len(next(iter(rows.values())))
        self._kept = {name: leaf.index_select(0, source) for name, leaf in rows.items()}

    def extend(self, rows: dict[str, Tensor]) -> Tensor:
        """The slots taken."""
        slots = (self._offsets[: len(next(iter(rows.values())))] + self._cursor) % self._capacity
        for name, leaf in rows.items():
            self._kept[name].index_copy_(0, slots, leaf)
        self._cursor = (self._cursor + len(slots)) % self._capacity
        return slots

    def add(self, row: dict[str, Tensor]) -> int:
        """The slot taken by a single row, without a batch dimension."""
        slot = self._cursor
        for name, leaf in row.items():
            self._kept[name][slot] = leaf
        self._cursor = (slot + 1) % self._capacity
        return slot

    def sample(self, count: int) -> dict[str, Tensor]:
        return self._read(torch.randint(0, self._capacity, (count,), device=self._device))

    def _read(self, slots: Tensor) -> dict[str, Tensor]:
        return {name: leaf.index_select(0, slots) for name, leaf in self._kept.items()}


class PrioritizedTorch(Torch):
    def __init__(self, rows: dict[str, Tensor], capacity: int, alpha: float, beta: float) -> None:
        super().__init__(rows, capacity)
        self._alpha, self._beta = alpha, beta
        self._weighed = torch.rand(capacity, device=self._device) + 1e-3
        self._highest = torch.ones((), device=self._device)

    def extend(self, rows: dict[str, Tensor]) -> Tensor:
        slots = super().extend(rows)
        self._weighed[slots] = self._highest**self._alpha
        return slots

    def sample(self, count: int) -> dict[str, Tensor]:
        running = self._weighed.cumsum(0)
        masses = torch.rand(count, device=self._device) * running[-1]
        slots = torch.searchsorted(running, masses).clamp_(max=self._capacity - 1)
        weights = (self._weighed[slots] / self._weighed.min()) ** -self._beta
        return self._read(slots) | {"index": slots, "weight": weights}

    def update(self, slots: Tensor, priorities: Tensor) -> None:
        self._weighed[slots] = priorities**self._alpha
        self._highest = torch.maximum(self._highest, priorities.max())


def tensors(rows: "TensorDict") -> dict[str, Tensor]:
    """The leaves under flat names."""
    return {".".join(name) if isinstance(name, tuple) else name: rows[name] for name in rows.keys(True, True)}


def arrays(rows: "TensorDict") -> dict[str, np.ndarray]:
    return {name: leaf.numpy() for name, leaf in tensors(rows).items()}


def rings(rows: "TensorDict", capacity: int) -> dict[str, Any]:
    """Full rings of rows like these, by name."""
    return {TORCH: Torch(tensors(rows), capacity), NUMPY: Numpy(arrays(rows), capacity)}


def rows_for(name: str, rows: "TensorDict") -> Any:
    """The rows as the contender of that name takes them."""
    return {TORCH: tensors, NUMPY: arrays}.get(name, lambda given: given)(rows)
