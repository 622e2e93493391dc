"""Rewards as the rest of the rewards of the trajectory, when they are stored."""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from interop.data.keys import as_path
from interop.postprocs import returns
from interop.postprocs.transitions import rollout
from interop.transforms.multi_step import refuse_other_time
from interop.transforms.transform import Keys, Transform, as_keys


class Reward2GoTransform(Transform):
    """Stores the rest of the rewards of the trajectory in place of rewards: G[t] = r[t] + gamma * G[t + 1].

    Reading changes nothing. Time is the last dim of the tensordict. Trajectories end where ("next", done_key) is true, and
    with the data; each line of time must have an end, or rewards that are still to come would be missing.

    Args:
        gamma: discount, from 0 to 1.
        in_keys: of rewards; ("next", "reward") by default.
        out_keys: where they are stored; in place of the rewards by default.
        done_key: under "next".

    KeyError for a missing entry; RuntimeError where a line has no end, or flags do not fit the rewards; ValueError in a
    buffer whose data has time in another dim.
    """

    gamma: Tensor

    def __init__(
        self, gamma: float | Tensor | None = 1.0, in_keys: Keys = None, out_keys: Keys = None, done_key: Any = "done"
    ) -> None:
        found = [("next", "reward")] if in_keys is None else as_keys("in_keys", in_keys)
        stored = found if out_keys is None else as_keys("out_keys", out_keys)
        super().__init__(found, stored, in_keys_inv=stored, out_keys_inv=found)
        self.done_key = done_key
        value = returns.as_discount(1.0 if gamma is None else gamma)
        self.register_buffer("gamma", torch.tensor(value, dtype=torch.float64, device="cpu"))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The same: only what is written changes."""
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        raise ValueError(
            "Reward2GoTransform needs whole trajectories: it works where a buffer is written, in no environment"
        )

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        refuse_other_time(self)
        time = rollout(self, tensordict).ndim - 1
        done = returns.entry(tensordict, ("next", *as_path(self.done_key)))
        ends = returns.flags(done)
        if ends.numel() and not ends.any(time).all():
            raise RuntimeError(
                f"No episode ends found to calculate the reward to go: {('next', self.done_key)!r} needs a true step in "
                f"each of the lines along dim {time} of {list(ends.shape)}. Write whole episodes at once"
            )
        for source, stored in zip(self.out_keys_inv, self.in_keys_inv, strict=True):
            reward = returns.entry(tensordict, source)
            if ends.shape not in (reward.shape, reward.shape[: time + 1], (*reward.shape[: time + 1], 1)):
                raise RuntimeError(
                    f"{source!r} is {list(reward.shape)} and the flags of ends are {list(done.shape)}: one for each, or for "
                    "each step, is needed"
                )
            tensordict.set(stored, returns.along(reward, ends, float(self.gamma), time))
        return tensordict
