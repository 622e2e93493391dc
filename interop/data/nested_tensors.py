"""Nested tensors of strided layout, made of one buffer. Their other layout, jagged, is that of ragged rows."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


class Components(tuple[Tensor, ...]):
    """A nested tensor taken apart: its components in order, one or more."""

    __slots__ = ()


def of_buffer(buffer: Tensor, shapes: Tensor) -> Tensor:
    """A nested tensor that shares the memory of a buffer [n], which has its components one behind the other.

    Args:
        buffer: at least as many values as the components have.
        shapes: of the components, int64 [components, dims], on the CPU.
    """
    inner = shapes.flip(1).cumprod(1).flip(1)  # of each dim, the values of it and of the dims behind it
    strides = torch.cat((inner[:, 1:], torch.ones_like(inner[:, :1])), 1)
    starts = inner[:, 0].cumsum(0) - inner[:, 0]
    view: Tensor = torch._nested_view_from_buffer(buffer, shapes, strides, starts)  # noqa: SLF001
    return view


def joined(parts: Sequence[Tensor]) -> Tensor:
    """A nested tensor of dense components, with a copy of their values. ValueError for components that are unlike."""
    if not parts or not all(isinstance(part, Tensor) and part.layout == torch.strided and part.ndim for part in parts):
        raise ValueError("a nested tensor needs components, dense tensors with a dim or more")
    kinds = {(part.dtype, part.device, part.ndim) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"components of a nested tensor have one dtype, device and number of dims, found {kinds}")
    shapes = torch.tensor([part.shape for part in parts], dtype=torch.int64, device="cpu")
    return of_buffer(torch.cat([part.reshape(-1) for part in parts]), shapes)


def _silence_prototype() -> None:
    """Use up torch's only warning about nested tensors of this layout, which files need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_buffer(torch.zeros(1, device="cpu"), torch.ones(1, 1, dtype=torch.int64, device="cpu")).detach()


_silence_prototype()
