"""What users index with."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_int(index: Any) -> int | None:
    """A Python int for ints, NumPy ints and 0-d integer tensors; None for any other index."""
    if isinstance(index, int | np.integer) and not isinstance(index, bool | np.bool_):
        return int(index)
    if isinstance(index, Tensor | np.ndarray) and index.ndim == 0 and _integral(index):
        return int(index.item())
    return None


def as_list(index: Any, length: int) -> list[int]:
    """Places named by a slice, range, list, array, mask or tensor over `length` items. TypeError for floats."""
    if isinstance(index, slice):
        return list(range(*index.indices(length)))
    if isinstance(index, range):
        return list(index)
    tensor = as_tensor(index)
    if tensor.dtype == torch.bool:
        if tensor.shape[0] != length:
            raise IndexError(f"the mask has {tensor.shape[0]} entries, there are {length} items")
        tensor = tensor.nonzero().reshape(-1)
    return tensor.reshape(-1).tolist()


def as_tensor(index: Any) -> Tensor:
    """An int64 or bool tensor for a list, range, array or tensor. TypeError for anything else, floats included."""
    if isinstance(index, range):
        return torch.arange(index.start, index.stop, index.step)
    if isinstance(index, Tensor | np.ndarray | list):
        tensor = torch.as_tensor(index)
        if tensor.numel() == 0 and not isinstance(index, Tensor):
            return tensor.to(torch.int64)
        if tensor.dtype == torch.bool:
            return tensor
        if _integral(tensor):
            return tensor.to(torch.int64)
        raise TypeError(f"an index must be of integers or bools, got {tensor.dtype}")
    raise TypeError(f"cannot index with {type(index).__name__}")


def _integral(index: Any) -> bool:
    if isinstance(index, np.ndarray):
        return bool(np.issubdtype(index.dtype, np.integer))
    return not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
