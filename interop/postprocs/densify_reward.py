"""Sparse rewards as the rest of the rewards of the trajectory."""

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from interop.data.keys import as_path
from interop.postprocs import returns


class DensifyReward(TensorDictModuleBase):
    """The rest of the rewards of the trajectory for each step: G[t] = r[t] + discount * G[t + 1], in place.

    A trajectory ends where "done" is true; steps behind the last end are summed up to the end of the data. Reward and
    "done", both [..., time, 1], are under "next". Integer rewards give floats, others those of their dtype. Gradients flow.
    O(steps).

    Args:
        reward_key, done_key: under "next".
        reward_key_out: where the result goes, under "next"; in place of the reward by default.
        time_dim: the dim of time of the reward; by default the one that the tensordict names "time", or the one before the
            last.
        discount: from 0 to 1.

    KeyError for a missing entry, RuntimeError for a reward and a "done" of different shapes, ValueError for a wrong dim of
    time.
    """

    def __init__(
        self,
        *,
        reward_key: Any = "reward",
        done_key: Any = "done",
        reward_key_out: Any = None,
        time_dim: int | None = None,
        discount: float = 1.0,
    ) -> None:
        super().__init__()
        self.in_keys = [reward_key, done_key]
        self.out_keys = [reward_key if reward_key_out is None else reward_key_out]
        self.time_dim, self.discount = time_dim, returns.as_discount(discount)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The same tensordict."""
        reward, done = (returns.entry(tensordict, ("next", *as_path(key))) for key in self.in_keys)
        if reward.shape != done.shape:
            raise RuntimeError(
                f"{self.in_keys[0]!r} is {list(reward.shape)} and {self.in_keys[1]!r} is {list(done.shape)}: reward and "
                "done must have the same shape, [..., time, 1]"
            )
        found = returns.along(reward, done, self.discount, self._time(tensordict, reward))
        tensordict.set(("next", *as_path(self.out_keys[0])), found)
        return tensordict

    def _time(self, data: TensorDictBase, reward: Tensor) -> int:
        time, named = self.time_dim, data.names
        if time is None:
            time = named.index("time") if "time" in named else -2
        if not -reward.ndim <= time < reward.ndim or (time % reward.ndim == reward.ndim - 1):
            raise ValueError(f"dim {time} of a reward {list(reward.shape)} is not time: it is to be [..., time, 1]")
        return time % reward.ndim
