"""How often each row of a storage was written: whether what was found in a row once is still there."""

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.host.maps import in_shared_memory
from interop.shared.processes import starting_a_worker
from interop.storages import Storage


class Generations:
    """A number for each row, 0 after the first write and one more after each further one; -1 for rows never written.

    It belongs to a storage, whose writers count in it, of every buffer and of worker processes. 8 bytes a row.
    """

    def __init__(self, storage: Storage) -> None:
        self._hold(_zeros(0))
        if storage.lock.processes is not None:
            self.share(storage)
        if len(storage):  # rows that were there before
            self._reserve(storage)
            self._writes[: storage.filled_rows] = 1

    def _hold(self, counts: Tensor) -> None:
        self._counts = counts
        self._writes = counts.numpy()

    def _reserve(self, storage: Storage) -> None:
        """Have a number for each row that the storage can have or, where it has no bound, for those there are."""
        wanted = storage.row_capacity(None) if storage.max_size < 2**31 else storage.filled_rows
        if wanted > self._writes.size:
            bounded = storage.max_size < 2**31
            grown = _zeros(wanted if bounded else 1 << (wanted - 1).bit_length())
            grown[: self._writes.size] = self._counts
            self._hold(grown)

    def share(self, storage: Storage) -> None:
        """Count where other processes see it, from now on."""
        self._reserve(storage)
        self._hold(in_shared_memory(self._counts.clone()))

    def written(self, storage: Storage, rows: Any) -> None:
        """Count a write of each of the rows, which may repeat."""
        self._reserve(storage)
        if isinstance(rows, int):
            self._writes[rows] += 1
        else:
            np.add.at(self._writes, rows.numpy(), 1)

    def emptied(self) -> None:
        """Have what was stored be gone."""
        self._writes += self._writes > 0

    def of(self, rows: Tensor) -> Tensor:
        """The number of each row, -1 for one that cannot be; on the device of `rows`, int64."""
        at = rows.cpu().numpy()
        held = (at >= 0) & (at < self._writes.size)
        found = (
            np.where(held, self._writes[np.where(held, at, 0)] - 1, -1) if self._writes.size else np.full_like(at, -1)
        )
        return torch.from_numpy(found).to(rows.device)

    def saved(self) -> np.ndarray:
        """A copy of how often each row was written, up to the last one that was."""
        used = np.flatnonzero(self._writes)
        return self._writes[: int(used[-1]) + 1 if used.size else 0].copy()

    def loading(self, counts: np.ndarray | None, storage: Storage) -> Callable[[], None]:
        """Returns a function that sets these counts; None is one write of each row that is stored by then."""
        size = self._writes.size
        grown = _zeros(max(counts.size, size)) if counts is not None and counts.size > size else None

        def put() -> None:
            if grown is not None:
                self._hold(grown)
            if counts is None:
                self._reserve(storage)
            self._writes[:] = 0
            found: Any = np.ones(storage.filled_rows, np.int64) if counts is None else counts
            self._writes[: found.size] = found

        return put

    def __getstate__(self) -> dict[str, Any]:
        if starting_a_worker():
            return {"counts": self._counts}  # in shared memory, as the storage is by now
        return {"counts": self._counts.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._hold(state["counts"])


def _zeros(count: int) -> Tensor:
    """Zeros that take memory only once they are written."""
    if count == 0:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, 8 * count, mmap.MAP_PRIVATE), dtype=torch.int64, count=count)
