"""Values times a scale plus a location, and back."""

import math
from typing import Any

import torch
from torch import Tensor

from interop.transforms.entries import as_floating


def parameter(name: str, value: Any) -> Tensor:
    """A location or scale as a tensor of a floating dtype. TypeError for what is neither a number nor a tensor."""
    if isinstance(value, Tensor):
        return as_floating(value.detach())
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or a tensor, got {value!r}")
    return torch.tensor(value, dtype=torch.get_default_dtype(), device="cpu")


def forward(value: Tensor, loc: Tensor, scale: Tensor, standard_normal: bool) -> Tensor:
    """`value * scale + loc`, or `(value - loc) / scale`. ValueError where shapes do not fit."""
    value, loc, scale = _fitting(value, loc, scale)
    made = value - loc if standard_normal else value * scale
    other = scale if standard_normal else loc
    if other.dtype == made.dtype:  # memory is written once
        return made.div_(other) if standard_normal else made.add_(other)
    return made / other if standard_normal else made + other


def backward(value: Tensor, loc: Tensor, scale: Tensor, standard_normal: bool) -> Tensor:
    """What `forward` made this of."""
    return forward(value, loc, scale, not standard_normal)


def described(loc: Tensor | None, scale: Tensor | None, keys: Any) -> str:
    """For a repr: the numbers, unless they are many."""
    numbers = ""
    if loc is not None and scale is not None and loc.numel() == 1 and scale.numel() == 1:
        numbers = f"loc={loc.item():4.4f}, scale={scale.item():4.4f}, "
    return f"({numbers}keys={keys})"


def _fitting(value: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value = as_floating(value)
    if not loc.ndim and not scale.ndim:
        return value, loc, scale  # numbers go with values on any device
    return value, _ready("loc", loc, value), _ready("scale", scale, value)


def _ready(name: str, each: Tensor, value: Tensor) -> Tensor:
    """A location or scale on the device of values that it fits, and in their memory order."""
    shape, of = each.shape, value.shape
    fits = len(shape) <= len(of) and (
        shape == of[len(of) - len(shape) :]
        or all(one in (1, other) for one, other in zip(shape[::-1], of[::-1], strict=False))
    )
    if not fits:
        raise ValueError(f"{name} of shape {list(shape)} does not fit values of shape {list(of)}")
    if each.device != value.device:
        each = each.to(value.device)
    return each if value.is_contiguous() else in_order(each, value)


def in_order(each: Tensor, value: Tensor) -> Tensor:
    """A location or scale laid out as the values that it goes with, images with channels last for one: 4 times as fast."""
    while each.ndim and each.shape[0] == 1:
        each = each.squeeze(0)
    if each.ndim < 2 or math.prod(value.shape[-each.ndim :]) * 4 > value.numel():
        return each
    return torch.empty_like(value[(0,) * (value.ndim - each.ndim)], dtype=each.dtype, requires_grad=False).copy_(each)
