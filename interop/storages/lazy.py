"""Tensors, tensordicts and pytrees in memory that is allocated at the first write."""

import mmap
from typing import Any

import torch
from torch import Tensor

from interop.codec import Layout
from interop.storages.rows import JaxRows, Rows, TorchRows, rows_in_jax
from interop.storages.tensors import TensorStorage


class LazyTensorStorage(TensorStorage):
    """Memory for `max_size` items like the first one that is written, zero until written.

    Args:
        max_size: capacity in items. With `ndim` > 1 it is rounded up to whole rows at the first write.
        device: where the memory is; "auto" for the device of the first data.
        ndim: how many leading dims of the stored layout count as items.
        compilable: keep the length local to this process.
        consolidated: store all tensors of a tensordict in one piece of memory, where that belongs to torch.
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
    ) -> None:
        super().__init__(None, max_size, device=device, ndim=ndim, compilable=compilable)
        self._consolidated = consolidated

    def _allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        if self._consolidated and not layout.is_tensordict:
            raise ValueError("consolidated=True needs items that are tensordicts")
        device, lanes = torch.device(self.device), lead[1:]
        shapes = [(*lead, *spec.shape) for spec in layout.leaves]
        dtypes = [spec.dtype for spec in layout.leaves]
        if rows_in_jax(device):
            return JaxRows.zeros(shapes, dtypes, lanes, device)
        if device.type == "cpu":
            tensors = [_zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        else:
            tensors = [
                torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
        if self._consolidated:
            built: Any = layout.build(tensors, lead).consolidate()
            return TorchRows(layout.flatten(built, len(lead)), lanes)
        return TorchRows(tensors, lanes, forked=device.type == "cpu")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only once they are written, aligned for XLA, and that forked processes share."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).reshape(shape)
