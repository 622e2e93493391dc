"""Reads of rows in files that are larger than memory: the pages of a batch are requested together, and no others.

By default the kernel reads a missing row when it is touched: one row after the other, each with megabytes around it. While
reads wait for the disk, the pages of a batch are requested before the rows are gathered, piece by piece, so a batch may be
larger than memory. The gather uses a second map of the same pages without readahead. The first map keeps its readahead,
which suits sequential reads through the user's views.

Linux only. Elsewhere rows are read like any memory.
"""

import ctypes
import math
import mmap
import sys
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

from interop.host.leaf_rows import LeafRows, selectable

_PIECE = 16 << 20  # bytes of rows that are requested at once; two pieces are in flight
_PATIENCE = 8  # reads without disk access after which rows count as in memory
_LOOKS = 8  # of this many reads from memory one is observed
_REMAP_MAY_MOVE, _RANDOM, _WILL_NEED = 1, 1, 3
_NO_MAP = ctypes.c_void_p(-1).value


class Paging:
    """Reads of leaves, some of which are in files."""

    def __init__(self, leaves: Sequence[LeafRows], files: Mapping[int, Tensor]) -> None:
        """`files` are the leaves in files by place, [slots, ...], contiguous."""
        self._leaves = leaves
        self._files = files
        self._maps: Mapping[int, Tensor] | None = None
        self._without_disk = 0
        self._turn = 0
        self.cold = True
        """Whether recent reads needed the disk; true at first."""

    @classmethod
    def of(
        cls, leaves: Sequence[LeafRows], tensors: Sequence[Tensor], lanes: tuple[int, ...], mapped: bool = False
    ) -> "Paging | None":
        """For leaves in tensors [rows, *lanes, ...]; None without files, or on other systems than Linux.

        A `MemoryMappedTensor` knows whether it is a file; other tensors are files if `mapped`.
        """
        if sys.platform != "linux":
            return None
        files = {
            place: tensor.detach().as_subclass(Tensor).view(-1, *tensor.shape[1 + len(lanes) :])
            for place, tensor in enumerate(tensors)
            if _of_a_file(tensor, mapped) and tensor.is_contiguous() and tensor.numel()
        }
        return cls(leaves, files) if files else None

    def due(self) -> bool:
        """Whether the next read must use this object: each read while the disk is needed, else one in `_LOOKS`."""
        self._turn += 1
        return self.cold or not self._turn % _LOOKS

    def read(self, slots: Tensor, at: np.ndarray, known: Mapping[int, Tensor]) -> list[Tensor]:
        """Copies of the items at slots, `at` for NumPy, without reading `known` leaves."""
        before, made = _disk_reads(), dict(known)
        if self.cold and at.size:
            gathered = {
                place: torch.empty((at.size, *file.shape[1:]), dtype=file.dtype, device="cpu")
                for place, file in self._files.items()
                if place not in known
            }
            self._gather(slots, at, gathered)
            made |= gathered
        found = [made[place] if place in made else leaf.read(slots, at) for place, leaf in enumerate(self._leaves)]
        if _disk_reads() != before:
            self.cold, self._without_disk = True, 0
        elif self.cold:
            self._without_disk += 1
            if self._without_disk >= _PATIENCE:
                self.cold, self._maps = False, None
        return found

    def _gather(self, slots: Tensor, at: np.ndarray, into: Mapping[int, Tensor]) -> None:
        """Copy the items of some files, requesting each piece before the previous one is copied."""
        if not into:
            return
        maps = self._maps
        if maps is None:
            maps = self._maps = {place: selectable(_second_map(file)) for place, file in self._files.items()}
        sources = [maps[place] for place in into]
        each = sum(max(mmap.PAGESIZE, math.prod(source.shape[1:]) * source.element_size()) for source in sources)
        count, step = at.size, max(1, _PIECE // each)
        _ask_for(sources, at[:step])
        for start in range(0, count, step):
            stop = start + step
            if stop < count:
                _ask_for(sources, at[stop : stop + step])
            for source, target in zip(sources, into.values(), strict=True):
                torch.index_select(source, 0, slots[start:stop], out=selectable(target[start:stop]))


def _of_a_file(tensor: Tensor, mapped: bool) -> bool:
    if isinstance(tensor, MemoryMappedTensor):
        return getattr(tensor, "_filename", None) is not None
    return mapped


def _ask_for(sources: Sequence[Tensor], at: np.ndarray) -> None:
    """Request the pages of the items at slots."""
    slots = np.unique(at)
    request(np.concatenate([_pages(source, slots) for source in sources]) * np.uintp(mmap.PAGESIZE))


def _pages(source: Tensor, slots: np.ndarray) -> np.ndarray:
    """First page and number of pages of items at increasing slots, [ranges, 2]; adjacent pages are one range."""
    size = math.prod(source.shape[1:]) * source.element_size()
    starts = source.data_ptr() + slots * size
    first, behind = starts // mmap.PAGESIZE, (starts + size - 1) // mmap.PAGESIZE + 1
    gaps = np.flatnonzero(first[1:] > behind[:-1])
    first = first[np.concatenate([[0], gaps + 1])]
    behind = behind[np.concatenate([gaps, [slots.size - 1]])]
    return np.stack([first, behind - first], axis=1).astype(np.uintp)


def request(ranges: np.ndarray) -> None:
    """Start reads of ranges of memory from disk: address and length of each, [ranges, 2]. Does not wait."""
    for start, length in ranges.tolist():
        _advise(start, length, _WILL_NEED)


if sys.platform == "linux":
    import resource

    def _disk_reads() -> int:
        """A number that grows when this thread waits for pages of a file, or requests some."""
        used = resource.getrusage(resource.RUSAGE_THREAD)
        return used.ru_majflt + used.ru_inblock

    _libc = ctypes.CDLL(None)
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _advise = _libc.madvise

    def _second_map(file: Tensor) -> Tensor:
        """The same pages at another address, without readahead; the first map if the kernel refuses a second one."""
        start = file.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        offset = file.data_ptr() - start
        length = offset + file.nbytes
        found = _libc.mremap(start, 0, length, _REMAP_MAY_MOVE)  # of no length: the old map stays
        if found in (None, _NO_MAP):
            return file
        memory = (ctypes.c_ubyte * length).from_address(found)
        weakref.finalize(memory, _libc.munmap, found, length).atexit = False
        _advise(found, length, _RANDOM)
        return torch.frombuffer(memory, dtype=file.dtype, count=file.numel(), offset=offset).view(file.shape)
