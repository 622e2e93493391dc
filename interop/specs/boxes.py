"""Boxes: the value ranges returned by `spec.space`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from interop.specs import torchrl_classes
from interop.specs.spec import block


class Box:
    """Base class of the boxes. `isinstance` of torchrl's box of the same name is True if torchrl is imported."""

    # Torchrl's boxes are no abstract classes, which could be given virtual subclasses.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return torchrl_classes.box_class(self._name()) or type(self)

    def _name(self) -> str:
        return type(self).__name__

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]


@dataclass(eq=False, repr=False)
class ContinuousBox(Box):
    """A closed interval; `low` and `high` are tensors with the shape of the spec."""

    low: Tensor
    high: Tensor
    device: Any = None

    def __post_init__(self) -> None:
        if self.device is not None:
            self.low, self.high = self.low.to(self.device), self.high.to(self.device)
        self.device = self.low.device

    def __iter__(self) -> Iterator[Tensor]:
        yield self.low
        yield self.high

    def to(self, dest: Any) -> "ContinuousBox":
        """The bounds on another device, or with another dtype."""
        return ContinuousBox(self.low.to(dest), self.high.to(dest))

    def clone(self) -> "ContinuousBox":
        """A copy with bounds of its own."""
        return ContinuousBox(self.low.clone(), self.high.clone())

    def unbind(self, dim: int = 0) -> "tuple[ContinuousBox, ...]":
        """A box for each index along a dim."""
        return tuple(ContinuousBox(*pair) for pair in zip(self.low.unbind(dim), self.high.unbind(dim), strict=True))

    @property
    def is_unbounded(self) -> bool:
        """Whether the bounds include every finite number of the dtype."""
        least, most = limits(self.low.dtype)
        return bool((self.low <= least).all() and (self.high >= most).all())

    def __eq__(self, other: object) -> bool:
        if other is None:
            return self.is_unbounded
        if (
            not isinstance(other, ContinuousBox)
            or self.low.shape != other.low.shape
            or self.low.device != other.low.device
        ):
            return False
        return all(one.dtype == two.dtype and torch.allclose(one, two) for one, two in zip(self, other, strict=True))

    def __repr__(self) -> str:
        rows = [f"{name}=Tensor(shape={each.shape}, device={each.device}, dtype={each.dtype})"
                for name, each in (("low", self.low), ("high", self.high))]  # fmt: skip
        return block("ContinuousBox", rows)


def limits(dtype: torch.dtype) -> tuple[Any, Any]:
    """The lowest and the highest finite number of a dtype."""
    if dtype == torch.bool:
        return False, True
    info = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype)
    return info.min, info.max


@dataclass(frozen=True)
class CategoricalBox(Box):
    """The integers from 0 to n - 1."""

    n: int


class DiscreteBox(CategoricalBox):
    """The earlier name of `CategoricalBox`."""


@dataclass(frozen=True)
class BinaryBox(Box):
    """Vectors of n bits."""

    n: int


@dataclass
class BoxList(Box):
    """One box per group of a value."""

    boxes: list[Any]

    @classmethod
    def from_nvec(cls, nvec: Tensor | Sequence[int]) -> Self:
        """Categorical boxes of the given sizes; nested lists of boxes for sizes with several dims."""
        sizes = nvec.tolist() if isinstance(nvec, Tensor) else list(nvec)
        return cls([cls.from_nvec(each) if isinstance(each, list) else CategoricalBox(each) for each in sizes])

    def sizes(self) -> list[Any]:
        """The sizes of the boxes; nested lists for boxes of several dims."""
        return [each.sizes() if isinstance(each, BoxList) else each.n for each in self.boxes]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.boxes)

    def __len__(self) -> int:
        return len(self.boxes)
