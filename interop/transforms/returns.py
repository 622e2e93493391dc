"""Returns of trajectories: n-step transitions and returns to go when data is stored, sums of rewards when it is read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from fbuf import checks
from interop.data.keys import as_path, checked_key
from interop.data.trajectory_keys import TrajectoryKeys
from interop.postprocs import returns
from interop.postprocs.batch_trajectories import SideBySide, StepMarks, keys_of
from interop.postprocs.multi_step import RolloutKeys, rollout
from interop.transforms.order import breaks_in_buffer
from interop.transforms.transform import Keys, Transform, as_keys, expect_tensor, expect_tensordict, put
from interop.transforms.waiting_frames import WaitingFrames

_STATE = {"n_steps", "gamma", "frames", "stored", "interleaved"}


class MultiStepTransform(Transform):
    """Stores transitions of n steps, as `MultiStep` makes them, of a stream that comes in pieces.

    Time is the last dim of the data; each lane of the other dims is a stream. The last `n_steps` frames wait for those that
    follow: after k frames max(0, k - n_steps) are stored, however the stream is cut. `inv` returns None if there are none
    yet. Reading changes nothing. The waiting frames are part of `state_dict()`, of checkpoints and of the transactions of
    the buffer.

    The frames of several trajectories may be interleaved in a lane, such as rows [environments] that are written step by
    step with ("collector", "traj_ids"). Each trajectory is then a stream of its own. A frame is stored as soon as its
    `n_steps` steps are known, or its trajectory has ended or can no longer be continued: by a second row of another
    trajectory since its last one, or 65,536 rows behind it. As long as one row each of several trajectories is known, they
    may be interleaved, and a frame waits longer than for `n_steps` frames. Of several lanes as many frames are stored as of
    the one with the fewest.

    Args:
        n_steps: at least 1. It may be set later, for the next write.
        gamma: discount, from 0 to 1.
        reward_keys, done_key, done_keys: under "next", as for `MultiStep`.
        mask_key: of the mask, which is False for padding.
        last_flags: as for `MultiStep`.
        traj_key, only_named_keys: as for `MultiStep`.

    Frames that do not fit the waiting ones are refused: KeyError for other entries, TypeError for another dtype or entries
    that are no tensors, ValueError for another shape, and in a buffer whose data has time in another dim. Waiting frames
    move to the device of new ones.
    """

    keeps = True

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Any = None,
        done_key: NestedKey | None = None,
        done_keys: Any = None,
        mask_key: NestedKey | None = None,
        last_flags: bool = False,
        traj_key: NestedKey | None = None,
        only_named_keys: bool = False,
    ) -> None:
        super().__init__()
        self.n_steps = n_steps
        self.gamma = gamma
        self.reward_keys: Any = ["reward"] if reward_keys is None else reward_keys
        self.done_key: Any = "done" if done_key is None else done_key
        self.done_keys: Any = ["done", "truncated", "terminated"] if done_keys is None else done_keys
        self.mask_key: Any = "mask" if mask_key is None else mask_key
        self.last_flags = last_flags
        self.traj_key = checked_key("traj_key", traj_key)
        self.only_named_keys = bool(only_named_keys)
        self._waiting = WaitingFrames()

    @property
    def n_steps(self) -> int:
        """The largest number of steps of a transition."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        self._n_steps = checks.as_int("n_steps", value)

    @property
    def gamma(self) -> float:
        """The discount."""
        return self._gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self._gamma = returns.as_discount(value)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict

    def on_step(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise ValueError("MultiStepTransform needs the following steps: it works in buffers, not in environments")

    def inv(self, tensordict: TensorDictBase) -> Any:
        """The complete transitions; None if there are none. The tensordict is not changed."""
        _refuse_other_time(self)
        new = rollout(self, tensordict)
        keys = RolloutKeys.of(self)
        n = self._n_steps
        transitions, self._waiting = self._waiting.followed_by(new, keys, self._gamma, n)
        return transitions

    def flush(self) -> TensorDictBase | None:
        """The transitions of the waiting frames as the end of the stream; None if no frames wait. None wait afterwards."""
        transitions = self._waiting.as_end(RolloutKeys.of(self), self._gamma, self._n_steps)
        self._waiting = WaitingFrames()
        return transitions

    def snapshot(self) -> Any:
        return self._waiting

    def restore(self, snapshot: Any) -> None:
        self._waiting = snapshot

    def forget(self) -> None:
        self._waiting = WaitingFrames()

    def get_extra_state(self) -> dict[str, Any]:
        """n_steps, gamma, and the waiting frames as plain values."""
        return {"n_steps": self._n_steps, "gamma": self._gamma, **self._waiting.as_plain()}

    def set_extra_state(self, state: Any) -> None:
        """Continue from a saved state. TypeError or ValueError for a wrong one."""
        waiting = {"stored": None, "interleaved": False}  # not in states of earlier versions
        if not isinstance(state, Mapping) or set(state) | set(waiting) != _STATE:
            raise TypeError(f"the state of a MultiStepTransform has {', '.join(sorted(_STATE))}, got {state!r}")
        n = checks.as_int("n_steps", state["n_steps"])
        gamma = returns.as_discount(state["gamma"])
        frames = WaitingFrames.from_plain({**waiting, **state})
        self._n_steps = n
        self._gamma = gamma
        self._waiting = frames

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_steps={self._n_steps}, gamma={self._gamma})"


class Reward2GoTransform(Transform):
    """Stores returns to the end of the trajectory in place of rewards: G[t] = r[t] + gamma * G[t + 1].

    Reading changes nothing. Time is the last dim of the tensordict. A trajectory ends with the data, and where any entry
    says so, as for `MultiStep`; interleaved ids are separate trajectories. Each line of time must have an end, by a flag or
    because another trajectory begins: otherwise rewards that are still to come would be missing.

    Args:
        gamma: discount, from 0 to 1.
        in_keys: of rewards; ("next", "reward") by default.
        out_keys: where the returns are stored; in place of the rewards by default.
        done_key: under "next".
        traj_key: an entry of ids, one value a step, besides the default ones.
        only_named_keys: only `done_key` and `traj_key` mark trajectories.

    KeyError for a missing entry, and for a missing `done_key` where nothing else marks trajectories. RuntimeError for a line
    without an end, and for flags that do not fit the rewards.
    ValueError in a buffer whose data has time in another dim.
    """

    gamma: Tensor

    def __init__(
        self,
        gamma: float | Tensor | None = 1.0,
        in_keys: Keys = None,
        out_keys: Keys = None,
        done_key: NestedKey | None = "done",
        *,
        traj_key: NestedKey | None = None,
        only_named_keys: bool = False,
    ) -> None:
        keys = [("next", "reward")] if in_keys is None else as_keys("in_keys", in_keys)
        stored = keys if out_keys is None else as_keys("out_keys", out_keys)
        super().__init__(keys, stored, in_keys_inv=stored, out_keys_inv=keys)
        self.done_key = done_key
        self.traj_key = checked_key("traj_key", traj_key)
        self.only_named_keys = bool(only_named_keys)
        value = returns.as_discount(1.0 if gamma is None else gamma)
        self.register_buffer("gamma", torch.tensor(value, dtype=torch.float64, device="cpu"))

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict

    def on_step(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise ValueError("Reward2GoTransform needs whole trajectories: it works in buffers, not in environments")

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        _refuse_other_time(self)
        time = rollout(self, tensordict).ndim - 1
        path = ("next", *as_path(self.done_key))
        keys = keys_of(self.traj_key, [path], self.only_named_keys)
        marks = StepMarks.of(tensordict, time, keys)
        is_optional = path == ("next", "done") and any(marks.keys.groups()[:3])
        done = tensordict.get(path, None) if is_optional else returns.entry(tensordict, path)
        device = tensordict.get(self.out_keys_inv[0], done).device
        if done is None:
            done = torch.zeros(tensordict.batch_size, dtype=torch.bool, device=device)
        steps = SideBySide.of(marks, device)
        flags = returns.flags(done)
        self._refuse_endless(steps, flags, path)
        ends = steps.all_stops(flags)
        for source, stored in zip(self.out_keys_inv, self.in_keys_inv, strict=True):
            reward = returns.entry(tensordict, source)
            if ends.shape not in (reward.shape, reward.shape[: time + 1], (*reward.shape[: time + 1], 1)):
                raise RuntimeError(
                    f"{source!r} is {list(reward.shape)} and the flags of ends are {list(ends.shape)}: one for each, or for "
                    "each step, is needed"
                )
            rewards_to_go = returns.returns_to_go(steps.arranged(reward), ends, float(self.gamma), time)
            tensordict.set(stored, steps.restored(rewards_to_go))
        return tensordict

    def _refuse_endless(self, steps: SideBySide, done: Tensor, path: tuple[Any, ...]) -> None:
        """RuntimeError for a line of time without an end before or at its last step."""
        time = steps.marks.time
        if not done.numel():
            return
        flagged = steps.marks.ends
        divided = None
        if flagged is not None:
            divided = flagged.any(time)
        if divided is None or not divided.all():  # another trajectory that follows is an end, too
            follows = steps.stops.narrow(time, 0, steps.stops.shape[time] - 1).any(time)
            divided = follows if divided is None else divided | follows.to(divided.device)
        if done.numel() > steps.stops.numel():
            ended = done.any(time)
            divided = (
                divided.reshape([*divided.shape, *(1 for _ in ended.shape[divided.ndim :])]).to(ended.device) | ended
            )
        if not divided.all():
            raise RuntimeError(
                f"No episode ends found to calculate the reward to go: {path!r} needs a true step in each of the lines "
                f"along dim {time} of {list(done.shape)}. Write whole episodes at once"
            )


class RewardSum(Transform):
    """The sum of the rewards of each trajectory so far, with the reward of the step itself.

    Time is the dim named "time". A step whose "done" is true is the last of its trajectory. The flag is found beside the
    reward or further out, under "next" first; "terminated" or "truncated" stand in for a missing "done". A trajectory also
    ends where another entry says so: at ("next", "terminated") or ("next", "truncated"), before a true "is_init", and where
    ("collector", "traj_ids"), "traj_ids", "episode" or ("collector", "mask") changes. Interleaved ids are separate
    trajectories. Without any of them all steps along time are one trajectory. In a batch of a buffer, a sum also begins at
    each step that was not stored right after the previous one of its trajectory.

    A large, infinite or NaN reward does not change the sums of other trajectories. Sums of integers and bools are int64.
    O(steps * log steps).

    Args:
        in_keys: rewards; ["reward"] by default. In a buffer of transitions these are [("next", "reward")].
        out_keys: where the sums go; beside the rewards as "episode_<name>" by default.
        time_dim: the time dim of the tensordict, if none is named "time".
        traj_key: an entry of ids, one value a step, besides the default ones.
        only_named_keys: only `traj_key` and the flag that is found beside the reward mark trajectories.

    KeyError for missing rewards and flags, TypeError for rewards that are no tensors, ValueError for shapes that do not fit
    and for data without a time dim.
    """

    def __init__(
        self,
        in_keys: Keys = None,
        out_keys: Keys = None,
        *,
        time_dim: int | None = None,
        traj_key: NestedKey | None = None,
        only_named_keys: bool = False,
    ) -> None:
        keys = as_keys("in_keys", "reward" if in_keys is None else in_keys)
        beside = [(*as_path(key)[:-1], f"episode_{as_path(key)[-1]}") for key in keys]
        super().__init__(keys, beside if out_keys is None else out_keys)
        self.time_dim = time_dim
        self.traj_key = checked_key("traj_key", traj_key)
        self.only_named_keys = bool(only_named_keys)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        expect_tensordict("RewardSum", next_tensordict)
        time = self._time(next_tensordict)
        if self.only_named_keys and self.traj_key is None:
            keys = TrajectoryKeys((), (), (), ())
        else:
            keys = keys_of(self.traj_key, (), self.only_named_keys)
        marks = StepMarks.of(next_tensordict, time, keys)
        breaks = breaks_in_buffer(marks)
        orders = dict[torch.device, SideBySide]()
        ready = []
        for key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            reward = self._get(next_tensordict, key)
            if reward is None:
                continue
            expect_tensor("RewardSum", key, reward)
            if reward.device not in orders:
                orders[reward.device] = SideBySide.of(marks, reward.device, breaks=breaks)
            steps = orders[reward.device]
            ends = steps.with_stops(_ends_of(key, _done(next_tensordict, key), reward))
            ready.append((out_key, steps.restored(returns.running_sums(steps.arranged(reward), ends, time))))
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


def _done(data: TensorDictBase, key: NestedKey) -> Tensor | None:
    """The flag of the ends of trajectories: beside the reward or further out, under "next" first."""
    path = as_path(key)
    is_after = path[0] == "next"
    around = path[1:-1] if is_after else path[:-1]
    places = [around[:depth] for depth in range(len(around), -1, -1)]
    for place in [*(("next", *done_path) for done_path in places), *(() if is_after else places)]:
        done = _flag(data, place)
        if done is not None:
            return done
    if is_after and _flag(data, ()) is not None:
        raise KeyError(
            f"RewardSum: {key!r}: there is a flag of before the step, and no ('next', 'done') of after it: add it"
        )
    return None


def _flag(data: TensorDictBase, place: Sequence[str]) -> Tensor | None:
    done, terminated, truncated = (data.get((*place, name), None) for name in ("done", "terminated", "truncated"))
    if done is not None:
        return done
    if isinstance(terminated, Tensor) and isinstance(truncated, Tensor):
        return terminated.logical_or(truncated)
    return truncated if terminated is None else terminated


def _ends_of(key: NestedKey, done: Tensor | None, reward: Tensor) -> Tensor:
    """The flags as new bools of the shape of the rewards."""
    if done is None:
        return torch.zeros(reward.shape, dtype=torch.bool, device=reward.device)
    flags = done.squeeze(-1) if done.ndim > reward.ndim and done.shape[-1] == 1 else done
    flags = flags.reshape(*flags.shape, *(1 for _ in reward.shape[flags.ndim :]))
    try:
        return flags.bool().expand(reward.shape).clone()
    except RuntimeError as error:
        raise ValueError(
            f"RewardSum: {key!r} is of shape {list(reward.shape)}, its done flag of shape {list(done.shape)} does not fit"
        ) from error


def _refuse_other_time(transform: Transform) -> None:
    """ValueError if the buffer is extended along another dim than the last, which is taken for time."""
    buffer = transform.container
    dim = getattr(buffer, "dim_extend", None)
    if dim is not None and dim < buffer.storage.ndim - 1:
        raise ValueError(
            f"{type(transform).__name__} takes the last dim of what is written for time, and this buffer is extended along "
            f"dim {dim} of {buffer.storage.ndim}: build it with dim_extend={buffer.storage.ndim - 1}, and write [..., time]"
        )
