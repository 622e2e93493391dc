"""Tensors, tensordicts and pytrees in memory that is allocated at the first write."""

import dataclasses
import mmap
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.keys import as_path
from interop.data.layout import Layout, LeafSpec
from interop.host.device_rows import JaxRows, rows_in_jax
from interop.host.rows import Rows, TorchRows
from interop.shared.first_write import FirstWrite
from interop.shared.processes import starting_a_worker
from interop.storages import planning
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
        fill: by key, the values of stored rows for keys that come with a later batch; expanded to the shape of an item.
    """

    _epoch = 0  # in which the memory was allocated

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
    ) -> None:
        if shared_init:
            if compilable:
                raise RuntimeError("shared_init needs a length that processes share: build it with compilable=False")
            if consolidated:
                raise ValueError("shared_init and consolidated exclude each other: there is a file for each tensor")
            if device != "auto" and torch.device(device).type != "cpu":
                warnings.warn(f"shared_init=True maps files on the CPU, not on {device}", UserWarning, stacklevel=2)
            device = "cpu"
        super().__init__(None, max_size, device=device, ndim=ndim, compilable=compilable)
        self.fill = None if fill is None else {as_path(key): torch.as_tensor(value) for key, value in fill.items()}
        self._ragged = frozenset(map(as_path, ragged))
        self._consolidated = consolidated
        self._cleanup_memmap = cleanup_memmap
        self.shared_init = shared_init
        if shared_init:
            self._first = FirstWrite(self, cleanup_memmap)

    # ------------------------------------------------------------------ memory that several processes allocate

    def _memory(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        if self._first is None:
            return self._allocate(layout, lead)
        with self.lock.held():
            found, self._epoch = self._first.found(), self._first.epoch
            if found is None:
                rows = self._allocate(layout, lead)
                self._first.publish(layout, lead, rows.tensors)
                return rows
            if found[:2] != (layout, lead):
                raise RuntimeError("another process has meanwhile written items of another kind; nothing was written")
            return TorchRows(found[2], lead[1:])

    def _look(self) -> None:
        """Map the memory that another process allocated, and drop memory that another process gave up."""
        assert self._first is not None
        if self._epoch != (epoch := self._first.epoch):
            self._disown()
            self._epoch = epoch
        if self.rows is None and (found := self._first.found()) is not None:
            layout, lead, tensors = found
            self.adopt(layout, TorchRows(tensors, lead[1:]))

    def _values_folder(self) -> Path | None:
        return None if self._first is None else self._first.values

    @property
    def is_elsewhere(self) -> bool:
        return self._first is not None or self.lock.given

    def may_renew(self) -> bool:
        return self._first is not None or self.lock.processes is None

    def give_up_memory(self) -> None:
        if self.rows is not None:
            self.refuse_edit(())
            if self._first is not None:  # first: after a kill no process keeps the old files beside new ones
                self._first.renew()
            self._vacate()
        super().give_up_memory()

    def _vacate(self) -> None:
        """Remove files of the rows, of which none is stored."""

    def _meet(self) -> None:
        """Let processes find memory that one of them allocates anew."""
        on_host = self.device != "auto" and torch.device(self.device).type == "cpu"
        if self._first is None and on_host and not self._compilable and not self._consolidated:
            self._first = FirstWrite(self, self._cleanup_memmap)

    def start_sharing(self) -> None:
        self._meet()
        super().start_sharing()

    def _refuse_to_share(self) -> None:
        self._meet()
        super()._refuse_to_share()

    def is_shared(self) -> bool:
        return self._first is not None if self.rows is None else super().is_shared()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if starting_a_worker() or self._first is None:
            return state
        # A copy has memory of its own.
        return {**state, "_first": None, "shared_init": self.shared_init and self.rows is None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.shared_init and self._first is None:
            self._first = FirstWrite(self, self._cleanup_memmap)

    # ------------------------------------------------------------------ memory

    def _planned(self, layout: Layout, lead: tuple[int, ...], found: torch.device | None = None) -> list[Share]:
        if self._first is not None and (self.rows is None or self.shared_init):
            return planning.arrays("items", layout.leaves, lead, str(self._first.folder))
        shares = super()._planned(layout, lead, found)
        if self._consolidated and self.rows is None:  # they are allocated one by one, and then copied together
            shares += [dataclasses.replace(share, part="copy", counts="in a call") for share in shares]
        return shares

    def _allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        if self._consolidated and (layout.varied or not layout.is_tensordict):
            raise ValueError(
                "consolidated=True needs items that are tensordicts of tensors, without text or ragged rows"
            )
        if self._first is None:
            planning.refuse(self._planned(layout, lead))
        rows = self._fresh(layout.leaves, lead)
        if self._consolidated and isinstance(rows, TorchRows):
            built: Any = layout.build(rows.tensors, lead).consolidate()
            return TorchRows(layout.flatten(built, len(lead)), lead[1:])
        return rows

    def _fresh(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        device = torch.device(self.device)
        shapes, dtypes = [(*lead, *spec.shape) for spec in leaves], [spec.dtype for spec in leaves]
        if self._first is not None and self.rows is None:  # columns that come later are of those who have the others
            return TorchRows(self._first.allocate(shapes, dtypes), lead[1:])
        if rows_in_jax(device):
            return JaxRows.zeros(shapes, dtypes, lead[1:], device)
        if device.type != "cpu":
            return super()._fresh(leaves, lead)
        return TorchRows(list(map(untouched_zeros, shapes, dtypes)), lead[1:])


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only once they are written, aligned for XLA."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE), dtype=dtype, count=count).reshape(
        shape
    )
