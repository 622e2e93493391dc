"""One leaf of rows on the host or on a device of torch, read by flat slots."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.data import bridge

# Bytes from which torch's threads are worth more than NumPy's lower overhead, also where other work keeps a core busy:
# GNU's OpenMP then waits some milliseconds for it, each time.
LARGE = 1 << 21


class LeafRows:
    """One leaf [rows, *lanes, ...] by flat slot.

    Attributes:
        array: the items as NumPy views them, [items, ...]; None where it cannot.
        take: the gather of `array`.
        size: bytes of an item.
        is_bfloat16: whether `array` has unsigned integers in the place of bfloat16.
    """

    def __init__(self, tensor: Tensor, lanes: tuple[int, ...]) -> None:
        self._shape = tuple(tensor.shape[: 1 + len(lanes)])
        self._tensor = tensor
        self._is_flat = True
        if lanes:
            try:
                self._tensor = tensor.view(math.prod(self._shape), *tensor.shape[1 + len(lanes) :])
            except RuntimeError:  # memory given by the user, strided so that its dims do not merge
                self._is_flat = False
        cheap = self._is_flat and tensor.device.type == "cpu"
        self.array = bridge.numpy_view(self._tensor) if cheap else None
        self.take: Any = None if self.array is None else self.array.take
        self.size = math.prod(tensor.shape[1 + len(lanes) :]) * tensor.element_size()
        self.is_bfloat16, self._words = tensor.dtype == torch.bfloat16, tensor.dtype == torch.uint16
        if self._is_flat:
            self._tensor = selectable(self._tensor)

    def read(self, slots: Tensor, at: np.ndarray | None) -> Tensor:
        """A copy of the items at slots on the device of the leaf; `at` is the same for NumPy, on the CPU."""
        if self.take is not None and at is not None and at.size * self.size < LARGE:
            found = torch.from_numpy(self.take(at, 0, None, "clip"))  # other modes copy twice
            return found.view(torch.bfloat16) if self.is_bfloat16 else found
        if self._is_flat:
            found = self._tensor.index_select(0, slots)
            return found.view(torch.uint16) if self._words else found
        return self._tensor[torch.unravel_index(slots, self._shape)]


def selectable(tensor: Tensor) -> Tensor:
    """The tensor with a dtype that `index_select` supports; the bits are the same."""
    return tensor.view(torch.int16) if tensor.dtype == torch.uint16 else tensor
