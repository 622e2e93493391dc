"""Memory maps of tensors, in files and without, and memory that processes share."""

import math
import mmap
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

from interop.data.layout import LeafSpec
from interop.data.values import is_written

_SINGLE = "_-single-tensor-_"
_LONGEST_NAME = 200  # bytes; file systems take 255, with the endings of temporary files
_ALIGNED = 64  # bytes
_FIRST, _MOST = 1 << 20, 1 << 26  # bytes of space that are taken ahead of what is needed
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # the mmap module names it from Python 3.13 on


class _Part:
    """The bytes of one leaf in an anonymous map. A map for each leaf would take two descriptors each."""

    def __init__(self, whole: Any, start: int, stop: int) -> None:
        self._whole, self._start, self._stop = whole, start, stop

    @property
    def place(self) -> tuple[int, int]:
        """The descriptor of the memory file, -1 where there is none, and the offset of the bytes in it."""
        return getattr(self._whole, "fd", -1), self._start

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._whole.buffer)[self._start : self._stop]


def _handler(tensor: Tensor) -> Any:
    """The owner of the memory of a `MemoryMappedTensor`, for which tensordict has no public name; else None."""
    return getattr(tensor, "_handler", None)


def anonymous(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Memory maps of zeros without a file, all in one map."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
    whole = _handler(MemoryMappedTensor.empty(torch.Size([max(1, starts[-1])]), dtype=torch.uint8))
    return [
        MemoryMappedTensor.from_handler(_Part(whole, start, start + size), dtype, shape)
        if size
        else torch.empty(shape, dtype=dtype, device="cpu")
        for shape, dtype, start, size in zip(shapes, dtypes, starts, sizes, strict=False)
    ]


def descriptor(tensor: MemoryMappedTensor) -> int:
    """The descriptor of the memory file of an anonymous map; -1 where there is none."""
    return int(getattr(_handler(tensor), "fd", -1))


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in anonymous maps. OSError where there is no space for them."""
    maps = anonymous([tuple(tensor.shape) for tensor in tensors], [tensor.dtype for tensor in tensors])
    space = Space.of(maps)
    if space is not None:
        space.take(space.capacity)
    for kept, tensor in zip(maps, tensors, strict=True):
        kept.copy_(tensor)
    return maps


class Space:
    """How many of the first rows of anonymous maps have memory.

    Access to a row without memory kills the process when the system has no more. So memory is reserved before a write,
    some ahead at a time: maps may be larger than what is used.
    """

    def __init__(self, files: Sequence[tuple[int, int, int]], capacity: int) -> None:
        """`files`: for each leaf the descriptor, the offset of its rows, and the bytes of a row."""
        self._files, self.capacity = files, capacity
        self._row = sum(size for _, _, size in files)
        self.rows = 0  # other processes may have reserved more

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Space | None":
        """The space of leaves [rows, ...] that `anonymous` made; None for others."""
        files = []
        for tensor in tensors:
            part = _handler(tensor)
            if isinstance(part, _Part) and part.place[0] >= 0 and hasattr(os, "posix_fallocate"):
                files.append((*part.place, tensor.nbytes // tensor.shape[0]))
        return cls(files, tensors[0].shape[0]) if files else None

    def take(self, rows: int) -> None:
        """Reserve memory for the first rows. OSError where there is not enough; stored rows do not change then."""
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
            need = (rows - self.rows) * self._row
            raise OSError(
                error.errno,
                f"{error.strerror}: {need} more bytes are needed in /dev/shm, or the folder of temporary files where that "
                "is too small, for rows in anonymous maps; nothing was written. Make room there, or build the storage with "
                "a scratch_dir",
            ) from error
        self.rows = more


def reserve(handle: int, start: int, size: int) -> None:
    """Reserve the space of these bytes of a file that may be in use. OSError where there is none."""
    for begin in range(start, start + size, _MOST):  # in parts: a signal makes it begin again
        os.posix_fallocate(handle, begin, min(_MOST, start + size - begin))


def in_shared_memory(tensor: Tensor) -> Tensor:
    """The tensor, moved to memory that other processes see. OSError where there is no room."""
    try:
        return tensor.share_memory_()
    except RuntimeError as error:
        if (found := re.search(r"\((\d+)\)$", str(error))) is None:
            raise
        need = f"{tensor.nbytes} bytes are needed in /dev/shm, for what processes share"
        raise OSError(
            int(found[1]), f"{os.strerror(int(found[1]))}: {need}; make room there, or raise the limit"
        ) from error


def from_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype, *, private: bool = False) -> Tensor:
    """A tensor in a file. Writes to a private one stay in this process."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if private:
        with open(path, "rb") as file:  # without a reservation: a file may be larger than the memory of the machine
            flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            held = mmap.mmap(file.fileno(), bytes_of(shape, dtype), flags=flags, prot=access)
        return torch.frombuffer(held, dtype=dtype).reshape(shape)
    return MemoryMappedTensor.from_filename(path, dtype=dtype, shape=torch.Size(shape))


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The size of the file of a leaf, at least 1."""
    return max(1, math.prod(shape) * dtype.itemsize)


def _is_no_name(part: str) -> bool:
    """Whether a part of a key cannot be the name of a file."""
    if part in ("", ".", "..") or "/" in part or "\0" in part or not is_written(part):
        return True
    return len(part.encode()) > _LONGEST_NAME


def file_names(leaves: Sequence[LeafSpec]) -> list[str]:
    """The names of the files of leaves in their folder. ValueError for keys that cannot name files of their own."""
    names: list[str] = []
    for spec in leaves:
        parts = [str(part) for part in spec.path] or [os.environ.get("SINGLE_TENSOR_BUFFER_NAME", _SINGLE)]
        name = "/".join(parts) + ".memmap"
        if any(map(_is_no_name, parts)) or any(type(part) not in (str, int) for part in spec.path):
            raise ValueError(
                f"the key {spec.path!r:.300} cannot name a file: keys must be integers or texts, not empty, without '/', "
                f"and of {_LONGEST_NAME} bytes at most"
            )
        if any(name == other or name.startswith(f"{other}/") or other.startswith(f"{name}/") for other in names):
            raise ValueError(f"two keys would share the file {name}: rename one (a number and its text are alike)")
        names.append(name)
    return names
