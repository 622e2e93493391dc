"""Returns of tensors, by the programs of `fbuf`.

All lines of time are laid one after the other, each closed by an end, and padded to a power of two: so there is one program
for each power of two, whatever the number of lines and their length.
"""

import functools
from typing import Any

import jax
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

import fbuf
from interop.data import bridge
from interop.data.keys import known_keys
from interop.host.compiled import _OPTIONS


def n_step(rewards: Tensor, ends: Tensor, gamma: float, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of up to n steps, how many these are (int64), and gamma to the power of it (float32).

    Rewards are [kinds, *lines, time], ends [*lines, time]; so are the returns, and the rest. Integers become floats. Rewards
    that require a gradient pass it on.
    """
    rewards, flat, stops = _prepared(rewards, ends)
    returns, steps, discount = _call(flat.detach(), stops, gamma, n)
    if flat.requires_grad and torch.is_grad_enabled():
        returns = _Linear.apply(flat, stops, gamma, n)
    return returns.reshape(rewards.shape), steps.reshape(ends.shape), discount.reshape(ends.shape)


def returns_to_go(rewards: Tensor, ends: Tensor, gamma: float) -> Tensor:
    """What is still to be earned, of the same shapes."""
    rewards, flat, stops = _prepared(rewards, ends)
    if flat.requires_grad and torch.is_grad_enabled():
        found: Tensor = _Linear.apply(flat, stops, gamma, None)
    else:
        (found,) = _call(flat.detach(), stops, gamma, None)
    return found.reshape(rewards.shape)


def along(reward: Tensor, done: Tensor, gamma: float, time: int) -> Tensor:
    """What is still to be earned along a dim; flags are as large as the rewards, or one for all that is behind that dim."""
    each = reward.shape[: time + 1]
    if done.shape == reward.shape and done.numel() > each.numel():
        return returns_to_go(reward.movedim(time, -1)[None], flags(done).movedim(time, -1), gamma)[0].movedim(-1, time)
    many = reward.flatten(time + 1).movedim(-1, 0) if reward.ndim > time + 1 else reward[None]
    found = returns_to_go(many, flags(done).reshape(each), gamma)
    return found.movedim(0, -1).reshape(reward.shape)


def entry(data: TensorDictBase, key: Any) -> Tensor:
    """An entry. KeyError, with those that there are, where it is missing."""
    found: Tensor | None = data.get(key, None)
    if found is None:
        raise KeyError(f"{key!r} not found in tensordict, which has {known_keys(data)}")
    return found


def as_discount(gamma: Any) -> float:
    """A discount as a float. TypeError for what is no number, ValueError for one outside of [0, 1]."""
    try:
        value = float(gamma)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"a discount must be one number, got {gamma!r}") from error
    if not 0 <= value <= 1:
        raise ValueError(f"a discount must be from 0 to 1, got {gamma}")
    return value


def flags(done: Tensor) -> Tensor:
    """Flags of any dtype as bool."""
    return done if done.dtype == torch.bool else done != 0


def _prepared(rewards: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rewards as floats, these as [kinds, items], and the ends as [items], of which each line has one."""
    if rewards.dtype not in bridge.DTYPES or rewards.dtype.is_complex:
        raise TypeError(f"rewards must be real numbers that JAX knows, got {rewards.dtype}")
    if not rewards.dtype.is_floating_point:
        rewards = rewards.to(torch.get_default_dtype())
    stops = ends.clone(memory_format=torch.contiguous_format)
    stops[..., -1:] = True
    return rewards, rewards.reshape(rewards.shape[0], -1) if rewards.numel() else rewards.flatten(1), stops.view(-1)


class _Linear(torch.autograd.Function):
    """Returns of up to n steps, or of all. What a reward gives to returns is what, in reversed time, a return takes."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, stops: Tensor, gamma: float, n: int | None) -> Tensor:
        ctx.save_for_backward(stops)
        ctx.gamma, ctx.n = gamma, n
        return _call(flat, stops, gamma, n)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        starts = ctx.saved_tensors[0].roll(1)  # the step behind an end; the last one is always an end
        found = _Linear.apply(grads[0].flip(-1), starts.flip(-1), ctx.gamma, ctx.n)
        return found.flip(-1), None, None, None


def _call(flat: Tensor, stops: Tensor, gamma: float, n: int | None) -> list[Tensor]:
    """The program for rewards [kinds, items] and ends [items], with tensors on their device."""
    device, count = flat.device, stops.shape[0]
    if count == 0 or flat.shape[0] == 0:
        few = (flat.new_empty(stops.shape, dtype=torch.int64), flat.new_empty(stops.shape, dtype=torch.float32))
        return [flat.clone(), *few]
    if bridge.jax_device(device) is None:  # what JAX does not see is computed on the host
        return [each.to(device) for each in _call(flat.cpu(), stops.cpu(), gamma, n)]
    with bridge.exact(device):
        found = _program(*(_padded(each, device) for each in (flat, stops)), np.float64(gamma), n)
    return [bridge.hand_over(each)[..., :count] for each in found]


def _padded(values: Tensor, device: torch.device) -> Any:
    """The values along the last dim, and zeros up to the next power of two, in memory of their own."""
    count = values.shape[-1]
    length = 1 << (count - 1).bit_length()
    if device.type != "cpu":
        return bridge.to_jax(torch.nn.functional.pad(values, (0, length - count)), copy=length == count)
    held = np.empty((*values.shape[:-1], length), bridge.DTYPES[values.dtype])
    view = held.view(np.int16) if values.dtype == torch.bfloat16 else held
    view[..., :count], view[..., count:] = bridge.numpy_view(values), 0
    return held


@functools.partial(jax.jit, compiler_options=_OPTIONS, static_argnums=3)
def _program(rewards: jax.Array, ends: jax.Array, gamma: jax.Array, n: int | None) -> tuple[jax.Array, ...]:
    """Returns of up to n steps, their number and discounts; for n=None returns to go."""
    if n is None:
        return (jax.vmap(lambda each: fbuf.returns_to_go(each, ends, gamma))(rewards),)

    def line(each: jax.Array) -> tuple[jax.Array, ...]:
        found = fbuf.n_step(each, ends, gamma, n)
        return found.returns, found.steps.astype(np.int64), found.discount.astype(np.float32)

    return jax.vmap(line, out_axes=(0, None, None))(rewards)
