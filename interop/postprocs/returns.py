"""Returns: discounted sums of the rewards of a trajectory, of n steps or up to its end."""

import math
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import known_keys

Values = TypeVar("Values", Tensor, np.ndarray)


def n_step(rewards: Tensor, ends: Tensor, gamma: float, n: int, time: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of up to n steps along a dim, their number of steps (int64), and gamma to its power (float32).

    Ends are bools with the leading dims of the rewards; the last step is an end too. Integer rewards become floats.
    Gradients flow. O(steps * n).
    """
    length = ends.shape[time]
    single = _wide(rewards)
    going = alive = _going(ends, single)
    total = single.clone()
    steps = torch.ones_like(going)
    for i in range(1, min(n, length)):
        rest = length - i
        alive = alive.narrow(time, 0, rest) & going.narrow(time, i - 1, rest)
        later = _where(_trailing(alive, single), single.narrow(time, i, rest))
        total.narrow(time, 0, rest).add_(later, alpha=gamma**i)
        steps.narrow(time, 0, rest).sub_(alive)
    powers = torch.tensor([gamma**k for k in range(min(n, length) + 1)], dtype=torch.float32, device=ends.device)
    steps = steps.long()
    return total.to(_floating(rewards)), steps, powers.index_select(0, steps.view(-1)).view(steps.shape)


def returns_to_go(rewards: Tensor, ends: Tensor, gamma: float, time: int) -> Tensor:
    """Returns up to the end of the trajectory, G[t] = r[t] + gamma * G[t + 1], along a dim.

    `ends` marks ends by values that are not zero; it has the shape of the rewards, or one value a step. The last step is
    an end too. Integer rewards become floats. Gradients flow. O(steps * log(steps)).
    """
    ends = flags(ends if ends.shape == rewards.shape else ends.reshape(rewards.shape[: time + 1]))
    return _sums(_wide(rewards), ends, gamma, time).to(_floating(rewards))


def running_sums(rewards: Tensor, ends: Tensor, time: int) -> Tensor:
    """Sums of the rewards of each trajectory up to each step, this one included. Integers and bools become int64."""
    exact = rewards.is_floating_point() or rewards.is_complex()
    begins = ends.roll(1, time)  # in reversed time a trajectory ends with its first step
    wide = _wide(rewards) if exact else rewards.long()
    return _sums(wide.flip(time), begins.flip(time), 1, time).flip(time).to(rewards.dtype if exact else torch.int64)


def _sums(values: Tensor, ends: Tensor, gamma: float, time: int) -> Tensor:
    """Discounted sums up to the next end. Each pass adds sums over as many steps again, where no end is in between."""
    total = values.clone(memory_format=torch.contiguous_format).view(-1)
    stops = _trailing(ends, values).expand(values.shape).clone(memory_format=torch.contiguous_format)
    stops.movedim(time, 0)[-1:] = True  # the steps behind are of another lane
    step = math.prod(values.shape[time + 1 :])
    going = _going(stops.view(-1), values)
    if values.requires_grad or values.device.type != "cpu":
        _add_up(total, going, gamma, step, values.shape[time])
    else:  # on the same memory; calls of NumPy on some thousand values take a third of the time
        _add_up(total.numpy(), going.numpy(), gamma, step, values.shape[time])
    return total.view(values.shape)


def _add_up(total: Values, going: Values, gamma: float, step: int, count: int) -> None:
    """Turn values into their sums in place. They are flat, and those of one lane are `step` apart, `count` of them.

    `going`: 0 where a trajectory ends, all bits set elsewhere.
    """
    size = len(total)
    reach = step
    power = gamma
    alive = going[: size - step]  # no end within `reach`
    while reach < count * step:
        sums = total[: size - reach]
        sums += _where(alive, total[reach:]) * power
        alive = alive[:-reach] & alive[reach:]
        reach = 2 * reach
        power = power * power


def _going(ends: Tensor, values: Tensor) -> Tensor:
    """Integers as wide as the values: 0 at ends, all bits set elsewhere."""
    return ends.to(torch.int32 if values.element_size() == 4 else torch.int64) - 1


def _where(going: Values, values: Values) -> Values:
    """The values, 0 at ends. Without gradients by their bits, in a fifth of the time that `where` takes."""
    if isinstance(values, Tensor) and values.requires_grad:
        return values.where(going != 0, 0)
    return (values.view(going.dtype) & going).view(values.dtype)


def _trailing(flags: Tensor, values: Tensor) -> Tensor:
    """The flags with as many dims as the values."""
    return flags.reshape(*flags.shape, *(1 for _ in values.shape[flags.ndim :]))


def _floating(rewards: Tensor) -> torch.dtype:
    return rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()


def _wide(rewards: Tensor) -> Tensor:
    """Rewards in a dtype that sums are exact enough in. TypeError for complex numbers."""
    if rewards.is_complex():
        raise TypeError(f"rewards must be real numbers, got {rewards.dtype}")
    return rewards.to(torch.promote_types(_floating(rewards), torch.float32))


def entry(data: TensorDictBase, key: NestedKey) -> Tensor:
    """An entry; KeyError if it is missing."""
    tensor: Tensor | None = data.get(key, None)
    if tensor is None:
        raise KeyError(f"{key!r} not found in tensordict, which has {known_keys(data)}")
    return tensor


def as_discount(gamma: Any) -> float:
    """A discount as a float. TypeError for other types, ValueError outside of [0, 1]."""
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
