"""Mean and variance of values that come in batches, in float64 whatever their dtype."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """How much values weigh, their mean, and the weighted sum of squares of their distances from it.

    Batches are put together by these, not by sums of values and of squares, whose difference loses all digits of the
    variance where the mean is large (Chan, Golub and LeVeque, 1979).
    """

    weight: float
    mean: Tensor  # of the kept dims
    squares: Tensor  # like the mean

    @classmethod
    def of(cls, values: Tensor, dims: Sequence[int]) -> Self:
        """Those of values over some dims, which stay with size one; each value weighs 1."""
        wide = values.double()
        if not dims:
            return cls(1.0, wide, torch.zeros_like(wide))
        mean = wide.mean(tuple(dims), keepdim=True)
        squares = (wide - mean).square_().sum(tuple(dims), keepdim=True)
        return cls(float(math.prod(values.shape[dim] for dim in dims)), mean, squares)

    def scaled(self, factor: float) -> Self:
        """The same where values weigh so many times as much."""
        return self if factor == 1 else type(self)(self.weight * factor, self.mean, self.squares * factor)

    def shaped(self, shape: Sequence[int]) -> Self:
        """The same with the kept dims in another shape."""
        return type(self)(self.weight, self.mean.reshape(shape), self.squares.reshape(shape))

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return type(self)(self.weight, self.mean.to(device), self.squares.to(device))

    def merged(self, other: "Moments") -> Self:
        """Those of the values of both."""
        weight = self.weight + other.weight
        share = other.weight / weight
        apart = other.mean - self.mean
        squares = torch.addcmul(self.squares + other.squares, apart, apart, value=self.weight * share)
        return type(self)(weight, torch.add(self.mean, apart, alpha=share), squares)

    @property
    def variance(self) -> Tensor:
        """The mean square of the distances from the mean."""
        return self.squares / self.weight

    def is_finite(self) -> bool:
        """Whether neither infinities nor NaNs are among the values, nor made of them."""
        return bool((self.mean + self.squares).isfinite().all())
