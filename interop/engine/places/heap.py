"""Rows in memory of this process, or of a device."""

import dataclasses
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.layout import Layout, LeafSpec
from interop.engine.places.place import Place
from interop.engine.places.shared import shared_by_processes
from interop.host.device_rows import JaxRows, rows_in_jax
from interop.host.rows import TorchRows
from interop.host.stored_rows import Rows


class Given(Place):
    """Memory of the user, which is not allocated here.

    Args:
        device: where the memory is.
        reserves: whether the user gave room for items of any layout, which the first write allocates.
    """

    def __init__(self, device: torch.device | str, reserves: bool = False) -> None:
        super().__init__(device)
        self._reserves = reserves

    def allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        if not self._reserves:
            raise RuntimeError(
                "this TensorStorage was built without memory: use LazyTensorStorage to have it allocated"
            )
        return super().allocate(layout, lead)

    def zeros(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        return torch_zeros(leaves, lead, self.known_device())

    def can_renew(self, is_shared: bool) -> bool:
        return self._reserves and not is_shared

    def holding(self, layout: Layout, tensors: Sequence[Tensor], lead: tuple[int, ...]) -> Rows:
        return TorchRows(tensors, lead[1:])


class Heap(Place):
    """Memory of this process on the CPU, which is taken as rows are written, or of a device.

    Rows on a GPU that torch and JAX both see belong to JAX.

    Args:
        device: where the memory is; "auto" for the device of the first data.
        shares: whether processes that share the table may find memory that one of them allocates.
        cleanup: whether the process that built the table removes the files of such memory.
    """

    def __init__(self, device: torch.device | str, *, shares: bool = True, cleanup: bool = True) -> None:
        super().__init__(device)
        self._shares = shares
        self._cleanup = cleanup

    def zeros(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        device = self.known_device()
        shapes = [(*lead, *spec.shape) for spec in leaves]
        dtypes = [spec.dtype for spec in leaves]
        if rows_in_jax(device):
            return JaxRows.zeros(shapes, dtypes, lead[1:], device)
        if device.type != "cpu":
            return torch_zeros(leaves, lead, device)
        return TorchRows(list(map(untouched_zeros, shapes, dtypes)), lead[1:])

    def holding(self, layout: Layout, tensors: Sequence[Tensor], lead: tuple[int, ...]) -> Rows:
        if rows_in_jax(tensors[0].device):
            return JaxRows.holding(tensors, lead[1:])
        return TorchRows(tensors, lead[1:])

    def shared(self, owner: object) -> Place:
        if not self._shares or self.device == "auto" or self.known_device().type != "cpu":
            return self
        return shared_by_processes(self, owner, self._cleanup)


class Consolidated(Heap):
    """Like `Heap`, with all tensors of a tensordict in one piece of memory, where that belongs to torch."""

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device, shares=False)

    def allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        if layout.varied or not layout.is_tensordict:
            raise ValueError(
                "consolidated=True needs items that are tensordicts of tensors, without text or ragged rows"
            )
        rows = super().allocate(layout, lead)
        if not isinstance(rows, TorchRows):
            return rows
        consolidated: object = layout.build(rows.tensors, lead).consolidate()
        return TorchRows(layout.flatten(consolidated, len(lead)), lead[1:])

    def plan(
        self, layout: Layout, lead: tuple[int, ...], device: torch.device, is_allocated: bool = False
    ) -> list[Share]:
        shares = super().plan(layout, lead, device, is_allocated)
        if not is_allocated:  # they are allocated one by one, and then copied together
            shares += [dataclasses.replace(share, part="copy", counts="in a call") for share in shares]
        return shares


def torch_zeros(leaves: Sequence[LeafSpec], lead: tuple[int, ...], device: torch.device) -> Rows:
    """Rows of zeros in memory of torch."""
    zeros = [torch.zeros((*lead, *spec.shape), dtype=spec.dtype, device=device) for spec in leaves]
    return TorchRows(zeros, lead[1:])


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only once they are written, aligned for XLA."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE), dtype=dtype, count=count).reshape(
        shape
    )
