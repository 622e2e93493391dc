"""Rewards of whole trajectories in place of those of steps."""

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey

from interop.data.keys import as_path, checked_key
from interop.postprocs import returns
from interop.postprocs.batch_trajectories import SideBySide, StepMarks, keys_of


class DensifyReward(TensorDictModuleBase):
    """Replaces each reward by the return to the end of its trajectory: G[t] = r[t] + discount * G[t + 1], in place.

    A trajectory ends with the data, and where any entry of one value a step says so: where "done", ("next", "terminated") or
    ("next", "truncated") is true, before a true "is_init", and where ("collector", "traj_ids"), "traj_ids", "episode" or
    ("collector", "mask") changes. Interleaved ids are separate trajectories. Reward and "done", both [..., time, 1], are
    under "next". Integer rewards become floats. Gradients flow.

    Args:
        reward_key, done_key: under "next".
        reward_key_out: where the returns go, under "next"; `reward_key` by default.
        time_dim: the time dim of the reward; by default the dim that the tensordict names "time", or the last but one.
        discount: from 0 to 1.
        traj_key: an entry of ids, one value a step, besides the default ones.
        only_named_keys: only `done_key` and `traj_key` mark trajectories.

    KeyError for a missing entry, RuntimeError if reward and "done" differ in shape, ValueError for a wrong time dim.
    """

    def __init__(
        self,
        *,
        reward_key: NestedKey | None = "reward",
        done_key: NestedKey | None = "done",
        reward_key_out: Any = None,
        time_dim: int | None = None,
        discount: float = 1.0,
        traj_key: NestedKey | None = None,
        only_named_keys: bool = False,
    ) -> None:
        super().__init__()
        self.in_keys = [reward_key, done_key]
        self.out_keys = [reward_key if reward_key_out is None else reward_key_out]
        self.time_dim = time_dim
        self.discount = returns.as_discount(discount)
        self.traj_key = checked_key("traj_key", traj_key)
        self.only_named_keys = bool(only_named_keys)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The same tensordict."""
        reward, done = (returns.entry(tensordict, ("next", *as_path(key))) for key in self.in_keys)
        if reward.shape != done.shape:
            raise RuntimeError(
                f"{self.in_keys[0]!r} is {list(reward.shape)} and {self.in_keys[1]!r} is {list(done.shape)}: reward and "
                "done must have the same shape, [..., time, 1]"
            )
        time = self.time_dim
        names = tensordict.names
        if time is None:
            time = names.index("time") if "time" in names else -2
        if not -reward.ndim <= time < reward.ndim or time % reward.ndim == reward.ndim - 1:
            raise ValueError(f"dim {time} of a reward {list(reward.shape)} is not time: [..., time, 1] is needed")
        time %= reward.ndim
        keys = keys_of(self.traj_key, [("next", *as_path(self.in_keys[1]))], self.only_named_keys)
        steps = SideBySide.of(StepMarks.of(tensordict, time, keys, reward.shape[: time + 1]), reward.device)
        ends = steps.all_stops(returns.flags(done).to(reward.device))
        reward_to_go = steps.restored(returns.returns_to_go(steps.arranged(reward), ends, self.discount, time))
        tensordict.set(("next", *as_path(self.out_keys[0])), reward_to_go)
        return tensordict
