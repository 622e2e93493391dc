"""Runs of rows of one length, each copied in one piece where its rows lie one behind the other in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.host.leaf_rows import LARGE, LeafRows
from interop.host.paging import Paging

_KEPT = 8  # shapes of batches


class Runs:
    """Reads runs of rows.

    A window of a leaf is an array over its memory whose item i is the run that begins at row i. Indexing it copies whole
    runs, where a gather copies row by row.
    """

    def __init__(self, items: Sequence[LeafRows], lanes: tuple[int, ...], paging: Paging | None) -> None:
        """`items` are the leaves by flat slot; `paging` reads rows that are on disk."""
        self._items = items
        self._lanes = lanes
        self._paging = paging
        self._windows: dict[tuple[int, int], list[Any]] = {}

    def read(self, begins: np.ndarray, length: int, slots: Tensor, known: Mapping[int, Tensor]) -> list[Tensor]:
        """Copies of `length` rows from each of `begins` on; none goes around the ring. Leaves that are `known` are not read.

        `slots` are all their rows one by one, which is how some leaves are read. IndexError for runs out of range.
        """
        if self._paging is not None and self._paging.due():
            found: list[Tensor] = self._paging.read(slots, slots.numpy(), known)
            return found
        found, make, of_numpy = [], np.ndarray, torch.from_numpy
        for place, window in enumerate(self._of(len(begins), length)):
            if place in known:
                found.append(known[place])
            elif window is None:
                found.append(self._items[place].read(slots, slots.numpy()))
            else:
                memory, shape, dtype, halves = window
                leaf = of_numpy(make(shape, dtype, memory[begins]))
                found.append(leaf.view(torch.bfloat16) if halves else leaf)
        return found

    def one(self, place: int, begins: np.ndarray, length: int, slots: np.ndarray) -> np.ndarray:
        """The copy of one leaf, as an array."""
        window = self._of(len(begins), length)[place]
        if window is None:
            found: np.ndarray = self._items[place].take(slots, 0, None, "clip")
            return found
        memory, shape, dtype, _ = window
        return np.ndarray(shape, dtype, memory[begins])

    def _of(self, count: int, length: int) -> list[Any]:
        """The window of each leaf, and shape and dtype of `count` runs; None where it has none, or torch is faster."""
        windows = self._windows.get((count, length))
        if windows is None:
            windows = [None if self._lanes else _window(each, count, length) for each in self._items]
            while len(self._windows) >= _KEPT:
                self._windows.pop(next(iter(self._windows)), None)
            self._windows[count, length] = windows
        return windows


def _window(items: LeafRows, count: int, length: int) -> tuple[np.ndarray, tuple[int, ...], Any, bool] | None:
    held, size = items.array, items.size
    whole = count * length * size
    if held is None or not held.flags.c_contiguous or not 0 < whole < LARGE or length > len(held):
        return None
    kind = np.dtype((np.void, length * size))
    memory: np.ndarray = np.ndarray((len(held) - length + 1,), kind, held, strides=(size,))
    return memory, (count * length, *held.shape[1:]), held.dtype, items.is_bfloat16
