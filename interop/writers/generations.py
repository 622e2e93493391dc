"""Generations: how often each row of a storage was written."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.engine.places.heap import untouched_zeros
from interop.host.maps import in_shared_memory
from interop.shared.processes import starting_a_worker
from interop.storages import Storage


class Generations:
    """A generation for each row: 0 after the first write, one more after each further write, -1 before. 8 bytes a row.

    It belongs to a storage. All writers on the storage count in it, in worker processes too.
    """

    def __init__(self, storage: Storage) -> None:
        self._hold(untouched_zeros((0,), torch.int64))
        if storage.lock.processes is not None:
            self.share(storage)
        if len(storage):  # rows that were there before
            self._reserve(storage)
            self._writes[: storage.contents.filled_rows] = 1

    # Counts that changed since `before_write`: which ones, and what they were.
    _changed: list[tuple[np.ndarray, Any, np.ndarray]] | None = None

    def before_write(self) -> Tensor:
        """What `put_back` needs."""
        self._changed = []
        return self._counts

    def put_back(self, before: Tensor) -> None:
        """Be as at the last `before_write`."""
        for counts, at, were in reversed(self._changed or []):
            counts[at] = were
        self._hold(before)
        self._changed = []

    def _log(self, at: np.ndarray | slice | int) -> None:
        if self._changed is not None:
            self._changed.append((self._writes, at, self._writes[at].copy()))

    def _hold(self, counts: Tensor) -> None:
        self._counts = counts
        self._writes = counts.numpy()

    def _reserve(self, storage: Storage) -> None:
        """Allocate counts for all rows, or for the filled ones if the storage has no bound."""
        rows = storage.row_capacity(None) if storage.max_size < 2**31 else storage.contents.filled_rows
        if rows > self._writes.size:
            bounded = storage.max_size < 2**31
            grown = untouched_zeros((rows if bounded else 1 << (rows - 1).bit_length(),), torch.int64)
            grown[: self._writes.size] = self._counts
            self._hold(grown)

    def share(self, storage: Storage) -> None:
        """Move the counts to shared memory."""
        self._reserve(storage)
        self._hold(in_shared_memory(self._counts.clone()))

    def written(self, storage: Storage, rows: Any) -> None:
        """Count a write of each row. Rows may repeat."""
        self._reserve(storage)
        self._log(rows if isinstance(rows, int) else rows.numpy())
        if isinstance(rows, int):
            self._writes[rows] += 1
        else:
            np.add.at(self._writes, rows.numpy(), 1)

    def emptied(self) -> None:
        """Count the end of all items: the storage was emptied."""
        self._log(slice(None))
        self._writes += self._writes > 0

    def of(self, rows: Tensor) -> Tensor:
        """The generation of each row, int64 on the device of `rows`; -1 for rows out of range."""
        at = rows.cpu().numpy()
        is_counted = (at >= 0) & (at < self._writes.size)
        generations = np.full_like(at, -1)
        generations[is_counted] = self._writes[at[is_counted]] - 1
        return torch.from_numpy(generations).to(rows.device)

    def state(self) -> np.ndarray:
        """A copy of the counts, up to the last row that was written."""
        used = np.flatnonzero(self._writes)
        return self._writes[: int(used[-1]) + 1 if used.size else 0].copy()

    def with_state(self, counts: np.ndarray | None, storage: Storage) -> Callable[[], None]:
        """Take memory for these counts; the returned function sets them.

        None stands for one write of each row that is stored by then.
        """
        size = self._writes.size
        more = 0 if counts is None else counts.size
        grown = untouched_zeros((more,), torch.int64) if more > size else None

        def put() -> None:
            if grown is not None:
                self._hold(grown)
            if counts is None:
                self._reserve(storage)
            self._writes[:] = 0
            writes: Any = np.ones(storage.contents.filled_rows, np.int64) if counts is None else counts
            self._writes[: writes.size] = writes

        return put

    def __getstate__(self) -> dict[str, Any]:
        if starting_a_worker():
            return {"counts": self._counts}  # in shared memory, as the storage is by now
        return {"counts": self._counts.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._hold(state["counts"])
