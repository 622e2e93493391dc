"""New keys in a later batch: stored rows get the values of `fill`, or values for all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interop.data.layout import Layout, LeafSpec
from interop.host.threads import uninterrupted
from interop.storages import planning

if TYPE_CHECKING:
    from interop.storages.tensors import TensorStorage


def wider(storage: "TensorStorage", layout: Layout, data: Any, dims: int) -> Layout:
    """The layout with the further keys of data."""
    wider = layout.wider(data, dims)
    return wider.keeping(storage.values_for(wider))


def widen(storage: "TensorStorage", layout: Layout, leaves: Sequence[Tensor] | None) -> None:
    """Add the further leaves of a layout. Stored rows get the given leaves, or those of `fill`; other leaves do not change.

    RuntimeError if other processes have the rows, or a LazyFrameStorage holds them.
    """
    held, rows, guard = storage.layout, storage.own_rows(), storage.journal
    assert held is not None
    storage.refuse_edit(())
    size = sum(share.bytes or 0 for share in planning.arrays("", layout.leaves, (storage.per_row,), ""))
    small = (
        guard.memory is not None and guard.size(size, len(layout.leaves), storage.per_row, 1) > guard.memory.bytes.size
    )
    others = storage.is_elsewhere
    if storage.of_frames or small or (others and rows.shared) or storage.lock.forked:
        raise RuntimeError(
            f"no keys can be added to this {type(storage).__name__}: its rows are shared with other processes, hold frames, "
            "or would not fit into its journal of writes. Put all keys into the first batch; nothing was written"
        )
    added = [place for place, spec in enumerate(layout.leaves) if spec not in held.leaves]
    new = {layout.leaves[at]: leaves[at] if leaves else _filling(storage, layout.leaves[at]) for at in added}
    places = {spec: place for place, spec in enumerate((*held.leaves, *new))}
    with uninterrupted(), torch.inference_mode(False), torch.device("cpu"):
        storage.rows = rows.beside(storage.further_rows(layout, new), [places[spec] for spec in layout.leaves])
        storage.layout = layout
        if guard.is_wanted:
            storage.guard()
        storage.ring.edited(slice(None))
        for buffer in storage.buffers():
            buffer.drop_prefetched()  # batches that lack the keys


def _filling(storage: "TensorStorage", spec: LeafSpec) -> Tensor:
    """The values of stored rows under a new key."""
    value, lead = (storage.fill or {})[spec.path], (storage.filled_rows, *storage.lanes)
    if not torch.can_cast(value.dtype, spec.dtype):
        raise RuntimeError(f"{spec.name}: items are {spec.dtype}, fill has {value.dtype}; nothing was written")
    return value.to(spec.dtype).expand(spec.shape).expand(*lead, *spec.shape)
