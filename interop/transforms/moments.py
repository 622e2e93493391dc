"""Mean and variance of values that come in batches, in float64 whatever their dtype."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """Weight and mean of values, and the weighted sum of squares of their distances from the mean.

    Batches are merged by these, not by sums of values and of squares, whose difference loses all digits of the variance
    where the mean is large (Chan, Golub and LeVeque, 1979).
    """

    weight: float
    mean: Tensor  # of the kept dims
    squares: Tensor  # like the mean

    @property
    def variance(self) -> Tensor:
        return self.squares / self.weight

    def is_finite(self) -> bool:
        """False where a value was infinite or NaN, or a square overflowed."""
        return bool(self.mean.isfinite().all() & self.squares.isfinite().all())


def moments(values: Tensor, dims: Sequence[int]) -> Moments:
    """Those of values over some dims, which stay with size one; each value weighs 1."""
    wide = values.double()
    if not dims:
        return Moments(1.0, wide, torch.zeros_like(wide))
    mean = wide.mean(tuple(dims), keepdim=True)
    squares = (wide - mean).square_().sum(tuple(dims), keepdim=True)
    return Moments(float(math.prod(values.shape[dim] for dim in dims)), mean, squares)


def scaled(of: Moments, factor: float) -> Moments:
    """The same with all weights times a factor."""
    return of if factor == 1 else Moments(of.weight * factor, of.mean, of.squares * factor)


def merged(one: Moments, other: Moments) -> Moments:
    """Those of the values of both."""
    weight = one.weight + other.weight
    share = other.weight / weight
    apart = other.mean - one.mean
    squares = torch.addcmul(one.squares + other.squares, apart, apart, value=one.weight * share)
    return Moments(weight, torch.add(one.mean, apart, alpha=share), squares)
