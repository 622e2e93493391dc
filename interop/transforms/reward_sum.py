"""Rewards summed up over each trajectory."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from interop.transforms.entries import broadcasts, expect_tensor, expect_tensordict, missing, put
from interop.transforms.order import follows_in_buffer
from interop.transforms.transform import Keys, Transform, as_keys


class RewardSum(Transform):
    """The sum of the rewards of each trajectory so far, this step's reward included.

    Time is the dim named "time". A step whose "done" is set is the last of its trajectory. The flag is looked for beside the
    reward or further out, under "next" first; "terminated" or "truncated" are taken where there is no "done", and without
    any of them all steps along time are one trajectory. Steps before the first one count for nothing. In a batch of a buffer
    the sum begins anew, too, with each step that was not stored right after the one before it.

    A large, infinite or NaN reward has no effect on other trajectories. Integers and bools are summed as int64.
    O(steps * log steps).

    Args:
        in_keys: the rewards; None for `["reward"]`. In a buffer of transitions these are `[("next", "reward")]`.
        out_keys: where the sums go; None for "episode_" and the name, in the same place.
        reset_keys, reward_spec: have no effect: they are for environments.
        time_dim: the dim of the tensordict that is time; None for the one named "time".
        done_keys: the flag that ends the trajectories, for each of `in_keys`; None to look for it.

    KeyError for missing rewards and flags; TypeError for rewards that are no tensors; ValueError for shapes that do not fit,
    and where no dim is time.
    """

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        reset_keys: Keys = None,
        *,
        reward_spec: bool = False,
        time_dim: int | None = None,
        done_keys: Keys = None,
    ) -> None:
        found = as_keys("in_keys", "reward" if in_keys is None else in_keys)
        super().__init__(found, [_renamed(key) for key in found] if out_keys is None else out_keys)
        self.reset_keys, self.reward_spec, self.time_dim = as_keys("reset_keys", reset_keys), reward_spec, time_dim
        self.done_keys = None if done_keys is None else as_keys("done_keys", done_keys)
        if self.done_keys is not None and len(self.done_keys) != len(found):
            raise ValueError(f"done_keys must be one for each of {found}, got {self.done_keys}")

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict("RewardSum", next_tensordict)
        time = self._time(next_tensordict)
        follows = follows_in_buffer(next_tensordict.batch_size, time)
        ready = []
        for number, (key, out_key) in enumerate(zip(self.in_keys, self.out_keys, strict=True)):
            reward = self._get(next_tensordict, key)
            if reward is None:
                continue
            expect_tensor("RewardSum", key, reward)
            done = _fitting(key, self._done(next_tensordict, number, key), reward)
            if follows is not None:
                done = (
                    torch.zeros(reward.shape, dtype=torch.bool, device=reward.device) if done is None else done.clone()
                )
                breaks = ~follows.movedim(-1, time).to(reward.device)
                breaks = breaks.reshape(*breaks.shape, *(1 for _ in reward.shape[breaks.ndim :]))
                done.narrow(time, 0, reward.shape[time] - 1).logical_or_(breaks)
            ready.append((out_key, _summed(reward, done, time)))
        put("RewardSum", next_tensordict, ready)
        return next_tensordict

    def _time(self, data: TensorDictBase) -> int:
        if self.time_dim is not None:
            if not -data.ndim <= self.time_dim < data.ndim:
                raise ValueError(f"time_dim {self.time_dim} is out of range for batch size {list(data.batch_size)}")
            return self.time_dim % data.ndim
        if "time" not in data.names:
            raise ValueError(
                f"no dim of batch size {list(data.batch_size)} is named 'time': use refine_names(), or give time_dim"
            )
        return data.names.index("time")

    def _done(self, data: TensorDictBase, number: int, key: NestedKey) -> Tensor | None:
        if self.done_keys is not None:
            found = data.get(self.done_keys[number], None)
            if found is None:
                raise missing("RewardSum", self.done_keys[number], data)
            return found
        path = (key,) if isinstance(key, str) else key
        outside = path[1:-1] if path[0] == "next" else path[:-1]
        places = [outside[:depth] for depth in range(len(outside), -1, -1)]
        for place in [*(("next", *each) for each in places), *(places if path[0] != "next" else ())]:
            done = _flag(data, place)
            if done is not None:
                return done
        if path[0] == "next" and _flag(data, ()) is not None:
            raise KeyError(
                f"RewardSum: {key!r}: there is a flag of before the step, and no ('next', 'done') of after it: add it, or "
                "give done_keys"
            )
        return None


def _renamed(key: NestedKey) -> Any:
    return f"episode_{key}" if isinstance(key, str) else (*key[:-1], f"episode_{key[-1]}")


def _flag(data: TensorDictBase, place: Sequence[str]) -> Tensor | None:
    done, terminated, truncated = (data.get((*place, name), None) for name in ("done", "terminated", "truncated"))
    if done is not None:
        return done
    if isinstance(terminated, Tensor) and isinstance(truncated, Tensor):
        return terminated.logical_or(truncated)
    return truncated if terminated is None else terminated


def _fitting(key: NestedKey, done: Tensor | None, reward: Tensor) -> Tensor | None:
    """The flags as bools of the shape of rewards."""
    if not isinstance(done, Tensor):
        return None
    flags = done.bool()
    if flags.ndim > reward.ndim and flags.shape[-1] == 1:
        flags = flags.squeeze(-1)
    flags = flags.reshape(*flags.shape, *(1 for _ in reward.shape[flags.ndim :]))
    if not broadcasts(flags.shape, reward.shape):
        raise ValueError(
            f"RewardSum: {key!r} is of shape {list(reward.shape)}, its done flag of shape {list(done.shape)} does not fit"
        )
    return flags.expand(reward.shape)


def _summed(reward: Tensor, done: Tensor | None, time: int) -> Tensor:
    """Sums along a dim that begin anew after each flag."""
    if not (reward.is_floating_point() or reward.is_complex()):
        reward = reward.long()
    wide = reward.float() if reward.dtype in (torch.float16, torch.bfloat16) else reward
    steps = reward.shape[time]
    if done is None or steps < 2:
        return wide.cumsum(time).to(reward.dtype)
    # Each pass adds sums over as many steps again, where no trajectory begins in between.
    sums, begun = wide.movedim(time, 0), done.movedim(time, 0)
    begun = torch.cat([torch.ones_like(begun[:1]), begun[:-1]])
    reach = 1
    while reach < steps:
        before = torch.where(begun[reach:], torch.zeros_like(sums[:-reach]), sums[:-reach])
        sums = torch.cat([sums[:reach], sums[reach:] + before])
        begun = torch.cat([begun[:reach], begun[reach:] | begun[:-reach]])
        reach *= 2
    return sums.movedim(0, time).to(reward.dtype)
