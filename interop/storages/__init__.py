"""Where items live."""

from interop.storages.lazy import LazyTensorStorage
from interop.storages.lists import ListStorage
from interop.storages.memmap import LazyMemmapStorage
from interop.storages.storage import Storage
from interop.storages.tensors import TensorStorage

__all__ = ["LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "Storage", "TensorStorage"]
