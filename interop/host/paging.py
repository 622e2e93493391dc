"""Rows in files: the disk is asked for the pages of all rows of a batch together, and for no others.

Left alone, a row that is not in memory is read when it is touched: one after the other, each with megabytes that lie
around it. While reads find that the disk was needed, the kernel is told of a batch before it is gathered, piece by
piece, so that a batch larger than memory passes through it. The rows are then gathered through a second map of the same
pages, for which the kernel reads nothing ahead. The first one, of which the user holds views, is left as it is: who goes
through a view from its start to its end is served well by reading ahead.

On Linux. Elsewhere, and where the kernel refuses, rows are read like any memory.
"""

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

_PIECE = 16 << 20  # bytes of rows that are asked for at once; two pieces are under way at a time
_PATIENCE = 8  # reads without the disk after which rows are taken to be in memory
_LOOKS = 8  # of so many reads from memory one is looked at
_RANGES = 1024  # the most that one call may name
_REMAP_MAY_MOVE, _RANDOM, _WILL_NEED = 1, 1, 3
_NO_MAP = ctypes.c_void_p(-1).value


class Leaf(Protocol):
    """One leaf by flat slot."""

    def read(self, slots: Tensor, at: np.ndarray | None) -> Tensor:
        """A copy of the items."""


class Paging:
    """Reads of leaves, some of which are in files."""

    def __init__(self, leaves: Sequence[Leaf], files: Mapping[int, Tensor]) -> None:
        """`files` are the leaves in files by place, [slots, ...], contiguous."""
        self._leaves = leaves
        self._files = files
        self._maps: Mapping[int, Tensor] | None = None
        self._without_disk = 0
        self._turn = 0
        self.cold = True
        """Whether the last reads needed the disk; so it is taken to be until some have not."""

    @classmethod
    def of(
        cls, leaves: Sequence[Leaf], tensors: Sequence[Tensor], lanes: tuple[int, ...], mapped: bool = False
    ) -> "Paging | None":
        """For leaves in tensors [rows, *lanes, ...]; None where none is a file, or there is no way to ask.

        A `MemoryMappedTensor` tells whether it is; others are taken to be where they are said to be `mapped`.
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
        """Whether the next read is to go through here: each while the disk is needed, else one in some."""
        self._turn += 1
        return self.cold or not self._turn % _LOOKS

    def read(self, slots: Tensor, at: np.ndarray, known: Mapping[int, Tensor]) -> list[Tensor]:
        """Copies of the items at slots, `at` for NumPy; leaves that are `known` are not read."""
        before = _disk_reads()
        if not self.cold or not at.size:
            found = [
                known[place] if place in known else leaf.read(slots, at) for place, leaf in enumerate(self._leaves)
            ]
        else:
            made = {place: _room(file, at.size) for place, file in self._files.items() if place not in known}
            self._gather(slots, at, made)
            found = [
                known[place] if place in known else made[place] if place in made else leaf.read(slots, at)
                for place, leaf in enumerate(self._leaves)
            ]
        self._note(_disk_reads() != before)
        return found

    def _note(self, disk: bool) -> None:
        """Go by what the last read was."""
        if disk:
            self.cold, self._without_disk = True, 0
        elif self.cold:
            self._without_disk += 1
            if self._without_disk >= _PATIENCE:
                self.cold, self._maps = False, None

    def _gather(self, slots: Tensor, at: np.ndarray, into: Mapping[int, Tensor]) -> None:
        """Copy the items of some files, which the disk is asked for ahead."""
        if not into:
            return
        maps = self._maps
        if maps is None:
            maps = self._maps = {place: selectable(_second_map(file)) for place, file in self._files.items()}
        sources = [maps[place] for place in into]
        # Short of memory the kernel passes over some pages. Where it reads megabytes for each, it is asked again.
        asks = 1 + any(maps[place].data_ptr() == self._files[place].data_ptr() for place in into)
        each = sum(max(mmap.PAGESIZE, math.prod(source.shape[1:]) * source.element_size()) for source in sources)
        count, step = at.size, max(1, _PIECE // each)
        _ask_for(sources, at[:step], asks)
        for start in range(0, count, step):
            stop = start + step
            if stop < count:
                _ask_for(sources, at[stop : stop + step], asks)
            for source, target in zip(sources, into.values(), strict=True):
                torch.index_select(source, 0, slots[start:stop], out=selectable(target[start:stop]))


def selectable(tensor: Tensor) -> Tensor:
    """The same bits as something that `index_select` takes."""
    return tensor.view(torch.int16) if tensor.dtype == torch.uint16 else tensor


def _of_a_file(tensor: Tensor, mapped: bool) -> bool:
    if isinstance(tensor, MemoryMappedTensor):
        return getattr(tensor, "_filename", None) is not None
    return mapped


def _room(file: Tensor, count: int) -> Tensor:
    return torch.empty((count, *file.shape[1:]), dtype=file.dtype, device="cpu")


def _ask_for(sources: Sequence[Tensor], at: np.ndarray, times: int) -> None:
    """Have the disk begin to read the items at slots."""
    slots = np.unique(at)
    ranges = np.concatenate([_pages(source, slots) for source in sources]) * np.uintp(mmap.PAGESIZE)
    for _ in range(times):
        request(ranges)


def _pages(source: Tensor, slots: np.ndarray) -> np.ndarray:
    """Where items at rising slots are: first page and number of pages, [ranges, 2]; what touches is one range."""
    size = math.prod(source.shape[1:]) * source.element_size()
    starts = source.data_ptr() + slots * size
    first, behind = starts // mmap.PAGESIZE, (starts + size - 1) // mmap.PAGESIZE + 1
    gaps = np.flatnonzero(first[1:] > behind[:-1])
    first = first[np.concatenate([[0], gaps + 1])]
    behind = behind[np.concatenate([gaps, [slots.size - 1]])]
    return np.stack([first, behind - first], axis=1).astype(np.uintp)


def request(ranges: np.ndarray) -> None:
    """Have the disk begin to read ranges of memory: address and length of each, [ranges, 2]. Does not wait for it."""
    if not _request_together(ranges):
        for start, length in ranges.tolist():
            _advise(start, length, _WILL_NEED)


if sys.platform == "linux":
    import resource

    def _disk_reads() -> int:
        """A number that moves when this thread waits for pages of a file, or asks the disk for some."""
        used = resource.getrusage(resource.RUSAGE_THREAD)
        return used.ru_majflt + used.ru_inblock

    _libc = ctypes.CDLL(None)
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _advise = _libc.madvise

    _together: Any = getattr(_libc, "process_madvise", None)  # Linux 5.10; some containers refuse it
    if _together is not None:
        _together.restype = ctypes.c_ssize_t
        _together.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint)

    def _request_together(ranges: np.ndarray) -> bool:
        """Whether many ranges could be asked for in one call."""
        global _together
        if _together is None:
            return False
        try:
            process = os.pidfd_open(os.getpid())
        except OSError:
            return False
        try:
            for start in range(0, len(ranges), _RANGES):
                some = ranges[start : start + _RANGES]
                if _together(process, some.ctypes.data, len(some), _WILL_NEED, 0) < 0:
                    _together = None
                    return False
        finally:
            os.close(process)
        return True

    def _second_map(file: Tensor) -> Tensor:
        """The same pages at another address, of which nothing is read ahead; the first where they cannot be had twice."""
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
