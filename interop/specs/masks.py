"""Masks of allowed choices, and the base class of specs with masks."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Size, Tensor

from interop.specs.spec import TensorSpec, refused

MOST_LISTED = 2**31  # numbers in the list of all values of a spec


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
    surplus = given.ndim - len(shape)
    is_one = surplus > 0 and given.shape[:surplus].numel() == 1  # one mask of a batch: its dims of 1 say nothing
    try:
        made = (given.reshape(given.shape[surplus:]) if is_one else given).expand(shape)
    except RuntimeError:
        text = f"Cannot expand mask to the desired shape. It is {list(given.shape)}, needed is {list(shape)}"
        if surplus > 0:
            text += f". For a mask for each of {list(given.shape[:surplus])} values expand the spec before"
        raise RuntimeError(text) from None
    if made.numel() and not made.any():
        raise ValueError(f"the mask of shape {list(given.shape)} allows nothing: it has no True")
    return made.clone()


def counted(number: int) -> Tensor:
    """A number of values as a tensor. OverflowError from 2**63 on."""
    if number >= 2**63:
        raise OverflowError(f"there are {number} values, more than an int64 can count")
    return torch.tensor(number)


def combined(choices: Sequence[Tensor], like: Tensor) -> Tensor:
    """All combinations of one number of each 1-d tensor, [number, len(choices)]; the last one varies fastest.

    ValueError for more than 2**31 numbers. Without tensors one empty combination, of the dtype and device of `like`.
    """
    sizes = [len(each) for each in choices]
    stride = number = math.prod(sizes)
    if number * max(len(sizes), 1) > MOST_LISTED:
        raise ValueError(f"there are {number} values, of {len(sizes)} entries each: they are too many to be listed")
    made = like.new_empty((number, len(sizes)))
    places = torch.arange(number, device=like.device)
    for at, each in enumerate(choices if number else ()):
        stride //= len(each)
        made[:, at] = each[(places // stride) % len(each)]
    return made


def places_of(counts: Sequence[int]) -> Sequence[Tensor]:
    """All combinations of one place of each list of `counts` values: the places in each list, [number]. As `combined`."""
    every = [torch.arange(count) for count in counts]
    return combined(every, every[0]).unbind(-1) if every else ()


def product_of(cardinalities: Iterable[Any]) -> int | float:
    """The product of cardinalities, ints, floats or tensors of one number; 1 without any."""
    return math.prod(each.item() if isinstance(each, Tensor) else each for each in cardinalities)


def any_allowed(mask: Tensor) -> Tensor:
    """The index of a random True along the last dim, int64, uniform. RuntimeError for a row without True."""
    if not mask.any(-1).all():
        raise RuntimeError("there is a row of the mask that allows nothing: no choice can be drawn there")
    return torch.rand(mask.shape, dtype=torch.float64, device=mask.device).masked_fill_(~mask, -1).argmax(-1)
