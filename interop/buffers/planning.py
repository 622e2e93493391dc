"""What memory a whole buffer takes."""

from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.pytrees import each_leaf, length_of, swapped
from interop.samplers import Sampler
from interop.specs.spec import TensorSpec
from interop.storages import Storage, TensorStorage
from interop.storages import planning as of_storages
from interop.writers import Writer


def shares(storage: Storage, sampler: Sampler, writer: Writer, stored: Any) -> list[Share]:
    """The shares of a storage, a sampler and a writer. `stored` is a first row as `first_row` returns it, or None."""
    if stored is not None and length_of(stored):
        stored = writer.stamped(stored, torch.arange(1, device="cpu"))
    found = list(storage.memory_shares(stored))
    capacity = storage.max_size
    if stored is not None and isinstance(storage, TensorStorage) and storage.ndim > 1 and not storage.initialized:
        capacity = storage.item_capacity(stored)
    found += sampler.memory_shares(storage, capacity)
    if writer.tracks_generations and storage.max_size < 2**31:
        found.append(Share("writer", "generations", "cpu", 8 * storage.row_capacity(stored)))
    return found


def example(data: Any, ndim: int, dim_extend: int) -> Any:
    """The data, or what a `TensorSpec` in its place says of a row, as `extend` takes it."""
    return swapped(of_storages.row_of(data, ndim), dim_extend) if isinstance(data, TensorSpec) else data


def first_row(stored: Any) -> Any:
    """The first row of data, rows first."""
    return stored[:1] if isinstance(stored, list) else each_leaf(stored, _first)


def _first(leaf: Any) -> Any:
    return leaf[:1] if isinstance(leaf, Tensor) or is_tensor_collection(leaf) else leaf
