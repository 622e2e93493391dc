"""Masks of allowed choices, and the base class of specs with masks."""

from typing import Any, ClassVar, Self

import torch
from torch import Size, Tensor

from interop.specs.spec import TensorSpec, refused


class Choices(TensorSpec):
    """Base class of choices with an optional mask."""

    domain = "discrete"
    _parts: ClassVar[tuple[str, ...]] = ("_allowed",)
    _allowed: Tensor | None = None

    @property
    def mask(self) -> Tensor | None:
        """True for each allowed choice; None if all are allowed."""
        return self._allowed

    def update_mask(self, mask: Any) -> None:
        """Replace the mask, in place; None allows all choices.

        Raises:
            RuntimeError: the mask cannot be expanded to the shape that the class names.
            ValueError: the mask allows no choice.
        """
        self._allowed = None if mask is None else as_mask(mask, self._mask_shape(), self.device)

    _mask_shape = refused("there is no mask of what is allowed")

    def unchanged(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """Return the value: it has the target encoding already."""
        self._assert_safe(val, safe)
        return val

    def itself(self) -> Self:
        """Return the spec: its values have the target encoding already."""
        return self


def as_mask(mask: Any, shape: Size, device: Any) -> Tensor:
    """A bool mask of a shape. RuntimeError if it cannot be expanded to the shape, ValueError if it allows no choice."""
    given = torch.as_tensor(mask, device=device).to(torch.bool)
    try:
        made = given.expand(shape)
    except RuntimeError:
        text = f"Cannot expand mask to the desired shape. It is {list(given.shape)}, needed is {list(shape)}"
        raise RuntimeError(text) from None
    if made.numel() and not made.any():
        raise ValueError(f"the mask of shape {list(given.shape)} allows nothing: it has no True")
    return made.clone()


def any_allowed(mask: Tensor) -> Tensor:
    """The index of a random True along the last dim, int64, uniform. RuntimeError for a row without True."""
    if not mask.any(-1).all():
        raise RuntimeError("there is a row of the mask that allows nothing: no choice can be drawn there")
    return torch.rand(mask.shape, dtype=torch.float64, device=mask.device).masked_fill_(~mask, -1).argmax(-1)
