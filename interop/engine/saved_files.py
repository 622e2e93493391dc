"""Rows in the files of a checkpoint, which are mapped and read where they are drawn. They cannot be written."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import StoredColumns
from fbuf.memory_plan import Share
from interop.data.layout import Layout, LeafSpec
from interop.engine import plans
from interop.engine.places.heap import Heap
from interop.engine.places.place import Place
from interop.engine.saved_rows import SavedRing, as_tensor
from interop.host.stored_rows import Rows


class SavedRows(Rows):
    """The rows of a checkpoint. A read takes the pages of the rows that are asked for, and nothing else."""

    def __init__(self, layout: Layout, ring: SavedRing, columns: StoredColumns) -> None:
        super().__init__(layout.leaves, (ring.capacity, *ring.lanes))
        self._files = columns.maps()
        self._step = self._files[0][0].shape[0] if self._files and self._files[0] else 1
        self._filled, self._dtypes = ring.filled, columns.dtypes
        self._per_row = ring.per_row

    def read(self, slots: Tensor, known: Mapping[int, Tensor] | None = None) -> list[Tensor]:
        known = known or {}
        at = slots.cpu().numpy().astype(np.int64)
        rows, lanes = np.divmod(at, self._per_row)
        files = rows // self._step
        found = [
            None if place in known else np.zeros((at.size, *spec.shape), dtype)
            for place, (spec, dtype) in enumerate(zip(self.specs, self._dtypes, strict=True))
        ]
        for number in np.unique(files[rows < self._filled]).tolist():
            here = np.flatnonzero((files == number) & (rows < self._filled))
            within = (rows[here] - number * self._step) * self._per_row + lanes[here]
            for target, column, spec in zip(found, self._files[number], self.specs, strict=True):
                if target is not None:
                    target[here] = column.reshape(len(column) * self._per_row, *spec.shape)[within]
        return [
            known[place] if array is None else as_tensor(array, spec.dtype)
            for place, (array, spec) in enumerate(zip(found, self.specs, strict=True))
        ]

    def put(self, slots: np.ndarray, leaves: Sequence[Tensor]) -> None:
        raise RuntimeError("rows of a checkpoint that was opened with mode='r' cannot be written; nothing was written")


class SavedFiles(Place):
    """The place of a table whose rows are in a checkpoint.

    Args:
        path: the checkpoint.
        filled: rows in it.
    """

    def __init__(self, path: str, filled: int) -> None:
        super().__init__()
        self._path = path
        self._filled = filled

    def zeros(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        raise RuntimeError("a checkpoint that was opened with mode='r' takes no items")

    def copied(self, has_rows: bool) -> Place:
        return Heap("cpu")

    def can_renew(self, is_shared: bool) -> bool:
        return False

    def plan(
        self, layout: Layout, lead: tuple[int, ...], device: torch.device, is_allocated: bool = False
    ) -> list[Share]:
        return plans.arrays("items", layout.leaves, (self._filled, *lead[1:]), self._path)
