"""Transforms of rewards and other numbers, each on its own: bounds and signs."""

import math
from typing import Any

import torch
from torch import Tensor

from interop.transforms.entries import EntriesTransform
from interop.transforms.transform import Keys


class RewardClipping(EntriesTransform):
    """Rewards between two bounds.

    Integers stay integers between integer bounds, and come out in a floating dtype otherwise. A bound beyond all numbers of
    their dtype is none; ValueError where it leaves no number of it. The bounds are buffers of the module.

    Args:
        clamp_min: the lower bound, a number or a tensor; None for none.
        clamp_max: the upper bound; None for none.
        in_keys: the rewards; None for `["reward"]`.
        out_keys: where they go; None for `in_keys`.

    TypeError for what is no number, ValueError for no bound, NaN, and a lower one above the upper one.
    """

    def __init__(
        self,
        clamp_min: float | Tensor | None = None,
        clamp_max: float | Tensor | None = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
    ) -> None:
        super().__init__("reward" if in_keys is None else in_keys, out_keys)
        if clamp_min is None and clamp_max is None:
            raise ValueError("give clamp_min, clamp_max or both")
        low, high = _bound("clamp_min", clamp_min), _bound("clamp_max", clamp_max)
        if low is not None and high is not None and bool((low.to(high.device) > high).any()):
            raise ValueError(f"clamp_min must not be above clamp_max, got {clamp_min} and {clamp_max}")
        self.register_buffer("clamp_min", low)
        self.register_buffer("clamp_max", high)

    clamp_min: Tensor | None
    clamp_max: Tensor | None

    def _apply_transform(self, reward: Tensor) -> Tensor:
        return _clamped(reward, self.clamp_min, self.clamp_max)

    def __repr__(self) -> str:
        bounds = (f"{name}={_number(each)}" for name, each in self.named_buffers())
        return f"{type(self).__name__}({', '.join(bounds)}, keys={self.in_keys})"


class ClipTransform(EntriesTransform):
    """Entries between two bounds, when they are read or written.

    Integers come out in the default dtype of when this was made. The bounds are buffers of the module.

    Args:
        in_keys: entries to clip when read.
        out_keys: where they go; None for `in_keys`.
        in_keys_inv: entries to clip when written: their names in the storage.
        out_keys_inv: their names outside; None for `in_keys_inv`.
        low: the lower bound, a number; None for none.
        high: the upper bound; None for none.

    TypeError for no bound or what is no number, ValueError for NaN and for a lower one that is not below the upper one.
    """

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        *,
        low: float | Tensor | None = None,
        high: float | Tensor | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        if low is None and high is None:
            raise TypeError("give low, high or both")
        bounds = _bound("low", low), _bound("high", high)
        for name, each in zip(("low", "high"), bounds, strict=True):
            if each is not None and each.numel() != 1:
                raise TypeError(f"{name} must be one number, got a tensor of shape {list(each.shape)}")
            self.register_buffer(name, None if each is None else each.reshape(()).to(torch.get_default_dtype()))
        if self.low is not None and self.high is not None and not bool(self.low < self.high):
            raise ValueError(f"low must be below high, got {low} and {high}")

    low: Tensor | None
    high: Tensor | None

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return _clamped(obs, self.low, self.high)

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return _clamped(state, self.low, self.high)


class BinarizeReward(EntriesTransform):
    """Whether rewards are above 0, as int8 of 1 and 0.

    Args:
        in_keys: the rewards, [..., 1]; None for `["reward"]`.
        out_keys: where they go; None for `in_keys`.

    ValueError for rewards whose last dim is not of size one.
    """

    def __init__(self, in_keys: Keys = None, out_keys: Keys = None) -> None:
        super().__init__("reward" if in_keys is None else in_keys, out_keys)

    def _apply_transform(self, reward: Tensor) -> Tensor:
        if reward.shape[-1:] != (1,):
            raise ValueError(f"rewards must be [..., 1], got {list(reward.shape)}")
        return (reward > 0).to(torch.int8)


class SignTransform(EntriesTransform):
    """The signs of entries, -1, 0 and 1 in their dtype, when they are read or written.

    Args:
        in_keys: entries to take the sign of when read.
        out_keys: where it goes; None for `in_keys`.
        in_keys_inv: entries to take it of when written: their names in the storage.
        out_keys_inv: their names outside; None for `in_keys_inv`.
    """

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.sign()

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return state.sign()


def _bound(name: str, value: Any) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{name} must be a number, got nan")
        return torch.as_tensor(value, device="cpu")
    if value.is_complex():
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not value.is_meta and bool(value.isnan().any()):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return value.detach()


def _clamped(value: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    low, high = (None if bound is None else bound.to(value.device) for bound in (low, high))
    for bound in (low, high):
        if bound is not None and bound.ndim and torch.broadcast_shapes(bound.shape, value.shape) != value.shape:
            raise ValueError(f"bounds of shape {list(bound.shape)} do not fit values of shape {list(value.shape)}")
    if not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool:
        low, high = _held("lower", low, value.dtype), _held("upper", high, value.dtype)
    return value if low is None and high is None else value.clamp(low, high)


def _held(kind: str, bound: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A bound that is an integer, as one of the dtype, where torch would have it wrap around; None for no bound there."""
    if bound is None or bound.ndim or bound.is_floating_point():
        return bound
    number, held = int(bound), torch.iinfo(dtype)
    if held.min <= number <= held.max:
        return bound
    if (number < held.min) == (kind == "lower"):
        return None
    raise ValueError(f"the {kind} bound {number} is not of {dtype}, and nor is what is clipped to it: cast the values")


def _number(value: Tensor) -> str:
    return f"{value.item():4.4f}" if value.numel() == 1 else str(value.tolist())
