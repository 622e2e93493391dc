"""Copies between the host and a GPU by way of pinned memory, so that the host waits for the GPU as seldom as possible.

A GPU copies ordinary memory of the host in the order of its stream only by way of pinned (page-locked) memory: where the
caller has none, the driver has, and it may wait for the stream before it uses that. The blocks here belong to torch's
allocator of pinned memory. It records an event with each asynchronous copy, and gives a block out again only once the
events of its copies are done. So a block is for one copy, and nothing here keeps it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_BRIEF = 1 << 16  # bytes that CUDA copies to a GPU without waiting, also from memory that is not pinned
_LARGEST = 1 << 26  # bytes; a copy of more takes longer than the wait, and torch keeps what it has pinned


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. The caller may write to it at once. From the host to a GPU without waiting for the GPU.

    Of more than 64 MiB the host may wait. What is on the device already is not copied.
    """
    if not tensor.is_cpu or device.type != "cuda":
        return tensor.to(device)
    pinned = tensor.is_pinned()  # the GPU would read it later, when the caller may have changed it
    if tensor.nbytes > _LARGEST or (tensor.nbytes <= _BRIEF and not pinned):
        return tensor.to(device, non_blocking=not pinned)
    return staged(tensor).to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in ordinary memory of the host, after one wait for all of a GPU. Those of the host are not copied."""
    found = fetched(tensors)
    return [
        there.clone() if tensor.device.type == "cuda" and there.is_pinned() else there
        for tensor, there in zip(tensors, found, strict=True)
    ]


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As `to_host`, but those of a GPU in pinned memory, of which there is little: to be read at once, not to be kept."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    found = [
        staged(tensor) if tensor.device in devices and tensor.nbytes <= _LARGEST else tensor.cpu() for tensor in tensors
    ]
    for device in devices:
        wait(device)
    return found


def staged(tensor: Tensor) -> Tensor:
    """A copy in a pinned block. From a GPU it is asynchronous: `wait` before the block is read."""
    block = pinned(tensor.shape, tensor.dtype)
    block.copy_(tensor, non_blocking=not tensor.is_cpu)
    return block


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A block of pinned memory, which no copy uses."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def wait(device: torch.device) -> None:
    """Wait for the work that torch's current stream of a GPU has been given."""
    torch.cuda.current_stream(device).synchronize()
