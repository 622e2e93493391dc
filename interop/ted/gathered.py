"""Flat arrays as a tensordict, in memory or in the files of a folder, each as one tensor or one component a trajectory."""

import math
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path as File
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from interop.ted.entries import Path
from interop.ted.flattening import Flattened
from interop.ted.row_values import fresh
from interop.ted.threads import side_by_side

_SPARE = 1 << 28  # bytes: larger arrays are made in their files


def gathered(
    flat: Flattened, told: Mapping[Path, Any], path: str | os.PathLike[str] | None, by_trajectory: bool = False
) -> TensorDictBase:
    """The arrays and the non-tensor entries `told`.

    With a path they are memory maps of files that are made beside, with room on the disk, and take the place of others of
    their names when all are whole: OSError otherwise, and nothing stays behind.

    Args:
        by_trajectory: nested tensors, [trajectories, rows of each, ...].
    """
    lengths, ended = flat.order.trajectories()
    batch = torch.Size([len(lengths)] if by_trajectory else [])
    made = TensorDict({}, batch_size=batch, device="cpu")
    for key, value in told.items():
        made.set(key, NonTensorData(value, batch_size=batch, device="cpu"))
    shapes = {
        key: sizes(lengths + ended if key in flat.entries.followed else lengths, shape[1:])
        if by_trajectory
        else torch.Size(shape)
        for key, (shape, _) in flat.specs().items()
    }
    if path is None:
        memories = {key: fresh(shape, dtype) for key, (shape, dtype) in flat.specs().items()}
        works = [partial(flat.fill, key, memory) for key, memory in memories.items()]
        side_by_side(works, sum(memory.nbytes for memory in memories.values()))
        for key, memory in memories.items():
            made.set(key, nested(memory, shapes[key]) if by_trajectory else memory)
        return made
    folder = File(path).absolute()
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    try:
        beside.mkdir(parents=True)
        made.memmap_(beside)
        specs = flat.specs()
        spare = fresh(
            (min(_SPARE, max(math.prod(shape) * dtype.itemsize for shape, dtype in specs.values())),), torch.uint8
        )
        for key, (shape, dtype) in specs.items():
            memory, size = made.make_memmap(key, shapes[key], dtype=dtype), math.prod(shape) * dtype.itemsize
            if not size:
                continue
            if size <= spare.numel():
                flat.fill(key, spare[:size].view(dtype).view(shape))
                _write(memory, spare[:size])
            else:
                flat.fill(key, _reserved(memory).view(shape))
        _put_in_place(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return TensorDict.load_memmap(folder).memmap_(folder)  # by itself it does not know where it is


def sizes(lengths: Tensor, item: tuple[int, ...]) -> Tensor:
    """The shapes of the components of a nested tensor, [trajectories, dims]."""
    return torch.cat(
        (lengths[:, None], torch.tensor([item], dtype=torch.int64, device="cpu").expand(len(lengths), -1)), 1
    )


def nested(memory: Tensor, shapes: Any) -> Tensor:
    """A nested tensor over [rows of all, ...], which it shares."""
    whole, item = memory.reshape(-1), memory.shape[1:].numel()
    strides = torch.tensor([memory.stride()], dtype=torch.int64, device="cpu").expand_as(shapes).contiguous()
    starts = (shapes[:, 0].cumsum(0) - shapes[:, 0]) * item
    found: Tensor = torch._nested_view_from_buffer(whole, shapes, strides, starts)
    return found


def components(array: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of a nested tensor, [rows of all, ...], and how many rows each component has. ValueError for others."""
    if not array.is_nested or array.layout != torch.strided:
        raise ValueError(
            f"expected a nested tensor with a component for each trajectory, got shape {list(array.shape)}"
        )
    shapes = array._nested_tensor_size()
    item = shapes[0, 1:]
    starts = (shapes[:, 0].cumsum(0) - shapes[:, 0]) * int(item.prod())
    if not torch.equal(shapes[:, 1:], item.expand(len(shapes), -1)):
        raise ValueError("trajectories have rows of different shapes")
    if array.is_contiguous() and torch.equal(array._nested_tensor_storage_offsets(), starts):
        whole = torch.empty(0, dtype=array.dtype, device="cpu").set_(array.untyped_storage())
        return whole[: array.numel()].view(-1, *item.tolist()), shapes[:, 0]
    return torch.cat(array.unbind(0)), shapes[:, 0]


def _write(array: Any, values: Tensor) -> None:
    """Have bytes in the file of a new array. That takes half as long as stores into its memory, page by page."""
    with open(array.filename, "r+b", buffering=0) as file:
        left = values.numpy().data
        while left:
            left = left[file.write(left) :]


def _reserved(array: Tensor) -> Tensor:
    """The memory of a new file in one row, with room on the disk.

    A store into a file that cannot grow would kill the process.
    """
    name = getattr(array, "filename", None)
    if name and hasattr(os, "posix_fallocate"):
        with open(name, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, os.fstat(file.fileno()).st_size))
    plain = array.as_subclass(Tensor)
    return torch.empty(0, dtype=plain.dtype, device="cpu").set_(plain.untyped_storage())


def _put_in_place(beside: File, folder: File) -> None:
    """Move the files of a folder to the same places in another one."""
    for here, _, names in os.walk(beside):
        there = folder / File(here).relative_to(beside)
        there.mkdir(parents=True, exist_ok=True)
        for name in names:
            os.replace(File(here) / name, there / name)


def _silence_prototype() -> None:
    """Have torch give now, unseen, the warning that it gives once: it is about the kind that files hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested(torch.zeros(1, device="cpu"), torch.ones(1, 1, dtype=torch.int64, device="cpu")).detach()


_silence_prototype()
