"""Masks: which choices are allowed, and the base of the specs that have them."""

from typing import Any, ClassVar, Self

import torch
from torch import Size, Tensor

from interop.specs.spec import TensorSpec, refused


class Choices(TensorSpec):
    """Choices, of which a mask may allow some."""

    domain = "discrete"
    _parts: ClassVar[tuple[str, ...]] = ("_allowed",)
    _allowed: Tensor | None = None

    @property
    def mask(self) -> Tensor | None:
        """Which choices are allowed; None for all."""
        return self._allowed

    def update_mask(self, mask: Any) -> None:
        """Set which choices are allowed, in place; None for all.

        Raises:
            RuntimeError: the mask cannot be expanded to the shape that the class names.
            ValueError: nothing is allowed.
        """
        self._allowed = None if mask is None else as_mask(mask, self._mask_shape(), self.device)

    _mask_shape = refused("there is no mask of what is allowed")

    def unchanged(self, val: Tensor, safe: bool | None = None) -> Tensor:
        """The value, which has this form already."""
        self._assert_safe(val, safe)
        return val

    def itself(self) -> Self:
        """The spec, whose values have this form already."""
        return self


def as_mask(mask: Any, shape: Size, device: Any) -> Tensor:
    """A bool mask of a shape. RuntimeError where it cannot be expanded to it, ValueError where it allows nothing."""
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
    """A random True place along the last dim, each as likely; int64 without that dim. RuntimeError for a row of False."""
    if not mask.any(-1).all():
        raise RuntimeError("there is a row of the mask that allows nothing: no choice can be drawn there")
    return torch.rand(mask.shape, dtype=torch.float64, device=mask.device).masked_fill_(~mask, -1).argmax(-1)
