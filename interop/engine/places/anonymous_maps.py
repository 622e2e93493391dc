"""Rows in anonymous memory maps, which vanish with the last process that has them."""

from collections.abc import Sequence

import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.layout import Layout, LeafSpec
from interop.engine import plans
from interop.engine.places.place import Place
from interop.engine.places.shared import shared_by_processes
from interop.host.maps import anonymous, copied
from interop.host.rows import TorchRows
from interop.host.stored_rows import Rows


class AnonymousMaps(Place):
    """Memory maps without a file. They take space as rows are written, and may be larger than what is free.

    Args:
        shares: whether processes that share the table may find memory that one of them allocates.
    """

    mapped = True

    def __init__(self, *, shares: bool = True) -> None:
        super().__init__()
        self._shares = shares

    def zeros(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        shapes = [(*lead, *spec.shape) for spec in leaves]
        return TorchRows(anonymous(shapes, [spec.dtype for spec in leaves]), lead[1:])

    def allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        return self.zeros(layout.leaves, lead)

    def plan(
        self, layout: Layout, lead: tuple[int, ...], device: torch.device, is_allocated: bool = False
    ) -> list[Share]:
        size = sum(share.bytes or 0 for share in plans.arrays("", layout.leaves, lead, ""))
        return plans.arrays("items", layout.leaves, lead, plans.shared_memory(size))

    def holding(self, layout: Layout, tensors: Sequence[Tensor], lead: tuple[int, ...]) -> Rows:
        return TorchRows(in_maps(tensors), lead[1:])

    def shared(self, owner: object) -> Place:
        return shared_by_processes(self, owner) if self._shares else self


def in_maps(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, in memory maps if they are not."""
    return tensors if any(isinstance(tensor, MemoryMappedTensor) for tensor in tensors) else copied(tensors)
