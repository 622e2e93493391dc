"""Rollouts as transitions of n steps, before they are stored."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from fbuf import checks
from interop.postprocs import returns
from interop.postprocs.transitions import Keys, rollout, transitions


class MultiStep(nn.Module):
    """n-step returns of a rollout [*batch, time] (Sutton 1988): each step is taken together with those that follow.

    A transition from step t has k = min(n_steps, steps to the end of its trajectory) steps; a trajectory ends where
    ("next", "done") is true, and with the rollout. Then

    - ("next", "reward") is the sum of gamma**i * reward[t + i], i < k; the reward itself is ("next", "original_reward").
    - the other entries under "next" are those of step t + k - 1; "done", "terminated" and "truncated" stay those of step t
      unless `last_flags`. The target reward + gamma**k * (1 - terminated) * value needs those of step t + k - 1.
    - "steps_to_next_obs" is k (int64), "gamma" is gamma**k (float32), "nonterminal" is k > 1, of the shape of the rollout;
      where flags are of agents, [*batch, time, *agents], of theirs.
    - frames whose mask, ("collector", "mask"), is False are padding: never "nonterminal", and no transition reaches them.

    The result is another tensordict. Integer rewards give floats, others those of their dtype. Gradients flow from returns
    to rewards. O(steps * log n_steps).

    Args:
        gamma: discount, from 0 to 1.
        n_steps: at least 1.
        last_flags: whether the flags under "next" are those of step t + k - 1, too.

    Attributes:
        reward_keys, done_key, done_keys: under "next"; the entry for each reward, where trajectories end, and other flags.
            With several rewards the original ones are "original_<name>" beside each.
        mask_key: of the mask.

    KeyError for a missing entry, RuntimeError for entries that do not fit flags of agents.
    """

    gammas: Tensor

    def __init__(self, gamma: float, n_steps: int, *, last_flags: bool = False) -> None:
        super().__init__()
        self._gamma, n_steps = returns.as_discount(gamma), checks.as_int("n_steps", n_steps)
        powers = torch.tensor([self._gamma**i for i in range(n_steps + 1)], dtype=torch.float32, device="cpu")
        self.register_buffer("gammas", powers.view(1, 1, -1))
        self.done_key: Any = "done"
        self.done_keys: Any = ("done", "truncated", "terminated")
        self.reward_keys: Any = ("reward",)
        self.mask_key: Any = ("collector", "mask")
        self.last_flags = last_flags

    @property
    def n_steps(self) -> int:
        """The most steps that are taken together."""
        return self.gammas.shape[-1] - 1

    @property
    def gamma(self) -> float:
        """The discount."""
        return self._gamma

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        loaded = float(self.gammas[0, 0, 1])
        if loaded != float(np.float32(self._gamma)):  # otherwise it is the same, and more exact
            self._gamma = returns.as_discount(loaded)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The transitions of a rollout."""
        data = rollout(self, tensordict)
        return transitions(data, Keys.of(self), self._gamma, self.n_steps, data.shape[-1])

    def extra_repr(self) -> str:
        return f"gamma={self._gamma}, n_steps={self.n_steps}" + (", last_flags=True" if self.last_flags else "")
