"""Flat arrays as a tensordict, in memory or in the files of a folder: whole, or as one component for each trajectory."""

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
from interop.ted.row_values import fresh, side_by_side


def gathered(
    flat: Flattened, info: Mapping[Path, Any], path: str | os.PathLike[str] | None, by_trajectory: bool = False
) -> TensorDictBase:
    """The arrays and the non-tensor entries `info`.

    With a path they are memory maps of that folder. Its files are written beside it, and are moved into it when all are
    complete: OSError otherwise, and nothing stays behind.

    Args:
        by_trajectory: nested tensors, [trajectories, rows of each, ...].
    """
    lengths, ended = flat.order.trajectories()
    batch = [len(lengths)] if by_trajectory else []
    made = TensorDict({}, batch_size=batch, device="cpu")
    for key, value in info.items():
        made.set(key, NonTensorData(value, batch_size=batch, device="cpu"))
    specs = flat.specs()
    shapes: dict[Path, Any] = {key: torch.Size(shape) for key, (shape, _) in specs.items()}
    if by_trajectory:
        for key, (shape, _) in specs.items():
            shapes[key] = sizes(lengths + ended if key in flat.entries.followed else lengths, shape[1:])
    if path is None:
        memories = {key: fresh(shape, dtype) for key, (shape, dtype) in specs.items()}
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
        for key, (shape, dtype) in specs.items():
            file = made.make_memmap(key, shapes[key], dtype=dtype)
            if torch.Size(shape).numel():  # written in the place of stores: these take twice as long
                flat.array(key).reshape(-1).view(torch.uint8).numpy().tofile(file.filename)
        for here, _, names in os.walk(beside):
            there = folder / File(here).relative_to(beside)
            there.mkdir(parents=True, exist_ok=True)
            for name in names:
                os.replace(File(here) / name, there / name)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return TensorDict.load_memmap(folder).memmap_(folder)  # the loaded one does not know its folder


def sizes(lengths: Tensor, item: tuple[int, ...]) -> Tensor:
    """The shapes of the components of a nested tensor, [trajectories, dims]."""
    items = torch.tensor([item], dtype=torch.int64, device="cpu").expand(len(lengths), -1)
    return torch.cat((lengths[:, None], items), 1)


def nested(memory: Tensor, shapes: Any) -> Tensor:
    """A nested tensor that shares memory, [rows of all components, ...]."""
    strides = torch.tensor([memory.stride()], dtype=torch.int64, device="cpu").expand_as(shapes).contiguous()
    starts = (shapes[:, 0].cumsum(0) - shapes[:, 0]) * memory.shape[1:].numel()
    found: Tensor = torch._nested_view_from_buffer(memory.reshape(-1), shapes, strides, starts)  # noqa: SLF001
    return found


def components(array: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of a nested tensor, [rows of all, ...], and how many rows each component has. ValueError for others."""
    if not array.is_nested or array.layout != torch.strided:
        raise ValueError(
            f"expected a nested tensor with a component for each trajectory, got shape {list(array.shape)}"
        )
    shapes = array._nested_tensor_size()  # noqa: SLF001
    item = shapes[0, 1:]
    starts = (shapes[:, 0].cumsum(0) - shapes[:, 0]) * int(item.prod())
    if not torch.equal(shapes[:, 1:], item.expand(len(shapes), -1)):
        raise ValueError("trajectories have rows of different shapes")
    if array.is_contiguous() and torch.equal(array._nested_tensor_storage_offsets(), starts):  # noqa: SLF001
        memory = torch.empty(0, dtype=array.dtype, device="cpu").set_(array.untyped_storage())
        return memory[: array.numel()].view(-1, *item.tolist()), shapes[:, 0]
    return torch.cat(array.unbind(0)), shapes[:, 0]


def _silence_prototype() -> None:
    """Have torch give its only warning about nested tensors of this layout, which files need, unseen now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested(torch.zeros(1, device="cpu"), torch.ones(1, 1, dtype=torch.int64, device="cpu")).detach()


_silence_prototype()
