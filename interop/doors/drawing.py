"""Batches of one size, as a program returns them and as torch gets them."""

from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from interop.data import bridge
from interop.doors.items import Items
from interop.doors.programs import Entries, Programs


class Drawing:
    """The program that draws batches of one size, and how its results are put together. See `Programs.draw`."""

    def __init__(self, programs: Programs, items: Items, batch_size: int) -> None:
        self.program, self.moves, info = programs.draw(batch_size)
        self._items, self._layout = items, items.with_entries(info) if items.is_dict else None
        self._paths = [leaf.path for leaf in self._layout.leaves] if self._layout else [*items.paths, *info]
        self._info = {path: self._paths.index(path) for path in info}
        self._dtypes = {path: torch.int64 for path, spec in info.items() if spec.dtype.kind == "i"}

    def tensors(self, items: Entries, info: Entries, valid: jax.Array) -> tuple[list[Tensor], bool]:
        """The entries of a batch in memory of their own, none where nothing was drawn, and whether an epoch has ended."""
        entries = items | info
        found = [bridge.hand_over(entries[path], self._dtypes.get(path)) for path in self._paths]
        flags = np.asarray(valid).tobytes()  # searched faster than an array
        if 0 in flags[:-1]:
            rows = torch.from_numpy(np.asarray(valid)[:-1])
            found = [each[rows] for each in found] if rows.any() else []
        return found, bool(flags[-1])

    def data(self, tensors: list[Tensor]) -> Any:
        """The batch: a TensorDict with the info, or the items alone."""
        if self._layout is None:
            return self._items.build(tensors[: len(self._items.paths)], tensors[0].shape[:1])
        return self._layout.build(tensors, tensors[0].shape[:1], self._items.device)

    def info(self, tensors: list[Tensor]) -> dict[Any, Any]:
        """The info by key. An index of several columns is a tuple of them."""
        info: dict[Any, Any] = {
            path[0] if len(path) == 1 else path: tensors[place] for path, place in self._info.items()
        }
        if "index" in info and info["index"].ndim > 1:
            info["index"] = info["index"].unbind(-1)
        return info
