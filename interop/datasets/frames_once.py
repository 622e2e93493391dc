"""Rows in a folder whose next observations are the observations of the rows behind."""

from typing import Any

import torch
from torch import Tensor

from interop.index import as_int, as_tensor, in_range
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
        at = _places(index, len(self))
        if at.ndim == 0:
            return self.get(at.unsqueeze(0))[0]
        rows, behind = super().get(at), super().get((at + 1).clamp_(max=len(self) - 1))
        following, results = behind.get("observation"), rows.get("next")
        done = results.get("done")
        following.numpy()[done.numpy() != 0] = 0  # by torch this would start threads
        results.set("observation", following)
        for key in _FLAGS:
            rows.set(key, torch.zeros_like(done))
        return rows

    def is_live(self, index: Any) -> bool:
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, len={len(self)})"


def _places(index: Any, count: int) -> Tensor:
    """The rows that an index of any kind names."""
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if index is Ellipsis or isinstance(index, slice):
        index = range(count)[slice(None) if index is Ellipsis else index]
    single = as_int(index)
    at = as_tensor(index) if single is None else torch.tensor(single, device="cpu")
    if at.dtype == torch.bool:
        if tuple(at.shape) != (count,):
            raise IndexError(f"the mask has shape {list(at.shape)}, there are {count} rows")
        at = at.nonzero().squeeze(1)
    return in_range(at, count)
