"""The memory of storages: plans, and refusals before anything is allocated."""

import multiprocessing.heap
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fbuf import free_memory
from fbuf.memory_plan import Plan, Share
from interop.data import bridge
from interop.data.item_specs import is_spec
from interop.data.layout import LeafSpec

_SMALL = 1 << 26  # bytes below which free memory is not looked up


def place_of(device: torch.device) -> str:
    """The place that a device of torch is; "cpu" is the memory of this machine."""
    if device == torch.device("cuda"):
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)


def free_at(place: str) -> int | None:
    """Bytes free at a place; None if unknown."""
    if not place.startswith("cuda"):
        return free_memory.at(place) if place == free_memory.HOST or place.startswith("/") else None
    device = torch.device(place)
    found = [torch.cuda.mem_get_info(device)[0]]
    if bridge.jax_device(device) is not None:  # whose pool may hold more than it uses
        pooled = free_memory.at(place)
        found = [max(*found, pooled) if pooled is not None else found[0]]
    return found[0]


def arrays(part: str, leaves: Sequence[LeafSpec], lead: tuple[int, ...], place: str, **more: Any) -> list[Share]:
    """Arrays of shape [*lead, ...] for leaves of items."""
    return [array(part, leaf.name, (*lead, *leaf.shape), leaf.dtype, place, **more) for leaf in leaves]


def array(part: str, key: str, shape: tuple[int, ...], dtype: torch.dtype, place: str, **more: Any) -> Share:
    size = torch.Size(shape).numel() * dtype.itemsize
    return Share(part, key, place, size, tuple(shape), str(dtype).removeprefix("torch."), **more)


def plan(shares: Iterable[Share]) -> Plan:
    """A plan with the memory that is free now."""
    return Plan.of(shares, free_at)


def row_of(spec: object, ndim: int) -> Any:
    """A row of zeros of a spec, of `interop.specs` or torchrl; see `example_row` there."""
    from interop.specs.example_rows import example_row  # here: a program without specs does not load them

    return example_row(spec, ndim)


def example(data: Any, ndim: int) -> Any:
    """`row_of` a spec; other data as it is."""
    return row_of(data, ndim) if is_spec(data) else data


def refuse(shares: Iterable[Share]) -> None:
    """NotEnoughMemoryError if a place has too little memory."""
    shares = list(shares)
    if sum(share.bytes or 0 for share in shares) >= _SMALL:
        plan(shares).check()


def shared_memory(size: int) -> str:
    """The folder whose file system holds an anonymous map of `size` bytes."""
    for folder in getattr(multiprocessing.heap.Arena, "_dir_candidates", ()):
        free = free_memory.at(folder)
        if free is not None and free >= size:
            return str(folder)
    return tempfile.gettempdir()
