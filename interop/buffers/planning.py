"""What memory a whole buffer takes."""

from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.pytrees import each_leaf, length_of, swapped
from interop.specs.spec import TensorSpec
from interop.storages import planning as of_storages


def shares(buffer: Any, data: Any) -> list[Share]:
    """Those of the storage, sampler and writer of a buffer, in its turn; `data` as `extend` takes it, a spec, or None."""
    storage, writer = buffer._storage, buffer._writer
    if isinstance(data, TensorSpec):
        data = swapped(of_storages.row_of(data, storage.ndim), buffer.dim_extend)
    stored = None if data is None else _to_be_stored(buffer, data)
    found = list(storage.memory_shares(stored))
    capacity = _capacity(storage, stored)
    found += buffer._sampler.memory_shares(storage, capacity)
    if writer.tracks_generations and storage.max_size < 2**31:
        found.append(Share("writer", "generations", "cpu", 8 * storage.row_capacity(stored)))
    return found


def _capacity(storage: Any, stored: Any) -> int:
    """Items, whole rows of them."""
    lanes = storage.max_size
    if stored is not None and storage.ndim > 1 and not getattr(storage, "initialized", True):
        per_row = torch.Size(storage.lanes_of(stored, batch=True)).numel()
        lanes = storage.row_capacity(stored) * per_row
    return int(lanes)


def _to_be_stored(buffer: Any, data: Any) -> Any:
    """What would be written of one row of data, which is all that it takes to know the others."""
    chain = buffer._transform
    before = chain.snapshot() if chain.keeps else None
    try:
        stored = buffer._to_store(data)
    finally:
        if before is not None:
            chain.restore(before)
    if buffer._is_nothing(stored):
        raise RuntimeError("a transform wants nothing of this data stored: give plan() more rows")
    stored = swapped(stored, buffer.dim_extend)
    stored = stored[:1] if isinstance(stored, list) else each_leaf(stored, _first_row)
    return buffer._writer.stamped(stored, torch.arange(1, device="cpu")) if length_of(stored) else stored


def _first_row(leaf: Any) -> Any:
    return leaf[:1] if isinstance(leaf, Tensor) or is_tensor_collection(leaf) else leaf
