"""Memory maps of tensors, in files and without."""

import math
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

from interop.data.layout import LeafSpec

_SINGLE = "_-single-tensor-_"
_ALIGNED = 64  # bytes
_FIRST, _MOST = 1 << 20, 1 << 26  # bytes of space that are taken ahead of what is needed
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # the mmap module names it from Python 3.13 on


class _Part:
    """Bytes of one anonymous map, for a leaf: a map of its own would take two descriptors for each."""

    def __init__(self, whole: Any, start: int, stop: int) -> None:
        self._whole, self._start, self._stop = whole, start, stop

    @property
    def place(self) -> tuple[int, int] | None:
        """The descriptor of the file that has the bytes, and where in it they start; None where there is no such file."""
        handle = getattr(self._whole, "fd", -1)
        return (handle, self._start) if handle >= 0 else None

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._whole.buffer)[self._start : self._stop]


def handler(tensor: Tensor) -> Any:
    """What has the memory of a `MemoryMappedTensor`, for which tensordict has no public name; None for other tensors."""
    return getattr(tensor, "_handler", None)


def anonymous(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Memory maps of zeros without a file, together in one."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
    whole = handler(MemoryMappedTensor.empty(torch.Size([max(1, starts[-1])]), dtype=torch.uint8))
    return [
        MemoryMappedTensor.from_handler(_Part(whole, start, start + size), dtype, shape)
        if size
        else torch.empty(shape, dtype=dtype, device="cpu")
        for shape, dtype, start, size in zip(shapes, dtypes, starts, sizes, strict=False)
    ]


def descriptor(tensor: MemoryMappedTensor) -> int:
    """That of the file without a name in which an anonymous map is; -1 where there is none."""
    return int(getattr(handler(tensor), "fd", -1))


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in such maps. OSError where there is no space for them."""
    maps = anonymous([tuple(tensor.shape) for tensor in tensors], [tensor.dtype for tensor in tensors])
    space = Space.of(maps)
    if space is not None:
        space.take(space.capacity)
    for kept, tensor in zip(maps, tensors, strict=True):
        kept.copy_(tensor)
    return maps


class Space:
    """How many of the first rows of anonymous maps have memory. To write one that has none, or only to read it, kills the
    process where there is no more, so they are given it before, some more at a time: maps may be larger than what is used.
    """

    def __init__(self, files: Sequence[tuple[int, int, int]], capacity: int) -> None:
        """`files`: for each leaf a descriptor, where its rows start, and the bytes of one."""
        self._files, self.capacity = files, capacity
        self._row = sum(size for _, _, size in files)
        self.rows = 0  # other processes may have taken more

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Space | None":
        """That of leaves [rows, ...] which `anonymous` made; None for others."""
        files = []
        for tensor in tensors:
            part = handler(tensor)
            if isinstance(part, _Part) and part.place is not None and hasattr(os, "posix_fallocate"):
                files.append((*part.place, tensor.nbytes // tensor.shape[0]))
        return cls(files, tensors[0].shape[0]) if files else None

    def take(self, rows: int) -> None:
        """Have it for so many rows. OSError where there is no more: then what is stored is as it was."""
        if rows <= self.rows:
            return
        ahead = min(max(self.rows * self._row, _FIRST), _MOST) // self._row
        more = min(max(rows, self.rows + ahead), self.capacity)
        free = os.fstatvfs(self._files[0][0])
        if more > rows and (more - self.rows) * self._row > free.f_bavail * free.f_frsize // 2:
            more = rows  # others need some of it
        try:
            for handle, start, size in self._files:
                reserve(handle, start + self.rows * size, (more - self.rows) * size)
        except OSError as error:
            if not error.errno:
                raise
            need = (rows - self.rows) * self._row
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: {need} more bytes are needed in /dev/shm, or the folder of temporary files "
                "where that is too small, for rows in anonymous maps; nothing was written. Make room there, or build the "
                "storage with a scratch_dir",
            ) from error
        self.rows = more


def reserve(handle: int, start: int, size: int) -> None:
    """Have a file, which others may be using, take the space of these bytes now. OSError where there is none."""
    for begin in range(start, start + size, _MOST):  # in parts: a signal makes it begin again
        os.posix_fallocate(handle, begin, min(_MOST, start + size - begin))


def from_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype, *, private: bool = False) -> Tensor:
    """A tensor in a file; what is written to a private one stays in this process."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if private:
        with open(path, "rb") as file:  # without a reservation: a file may be larger than the memory of the machine
            flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            held = mmap.mmap(file.fileno(), math.prod(shape) * dtype.itemsize, flags=flags, prot=access)
        return torch.frombuffer(held, dtype=dtype).reshape(shape)
    return MemoryMappedTensor.from_filename(path, dtype=dtype, shape=torch.Size(shape))


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return max(1, math.prod(shape) * dtype.itemsize)


def file_names(leaves: Sequence[LeafSpec]) -> list[str]:
    """The files of leaves, in a folder of theirs. ValueError where two would have one."""
    names = [_file_name(spec) for spec in leaves]
    for place, name in enumerate(names):
        if name in names[:place] or any(name.startswith(other + "/") for other in names):
            raise ValueError(f"two keys would share the file {name}: rename one (a number and its text are alike)")
    return names


def _file_name(spec: LeafSpec) -> str:
    if not spec.path:
        return os.environ.get("SINGLE_TENSOR_BUFFER_NAME", _SINGLE) + ".memmap"
    parts = [str(part) for part in spec.path]
    if any(part in ("", ".", "..") or "/" in part or "\0" in part for part in parts):
        raise ValueError(f"the key {spec.path} cannot name a file: keys must not be empty or contain '/'")
    if any(type(part) not in (str, int) for part in spec.path):
        raise ValueError(f"the key {spec.path} cannot name a file: keys must be texts or integers")
    return "/".join(parts) + ".memmap"
