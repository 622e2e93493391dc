"""A storage that stores each observation once, and derives next observations from the next rows."""

from typing import Any

import torch

from interop.data.index import resolved, slots_of_places
from interop.storages import LazyMemmapStorage

_FLAGS = ("done", "terminated", "truncated")


class FramesOnceStorage(LazyMemmapStorage):
    """A memory-mapped storage of steps that derives ("next", "observation") at reads.

    The next observation is the observation of the next row, or zero if ("next", "done") is set. "done", "terminated" and
    "truncated" are zeros with shape and dtype of those of "next". All reads are copies, also of single rows and slices.
    Open it with `FramesOnceStorage.open(folder, "r")`. The last row must be done.
    """

    AS_STORED = (("observation",), ("action",), *(("next", key) for key in ("reward", *_FLAGS)))

    def get(self, index: Any) -> Any:
        count = len(self)
        at = resolved(index, count, count, (count,))
        at = at if isinstance(at, torch.Tensor) else torch.from_numpy(slots_of_places(at, ()))
        if at.ndim == 0:
            return self.get(at.unsqueeze(0))[0]
        rows = super().get(at)
        behind = super().get((at + 1).clamp_(max=count - 1))
        following = behind.get("observation")
        results = rows.get("next")
        done = results.get("done")
        following.numpy()[done.numpy() != 0] = 0  # torch would start threads
        results.set("observation", following)
        for key in _FLAGS:
            rows.set(key, torch.zeros_like(done))
        return rows

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """RuntimeError: the storage is read-only."""
        self.contents.refuse_edit(())

    def is_live(self, index: Any) -> bool:
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, len={len(self)})"
