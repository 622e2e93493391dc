"""Rows in a folder whose next observations are the observations of the rows behind."""

from typing import Any

import torch

from interop.data.index import flat_slots, resolved
from interop.storages import LazyMemmapStorage

_FLAGS = ("done", "terminated", "truncated")


class FramesOnceStorage(LazyMemmapStorage):
    """Steps that are read as ("next", "observation") too, though each observation is stored once.

    The next observation is that of the row behind, and zero where ("next", "done") is set. "done", "terminated" and
    "truncated" are zeros, like those of "next" in shape and dtype. Reads are copies, of single rows and slices as well.
    Open it with `FramesOnceStorage.open(folder, "r")`. The last row must be done.
    """

    AS_STORED = (("observation",), ("action",), *(("next", key) for key in ("reward", *_FLAGS)))

    def get(self, index: Any) -> Any:
        count = len(self)
        at = resolved(index, count, count, (count,))
        at = at if isinstance(at, torch.Tensor) else torch.from_numpy(flat_slots(at, ()))
        if at.ndim == 0:
            return self.get(at.unsqueeze(0))[0]
        rows, behind = super().get(at), super().get((at + 1).clamp_(max=count - 1))
        following, results = behind.get("observation"), rows.get("next")
        done = results.get("done")
        following.numpy()[done.numpy() != 0] = 0  # by torch this would start threads
        results.set("observation", following)
        for key in _FLAGS:
            rows.set(key, torch.zeros_like(done))
        return rows

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """RuntimeError: it is read only."""
        self.refuse_edit(())

    def is_live(self, index: Any) -> bool:
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, len={len(self)})"
