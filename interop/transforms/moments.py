"""Mean and variance of values that come in batches, in float64 whatever their dtype."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """Weight and mean of values, and the weighted sum of squares of their distances from the mean.

    Batches are merged by these, not by sums of values and of squares, whose difference loses all digits of the variance
    where the mean is large (Chan, Golub and LeVeque, 1979).
    """

    weight: float
    mean: Tensor
    squares: Tensor  # like the mean
    ready: dict[Any, Any] = field(default_factory=dict, repr=False)  # a cache of what readers compute from these

    @classmethod
    def of(cls, values: Tensor, dims: Sequence[int]) -> "Moments":
        """Those of values over some dims, which stay with size one; each value weighs 1."""
        wide = values.double()
        if not dims:
            return cls(1.0, wide, torch.zeros_like(wide))
        mean = wide.mean(tuple(dims), keepdim=True)
        squares = (wide - mean).square_().sum(tuple(dims), keepdim=True)
        return cls(float(math.prod(values.shape[dim] for dim in dims)), mean, squares)

    @property
    def variance(self) -> Tensor:
        return self.squares / self.weight

    def is_finite(self) -> bool:
        """False where a value was infinite or NaN, or a square overflowed."""
        return bool(self.mean.isfinite().all() & self.squares.isfinite().all())

    def times(self, factor: float) -> "Moments":
        """The same with all weights times a factor."""
        return Moments(self.weight * factor, self.mean, self.squares * factor)

    def to(self, device: torch.device) -> "Moments":
        """The same on a device."""
        return Moments(self.weight, self.mean.to(device), self.squares.to(device))

    def merged(self, other: "Moments") -> "Moments":
        """Those of the values of both."""
        weight = self.weight + other.weight
        share = other.weight / weight
        apart = other.mean - self.mean
        squares = torch.addcmul(self.squares + other.squares, apart, apart, value=self.weight * share)
        return Moments(weight, torch.add(self.mean, apart, alpha=share), squares)
