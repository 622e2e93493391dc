"""Memory maps of tensors, in files and without."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

from interop.codec import LeafSpec

_SINGLE = "_-single-tensor-_"
_ALIGNED = 64  # bytes


class _Part:
    """Bytes of one anonymous map, for a leaf: a map of its own would take two descriptors for each."""

    def __init__(self, whole: Any, start: int, stop: int) -> None:
        self._whole, self._start, self._stop = whole, start, stop

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._whole.buffer)[self._start : self._stop]


def anonymous(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Memory maps of zeros without a file, together in one."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
    whole = MemoryMappedTensor.empty(torch.Size([max(1, starts[-1])]), dtype=torch.uint8)._handler
    return [
        MemoryMappedTensor.from_handler(_Part(whole, start, start + size), dtype, shape)
        if size
        else torch.empty(shape, dtype=dtype, device="cpu")
        for shape, dtype, start, size in zip(shapes, dtypes, starts, sizes, strict=False)
    ]


def from_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype, *, private: bool = False) -> Tensor:
    """A tensor in a file; what is written to a private one stays in this process."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if private:
        return torch.from_file(str(path), shared=False, dtype=dtype, size=math.prod(shape), device="cpu").reshape(shape)
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
