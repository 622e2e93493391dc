"""Masks: which choices are allowed."""

from typing import Any

import torch
from torch import Size, Tensor


def as_mask(mask: Any, shape: Size, device: Any) -> Tensor:
    """A bool mask of a shape. RuntimeError where it cannot be expanded to it, ValueError where it allows nothing."""
    given = torch.as_tensor(mask, device=device).to(torch.bool)
    try:
        made = given.expand(shape)
    except RuntimeError:
        raise RuntimeError(
            f"Cannot expand mask to the desired shape. The mask has shape {list(given.shape)}, needed is {list(shape)}"
        ) from None
    if made.numel() and not made.any():
        raise ValueError(f"the mask of shape {list(given.shape)} allows nothing: it has no True")
    return made.clone()


def any_allowed(mask: Tensor) -> Tensor:
    """A random True place along the last dim, each as likely; int64 without that dim. RuntimeError for a row of False."""
    if not mask.any(-1).all():
        raise RuntimeError("there is a row of the mask that allows nothing: no choice can be drawn there")
    return torch.rand(mask.shape, dtype=torch.float64, device=mask.device).masked_fill_(~mask, -1).argmax(-1)
