"""The memory of storages: plans, and refusals before anything is allocated."""

import multiprocessing.heap
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict

from fbuf import free_memory
from fbuf.memory_plan import Plan, Share
from interop.data import bridge
from interop.data.layout import LeafSpec
from interop.specs import torchrl_classes
from interop.specs.composite import Composite
from interop.specs.leaves import converted
from interop.specs.spec import TensorSpec

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


def row_of(spec: TensorSpec, ndim: int) -> Any:
    """A row of zeros of a spec, [1, *spec.shape], whose elements share memory; Python objects become text.

    TypeError for other entries than tensors. ValueError for a dynamic dim, or a Composite with fewer than ndim - 1 dims.
    """

    def leaf(spec: TensorSpec, _: str) -> torch.Tensor:
        return torch.zeros((), dtype=spec.dtype, device=spec.device).expand(1, *spec.shape)

    def node(spec: Composite, entries: dict[str, Any]) -> Any:
        names = [None, *spec.names] if any(spec.names) else None
        made = TensorDict(entries, (1, *spec.shape), device=spec.device, names=names)
        return made if spec.data_cls in (None, TensorDict) else spec.data_cls.from_tensordict(made)

    spec = torchrl_classes.converted(spec)
    if isinstance(spec, Composite) and spec.ndim < ndim - 1:
        raise ValueError(
            f"the storage has ndim={ndim}: the spec of a row begins with {ndim - 1} dims, such as [environments], got shape "
            f"{list(spec.shape)}. Use spec.expand(environments)"
        )
    return converted(spec, leaf, node, objects=lambda spec: NonTensorData("", batch_size=(1, *spec.shape)))


def example(data: Any, ndim: int) -> Any:
    """`row_of` a spec, of `interop.specs` or torchrl; other data as it is."""
    data = torchrl_classes.converted(data)
    return row_of(data, ndim) if isinstance(data, TensorSpec) else data


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
