"""Transforms of values, each entry on its own: bounds, signs, actions, functions; and a check that they are finite."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torch.nn import functional

from interop.data.arguments import whole
from interop.transforms.transform import Keys, TensorTransform, Transform, expect_tensordict, tensors


class RewardClipping(TensorTransform):
    """Clips rewards between two bounds, which are buffers of the module.

    Integers stay integers between integer bounds, and become floats otherwise. A bound beyond the range of an integer dtype
    counts as the end of the range.

    Args:
        clamp_min: the lower bound, a number or a tensor; None for none.
        clamp_max: the upper bound; None for none.

    TypeError for a bound that is no number; ValueError for no bound, NaN, and a lower bound above the upper one.
    """

    default_key = "reward"
    keeps_shape = True
    clamp_min: Tensor | None
    clamp_max: Tensor | None

    def __init__(
        self,
        clamp_min: float | Tensor | None = None,
        clamp_max: float | Tensor | None = None,
        in_keys: Keys = None,
        out_keys: Keys = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        if clamp_min is None and clamp_max is None:
            raise ValueError("give clamp_min, clamp_max or both")
        low = _bound("clamp_min", clamp_min)
        high = _bound("clamp_max", clamp_max)
        if low is not None and high is not None and bool((low.to(high.device) > high).any()):
            raise ValueError(f"clamp_min must not be above clamp_max, got {clamp_min} and {clamp_max}")
        self.register_buffer("clamp_min", low)
        self.register_buffer("clamp_max", high)

    def _apply_transform(self, reward: Tensor) -> Tensor:
        return reward.clamp(_bound_for(self.clamp_min, reward), _bound_for(self.clamp_max, reward))

    def __repr__(self) -> str:
        bounds = (f"{name}={_number(buffer)}" for name, buffer in self.named_buffers())
        return f"{type(self).__name__}({', '.join(bounds)}, keys={self.in_keys})"


class ClipTransform(TensorTransform):
    """Clips entries between two bounds, when they are read or written. The bounds are buffers of the module.

    Integers become floats, of the default dtype at construction.

    Args:
        low: the lower bound, a number; None for none.
        high: the upper bound; None for none.

    TypeError for no bound or one that is no number; ValueError for NaN and a lower bound that is not below the upper one.
    """

    keeps_shape = True
    low: Tensor | None
    high: Tensor | None

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
        for name, bound in (("low", _bound("low", low)), ("high", _bound("high", high))):
            if bound is not None and bound.numel() != 1:
                raise TypeError(f"{name} must be one number, got a tensor of shape {list(bound.shape)}")
            self.register_buffer(name, None if bound is None else bound.reshape(()).to(torch.get_default_dtype()))
        if self.low is not None and self.high is not None and not bool(self.low < self.high):
            raise ValueError(f"low must be below high, got {low} and {high}")

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.clamp(_bound_for(self.low, obs), _bound_for(self.high, obs))

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return self._apply_transform(state)


class BinarizeReward(TensorTransform):
    """Replaces rewards [..., 1] by whether they are above 0, as int8 of 1 and 0. `in_keys` are ["reward"] by default."""

    default_key = "reward"

    def __init__(self, in_keys: Keys = None, out_keys: Keys = None) -> None:
        super().__init__(in_keys, out_keys)

    def _apply_transform(self, reward: Tensor) -> Tensor:
        if reward.shape[-1:] != (1,):
            raise ValueError("rewards must be [..., 1]")
        return (reward > 0).to(torch.int8)


class SignTransform(TensorTransform):
    """Replaces entries by their signs, -1, 0 and 1 in their dtype: `in_keys` when read, `out_keys_inv` when written."""

    def _apply_transform(self, obs: Tensor) -> Tensor:
        return obs.sign()

    def _inv_apply_transform(self, state: Tensor) -> Tensor:
        return self._apply_transform(state)


class DiscreteActionProjection(TensorTransform):
    """Reads one-hot actions of a small set as those of a larger one; redraws actions outside of the small set when written.

    Reading gives actions `max_actions` places, writing `num_actions_effective`. A written action beyond these is replaced
    by a random one of them, of torch's generator. The result is int64.

    Args:
        num_actions_effective: number of actions in the storage.
        max_actions: number of actions outside.
        action_key: the actions.
        include_forward: whether reading changes them.

    ValueError for more effective actions than actions, and for actions with another number of places.
    """

    def __init__(
        self,
        num_actions_effective: int,
        max_actions: int,
        action_key: NestedKey = "action",
        include_forward: bool = True,
    ) -> None:
        super().__init__([action_key] if include_forward else [], None, [action_key], None)
        self.num_actions_effective = whole("num_actions_effective", num_actions_effective)
        self.max_actions = whole("max_actions", max_actions)
        if num_actions_effective > max_actions:
            raise ValueError(
                f"num_actions_effective must be at most max_actions, got {num_actions_effective} of {max_actions}"
            )

    def on_step(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict  # an environment returns no actions

    def _apply_transform(self, action: Tensor) -> Tensor:
        if not action.ndim or not 1 <= action.shape[-1] <= self.max_actions:
            raise ValueError(f"one-hot actions of at most {self.max_actions} places are needed")
        return functional.one_hot(_chosen(action), self.max_actions)

    def _inv_apply_transform(self, action: Tensor) -> Tensor:
        if action.shape[-1:] != (self.max_actions,):
            raise ValueError(f"one-hot actions of {self.max_actions} places are needed")
        chosen = _chosen(action)
        drawn = torch.randint(self.num_actions_effective, chosen.shape, device=chosen.device)
        chosen = torch.where(chosen < self.num_actions_effective, chosen, drawn)
        return functional.one_hot(chosen, self.num_actions_effective)

    def __repr__(self) -> str:
        counts = f"num_actions_effective={self.num_actions_effective}, max_actions={self.max_actions}"
        return f"{type(self).__name__}({counts}, in_keys_inv={self.in_keys_inv})"


class UnaryTransform(Transform):
    """Applies a function to single entries: `torch.Tensor.float` to have them as float32, for example.

    Args:
        in_keys, out_keys: arguments of `fn` when data is read, and where its results go.
        in_keys_inv, out_keys_inv: where the results of `inv_fn` go when data is written, and its arguments; `in_keys_inv`
            by default.
        fn: takes an entry, text as text, and returns a tensor, a tensordict or another object. A lambda cannot be pickled.
        inv_fn: the same for writing; `fn` by default.

    TypeError for a function that cannot be called.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        *,
        fn: Callable[[Any], Any],
        inv_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, in_keys_inv if out_keys_inv is None else out_keys_inv)
        inv_fn = fn if inv_fn is None else inv_fn
        for name, function in (("fn", fn), ("inv_fn", inv_fn)):
            if not callable(function):
                raise TypeError(f"{name} must be callable, got {function!r}")
        self._fn = fn
        self._inv_fn = inv_fn

    def _get(self, data: TensorDictBase, key: NestedKey) -> Any:
        value = super()._get(data, key)
        if isinstance(value, NonTensorData):
            return value.data
        return value.tolist() if isinstance(value, NonTensorStack) else value

    def _apply_transform(self, obs: Any) -> Any:
        return self._fn(obs)

    def _inv_apply_transform(self, state: Any) -> Any:
        return self._inv_fn(state)


class FiniteTensorDictCheck(Transform):
    """Raises ValueError for data that is read with infinities or NaNs; appended with `invert=True`, for data written."""

    def __init__(self) -> None:
        super().__init__()

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict(type(self).__name__, next_tensordict)
        checks = [
            (key, value.isfinite().all())
            for _, _, key, value in tensors(next_tensordict)
            if value.is_floating_point() or value.is_complex()
        ]
        # One transfer from the device, not one for each entry.
        if checks and not bool(torch.stack([finite.to(checks[0][1].device) for _, finite in checks]).all()):
            wrong = ", ".join(dict.fromkeys(repr(key) for key, finite in checks if not finite))
            raise ValueError(f"non-finite values: infinities or NaNs in {wrong}")
        return next_tensordict


def _chosen(action: Tensor) -> Tensor:
    """The number of each one-hot action."""
    return (action.byte() if action.dtype == torch.bool else action).argmax(-1)


def _bound(name: str, value: Any) -> Tensor | None:
    """A bound as a tensor. TypeError or ValueError for a value that is no number."""
    if value is None:
        return None
    if not isinstance(value, int | float | Tensor) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    bound = torch.as_tensor(value, device=None if isinstance(value, Tensor) else "cpu").detach()
    if bool(bound.isnan().any()):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return bound


def _bound_for(bound: Tensor | None, value: Tensor) -> Tensor | None:
    """A bound on the device of values. Integers are clipped to the range of their dtype, where torch would wrap around."""
    if bound is None:
        return None
    of_integers = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    if of_integers and not bound.is_floating_point():
        integers = torch.iinfo(value.dtype)
        bound = bound.long().clamp(integers.min, integers.max).to(value.dtype)
    return bound.to(value.device)


def _number(value: Tensor) -> str:
    return f"{value.item():4.4f}" if value.numel() == 1 else str(value.tolist())
