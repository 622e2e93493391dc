"""Specs of numbers with bounds (`Bounded`) and without (`Unbounded`)."""

import warnings
from typing import Any, Self

import torch
from torch import Size, Tensor

from interop.specs import shapes, torchrl_classes
from interop.specs.boxes import ContinuousBox, limits
from interop.specs.spec import TensorSpec

_EXACT = 2**53  # float64 represents all integers up to here


_OF_DOMAIN: dict[tuple[type[TensorSpec], str], Any] = {}  # (family, domain) -> class


class _Interval(TensorSpec):
    """Base of `Bounded` and `Unbounded`, whose instances become the subclass for their domain."""

    dtype: torch.dtype

    def of_domain(self, domain: str | None) -> Self:
        """Set the domain, by default that of the dtype, and the class for it, in place. Returns the spec."""
        if domain not in (None, "continuous", "discrete"):
            raise ValueError(f"domain must be 'continuous' or 'discrete', got {domain!r}")
        is_continuous = self.dtype.is_floating_point or self.dtype.is_complex
        self.domain = domain or ("continuous" if is_continuous else "discrete")
        family = Bounded if isinstance(self, Bounded) else Unbounded
        if type(self) is family or type(self) in _OF_DOMAIN.values():  # keep a user's subclass
            self.__class__ = _OF_DOMAIN[family, self.domain]
        return self


class Bounded(_Interval):
    """Numbers in the closed interval [low, high]. An instance becomes a `BoundedContinuous` or a `BoundedDiscrete`.

    `rand` draws uniformly. With one infinite bound it draws exponentially from the other, with two a standard normal.

    Args:
        low, high: numbers, or tensors with the shape of the spec.
        shape: by default that of the bounds.
        dtype: by default torch's default dtype; give it for integers.
        domain: "continuous" or "discrete"; by default it follows from the dtype.

    Raises:
        RuntimeError: no shape is given, or the shapes differ.
        ValueError: a lower bound is above the upper one, or is NaN.
    """

    _parts = ("low", "high")

    low: Tensor
    high: Tensor

    def __init__(
        self, low: Any = None, high: Any = None, shape: Any = None, device: Any = None, dtype: torch.dtype | None = None,
        *, domain: str | None = None, minimum: Any = None, maximum: Any = None,
    ) -> None:  # fmt: skip
        low, high = _renamed("minimum", minimum, "low", low), _renamed("maximum", maximum, "high", high)
        if low is None or high is None:
            raise TypeError(f"Bounded needs low and high, got {low} and {high}")
        self._set((), device, dtype)
        bounds = [torch.as_tensor(each, dtype=self.dtype, device=self.device) for each in (low, high)]
        found = {each.shape for each in bounds if each.ndim} | (set() if shape is None else {shapes.as_shape(shape)})
        if len(found) != 1:
            given = f"low {list(bounds[0].shape)}, high {list(bounds[1].shape)}, shape {shape}"
            raise RuntimeError(f"Bounded needs one shape, of the bounds or as shape=, got {given}")
        if not (bounds[0] <= bounds[1]).all():
            raise ValueError(f"the lower bounds must not be above the upper ones, got low={low}, high={high}")
        self.shape = found.pop()
        whole = shapes.concrete(self.shape)
        # Copies: a tensor of the user may be changed later.
        self.low, self.high = ((each.clone() if each.ndim else each).expand(whole) for each in bounds)
        self.of_domain(domain or type(self).domain)

    def _box(self) -> ContinuousBox:
        """The interval. Assigning to it, to its bounds or to places of them changes the spec."""
        return _Bounds(self)

    def _set_space(self, box: object) -> None:
        if not isinstance(box, ContinuousBox):
            raise TypeError(f"the space of a {type(self).__name__} is a ContinuousBox, got {box!r:.200}")
        new = type(self)(box.low, box.high, None if box.low.ndim else self.shape, self.device, self.dtype)
        if new.low.shape != self.low.shape:
            raise ValueError(
                f"bounds of shape {list(new.low.shape)} are not of the shape {list(self.low.shape)} of the spec"
            )
        self.low, self.high = new.low, new.high

    def changeable(self, bound: str) -> Tensor:
        """The tensor of a bound, "low" or "high", in which each place has memory of its own."""
        tensor: Tensor = getattr(self, bound)
        if not tensor.is_contiguous():  # expanded
            tensor = tensor.contiguous()
            setattr(self, bound, tensor)
        return tensor

    def _draw(self, lead: Size) -> Tensor:
        low, high = self.low, self.high
        size = (*lead, *low.shape)
        if low.is_floating_point():
            share = torch.rand(size, dtype=self.dtype, device=self.device)
            drawn = (low * (1 - share) + high * share).clamp_(low, high)
            return drawn if drawn.isfinite().all() else self._draw_infinite(drawn)
        least, most = low.to(torch.int64), high.to(torch.int64)
        span = most - least + 1
        drawn = least + torch.randint(2**63 - 1, size, device=self.device) % span.clamp(1)
        is_wide = (span > _EXACT) | (span < 1)  # the remainder would be biased, or the span has overflowed
        if is_wide.any():
            share = torch.rand(size, dtype=torch.float64, device=self.device)
            wide = (least.double() * (1 - share) + most.double() * share).clamp(-(2.0**63), 2.0**63 - 1024)
            drawn = torch.where(is_wide, wide.to(torch.int64).clamp(least, most), drawn)
        return drawn.to(self.dtype)

    def _draw_infinite(self, drawn: Tensor) -> Tensor:
        """Draws with infinite bounds: exponential from the finite bound, standard normal without one."""
        step = torch.empty_like(drawn).exponential_()
        from_low, from_high = self.low.isfinite(), self.high.isfinite()
        drawn = torch.where(from_low & ~from_high, self.low + step, drawn)
        drawn = torch.where(from_high & ~from_low, self.high - step, drawn)
        drawn = torch.where(from_low | from_high, drawn, torch.randn_like(drawn))
        return torch.minimum(torch.maximum(drawn, self.low), self.high)

    def _contains(self, val: Tensor) -> bool:  # False for NaN
        return bool(((val >= self.low) & (val <= self.high)).all())

    def _corrected(self, val: Tensor) -> Tensor:
        number = val.nan_to_num(0, torch.inf, -torch.inf) if val.is_floating_point() else val
        return torch.minimum(torch.maximum(number, self.low.to(val.dtype)), self.high.to(val.dtype))

    def cardinality(self) -> float:
        return float("inf")

    def _register_batch_size(self, batch_size: Size) -> None:
        """Do nothing. Torchrl's Composite calls it to store equal bounds once; expanded bounds are views already."""

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """One spec per index of a dim. ValueError for dim -1, as for specs with a structural last dim."""
        if dim == -1:
            raise ValueError("Final dimension of Bounded must remain unchanged: name it by its positive number")
        return super().unbind(dim)

    def _cast(self, dtype: torch.dtype) -> Self:
        same_kind = self.dtype.is_floating_point == dtype.is_floating_point
        made = self._replaced(dtype=dtype, low=_clamped(self.low, dtype), high=_clamped(self.high, dtype))
        return made.of_domain(self.domain if same_kind else None)

    def __eq__(self, other: object) -> bool:
        other = torchrl_classes.comparable(other)
        return other == self if isinstance(other, Unbounded) else super().__eq__(other)


class _Bounds(ContinuousBox):
    """The interval of a `Bounded`; assigning a bound changes the spec."""

    def __init__(self, spec: Bounded) -> None:
        self._spec = spec

    @property
    def low(self) -> Tensor:
        return self._spec.changeable("low")

    @low.setter
    def low(self, value: Tensor) -> None:
        self._spec.low = value

    @property
    def high(self) -> Tensor:
        return self._spec.changeable("high")

    @high.setter
    def high(self, value: Tensor) -> None:
        self._spec.high = value

    @property
    def device(self) -> torch.device:
        return self.low.device

    def _name(self) -> str:
        return "ContinuousBox"

    def __repr__(self) -> str:
        return repr(ContinuousBox(self._spec.low, self._spec.high))

    def __reduce__(self) -> Any:
        return ContinuousBox, (self.low, self.high)


class BoundedContinuous(Bounded):
    """A `Bounded` with the domain "continuous", for any dtype."""

    domain = "continuous"


class BoundedDiscrete(Bounded):
    """A `Bounded` with the domain "discrete", for any dtype."""

    domain = "discrete"


_OF_DOMAIN |= {(Bounded, "continuous"): BoundedContinuous, (Bounded, "discrete"): BoundedDiscrete}


class Unbounded(_Interval):
    """All numbers of a dtype. An instance becomes an `UnboundedContinuous` or an `UnboundedDiscrete`.

    `rand` draws standard normal floats, non-negative integers and fair bools.

    Args:
        shape: (1,) by default.
        dtype: by default torch's default dtype.
        domain: "continuous" or "discrete"; by default it follows from the dtype.
    """

    def __init__(
        self, shape: Any = (1,), device: Any = None, dtype: torch.dtype | None = None, *, domain: str | None = None
    ) -> None:
        if dtype is None and (domain == "discrete" or isinstance(self, UnboundedDiscrete)):
            dtype = torch.int64
        self._set(shape, device, dtype)
        self.of_domain(domain)

    def _box(self) -> ContinuousBox:
        kind = self.dtype.to_real() if self.dtype.is_complex else self.dtype
        shape = shapes.concrete(self.shape)
        low, high = (torch.tensor(each, dtype=kind, device=self.device).expand(shape) for each in limits(kind))
        return ContinuousBox(low, high)

    def _set_space(self, box: object) -> None:
        if not isinstance(box, ContinuousBox) or not box.is_unbounded:
            raise ValueError(
                f"an Unbounded spec has all numbers of its dtype: replace it by a Bounded, got {box!r:.200}"
            )

    def _draw(self, lead: Size) -> Tensor:
        drawn = torch.empty((*lead, *shapes.concrete(self.shape)), dtype=self.dtype, device=self.device)
        return drawn.normal_() if drawn.is_floating_point() or drawn.is_complex() else drawn.random_()

    def _corrected(self, val: Tensor) -> Tensor:
        lead = val.shape[: val.ndim - self.ndim]
        return val.to(self.dtype).reshape(*lead, *shapes.concrete(self.shape))

    def _cast(self, dtype: torch.dtype) -> Self:
        return self._replaced(dtype=dtype).of_domain(None)

    def _is_like(self, other: Any) -> bool:
        return bool(self.shape == other.shape and self.dtype == other.dtype and self.device == other.device)

    def __eq__(self, other: object) -> bool:
        other = torchrl_classes.comparable(other)
        if isinstance(other, Bounded):
            return self._is_like(other) and ContinuousBox(other.low, other.high).is_unbounded
        return isinstance(other, Unbounded) and self._is_like(other)


class UnboundedContinuous(Unbounded):
    """All floating point numbers of a dtype."""


class UnboundedDiscrete(Unbounded):
    """All integers of a dtype, int64 by default."""


_OF_DOMAIN |= {(Unbounded, "continuous"): UnboundedContinuous, (Unbounded, "discrete"): UnboundedDiscrete}


def _renamed(old: str, given: Any, new: str, value: Any) -> Any:
    """The value of an argument that may be passed under its deprecated name."""
    if given is None:
        return value
    if value is not None:
        raise TypeError(f"{old} is the earlier name of {new}: give only one of them")
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=4)
    return given


def _clamped(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """The bound cast to a dtype, clamped to the range of the dtype."""
    if dtype.is_floating_point:
        return bound.to(dtype)
    pairs = zip(limits(bound.dtype), limits(dtype), strict=True)
    least, most = (pick(pair) for pick, pair in zip((max, min), pairs, strict=True))
    return bound.clamp(least, most).to(dtype)
