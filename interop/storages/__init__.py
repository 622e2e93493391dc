"""Where items live."""

from interop.storages.compressed import CompressedListStorage
from interop.storages.ensemble import StorageEnsemble
from interop.storages.frames import LazyFrameStorage
from interop.storages.lazy import LazyTensorStorage
from interop.storages.lazy_stack import LazyStackStorage
from interop.storages.lists import ListStorage
from interop.storages.memmap import LazyMemmapStorage
from interop.storages.storage import Storage
from interop.storages.store import StoreStorage
from interop.storages.tensors import TensorStorage

__all__ = [
    "CompressedListStorage",
    "LazyFrameStorage",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Storage",
    "StorageEnsemble",
    "StoreStorage",
    "TensorStorage",
]
