"""Values times a scale plus a location, and back."""

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
    return (value - loc) / scale if standard_normal else value * scale + loc


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
    for name, each in (("loc", loc), ("scale", scale)):
        if each.ndim > value.ndim or any(
            one not in (1, other) for one, other in zip(each.shape[::-1], value.shape[::-1], strict=False)
        ):
            raise ValueError(f"{name} of shape {list(each.shape)} does not fit values of shape {list(value.shape)}")
    return value, loc.to(value.device), scale.to(value.device)
