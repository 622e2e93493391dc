"""Rows of tensors as NumPy sees their bytes: to be moved whole, at the speed of memory, or compared bit for bit."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_HUGE = 1 << 22  # bytes; for less NumPy does not ask


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory of a tensor on the CPU, which NumPy asks for in huge pages: the first touch takes a third of the time."""
    count = math.prod(shape)
    if count * dtype.itemsize < _HUGE:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.from_numpy(np.empty(count * dtype.itemsize, np.uint8)).view(dtype).view(tuple(shape))


def fresh_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory of zeros, which is touched when it is written."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(tuple(shape))


def dense(tensor: Tensor) -> Tensor:
    """The values on the CPU in the order of their dims; the same memory where they are so already."""
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


def flags(tensor: Tensor) -> Tensor:
    """Whether values are set, on the CPU: a tensor that is not to be written."""
    held = dense(tensor)
    return held if held.dtype == torch.bool else held != 0


def whole(tensor: Tensor, dims: int) -> np.ndarray:
    """Each row of a dense tensor with `dims` batch dims as one value, [rows]: the same memory. Rows need a byte or more."""
    raw = _bytes(tensor, dims)
    return raw.view(f"V{raw.shape[1]}").reshape(-1)


def words(tensor: Tensor, dims: int) -> np.ndarray:
    """The bits of a dense tensor with `dims` batch dims as integers, [rows, n]: the same memory."""
    raw = _bytes(tensor, dims)
    for width in (8, 4, 2):
        if raw.shape[1] % width == 0:
            return raw.view(f"i{width}")
    return raw


def _bytes(tensor: Tensor, dims: int) -> np.ndarray:
    count = tensor.shape[:dims].numel()
    raw: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw.reshape(count, raw.size // max(count, 1))
