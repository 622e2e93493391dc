"""Values times a scale plus a location, and back."""

import math
from typing import Any

import torch
from torch import Tensor

from interop.transforms.entries import as_floating, broadcasts


def parameter(name: str, value: Any) -> Tensor:
    """A location or scale as a tensor of a floating dtype. TypeError for other than a number or a tensor."""
    if isinstance(value, Tensor):
        return as_floating(value.detach())
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or a tensor, got {value!r}")
    return torch.tensor(value, dtype=torch.get_default_dtype(), device="cpu")


def divisor(scale: Tensor) -> Tensor:
    """The scale. ValueError where it contains 0."""
    if not scale.is_meta and bool((scale == 0).any()):
        raise ValueError(f"scale must not contain 0 with standard_normal, got {scale}")
    return scale


def scaled(value: Tensor, loc: Tensor, scale: Tensor, standard_normal: bool) -> Tensor:
    """`value * scale + loc`, or `(value - loc) / scale`: each undoes the other. ValueError where shapes do not fit."""
    value = as_floating(value)
    if loc.ndim or scale.ndim:  # numbers go with values on any device
        loc, scale = _fitting("loc", loc, value), _fitting("scale", scale, value)
    made = value - loc if standard_normal else value * scale
    other = scale if standard_normal else loc
    if other.dtype == made.dtype:  # memory is written once
        return made.div_(other) if standard_normal else made.add_(other)
    return made / other if standard_normal else made + other


def described(loc: Tensor | None, scale: Tensor | None, keys: Any) -> str:
    """For a repr: the numbers, unless they are many."""
    if loc is None or scale is None or loc.numel() != 1 or scale.numel() != 1:
        return f"(keys={keys})"
    return f"(loc={loc.item():4.4f}, scale={scale.item():4.4f}, keys={keys})"


def _fitting(name: str, each: Tensor, value: Tensor) -> Tensor:
    """A location or scale on the device of values that it fits, and in their memory order."""
    if not broadcasts(each.shape, value.shape):
        raise ValueError(f"{name} of shape {list(each.shape)} does not fit values of shape {list(value.shape)}")
    return in_memory_order(each.to(value.device), value)


def in_memory_order(each: Tensor, value: Tensor) -> Tensor:
    """A location or scale laid out as its values: 4 times as fast for images with channels last."""
    if value.is_contiguous():
        return each
    while each.ndim and each.shape[0] == 1:
        each = each.squeeze(0)
    if each.ndim < 2 or math.prod(value.shape[-each.ndim :]) * 4 > value.numel():
        return each
    return torch.empty_like(value[(0,) * (value.ndim - each.ndim)], dtype=each.dtype, requires_grad=False).copy_(each)
