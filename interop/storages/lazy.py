"""Tensors, tensordicts and pytrees in memory that is allocated at the first write."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from interop.data.arguments import whole
from interop.data.keys import as_path
from interop.data.layout import KeyPath
from interop.engine.places.heap import Consolidated, Heap
from interop.engine.places.place import Place
from interop.engine.places.shared import Shared, shared_by_processes
from interop.storages.tensors import TensorStorage


class LazyTensorStorage(TensorStorage):
    """Memory for `max_size` items like the first one that is written, zero until written.

    The first write is a NotEnoughMemoryError where all rows need more than is free, though memory is taken as rows are
    written. `plan` computes it before.

    Text, bytes, and None, numbers, lists and dicts in `NonTensorData` or `NonTensorStack` are stored beside the tensors
    as bytes, without pickle. Overwritten rows give their bytes back. They cannot be edited in place.

    Args:
        max_size: capacity in items. With `ndim` > 1 it is rounded up to whole rows at the first write.
        device: where the memory is; "auto" for the device of the first data.
        ndim: how many leading dims of the stored layout count as items.
        compilable: keep the length local to this process.
        consolidated: store all tensors of a tensordict in one piece of memory, where that belongs to torch.
        shared_init: the storage can be given to processes before the first write. The first process that writes
            allocates memory-mapped files in a temporary folder; the others map them at their next use.
        cleanup_memmap: remove that folder with the storage, in the process that built it; processes that have the files
            open keep them.
        ragged: keys of entries whose rows may have any length along their first dim. They are stored one behind the
            other and read as jagged nested tensors. Nested tensors need not be named here.
        shared_prefixes: keys of ragged entries whose rows are stored once as far as they begin alike, such as completions
            of a prompt, or the branches of a tree of turns. A row is compared with the last 64 that this process has written
            with the same first 256 bytes. Draws, edits and checkpoints are as without; checkpoints have whole rows.
        fill: by key, the values of stored rows for keys that come with a later batch; expanded to the shape of an item.
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
        fill: Mapping[Any, Any] | None = None,
        ragged: Collection[Any] = (),
        shared_prefixes: Collection[Any] = (),
    ) -> None:
        if shared_init:
            refuse_shared_init(compilable, consolidated)
            if device != "auto" and torch.device(device).type != "cpu":
                warnings.warn(f"shared_init=True maps files on the CPU, not on {device}", UserWarning, stacklevel=2)
            device = "cpu"
        place: Place = Heap(device, shares=not compilable, cleanup=cleanup_memmap)
        if consolidated:
            place = Consolidated(device)
        if shared_init:
            place = shared_by_processes(place, self, cleanup_memmap, asked=True)
        paths = [as_path(key) for key in ragged], [as_path(key) for key in shared_prefixes]
        self._begin(place, max_size, whole("ndim", ndim), compilable, by_path(fill), *paths)

    @property
    def shared_init(self) -> bool:
        """Whether the storage can be given to processes before the first write, as the user asked for."""
        return isinstance(self.table.place, Shared) and self.table.place.asked


def by_path(fill: Mapping[Any, Any] | None) -> dict[KeyPath, Tensor]:
    """The values of `fill` by path."""
    return {} if fill is None else {as_path(key): torch.as_tensor(value) for key, value in fill.items()}


def refuse_shared_init(compilable: bool, consolidated: bool) -> None:
    """RuntimeError or ValueError for arguments that do not go with shared_init=True."""
    if compilable:
        raise RuntimeError("shared_init needs a length that processes share: build it with compilable=False")
    if consolidated:
        raise ValueError("shared_init and consolidated exclude each other: there is a file for each tensor")
