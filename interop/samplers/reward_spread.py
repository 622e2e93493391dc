"""Which groups of completions teach something: those whose rewards differ, and are neither too low nor too high."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from tensordict.utils import NestedKey
from torch import Tensor

from interop.data.keys import checked_key
from interop.storages import Storage, columns

NOT_SCORED, NO_SPREAD, TOO_HARD, TOO_EASY = "not scored", "no spread", "too hard", "too easy"
REWARD_REASONS = (NOT_SCORED, NO_SPREAD, TOO_HARD, TOO_EASY)


class Judged(NamedTuple):
    """What is known of the rewards of some groups.

    Attributes:
        std: their standard deviation in each group, float64 [groups]; NaN for a group that is not scored.
        reasons: why each group is not drawn: one of `REWARD_REASONS`; None for one that is.
        weights: float64 [groups]; 0 for groups that are not drawn.
    """

    std: np.ndarray
    reasons: list[str | None]
    weights: np.ndarray


@dataclasses.dataclass(frozen=True)
class RewardSpread:
    """Has a `PromptGroupSampler` draw the groups whose rewards differ, as DAPO does (arXiv:2503.14476), and weigh them.

    In a group of equal rewards all advantages are zero: it costs a pass, and teaches nothing. Rewards are read at the
    first draw after a group is complete, and again after an edit, so that they may come after the completions. A group is
    not drawn that is

    - "not scored": a reward is not finite; write NaN for one that is to come;
    - "no spread": its rewards are all equal, or their standard deviation is at most `min_std`;
    - "too hard", "too easy": their mean is below or above `mean_range`.

    `sampler.groups()` has the reason and the standard deviation of each group.

    Args:
        reward_key: the entry with the rewards; the mean over the dims of each completion counts. KeyError or TypeError at
            the draw where there are none.
        min_std: the standard deviation, of n values and not n - 1, above which groups are drawn.
        mean_range: the least and the greatest mean of a group that is drawn; None for no bounds.
        weight_fn: from the standard deviations of the groups that are left, a float64 tensor [groups], to their weights,
            finite and at least 0; None draws them uniformly. ValueError at the draw for other weights.
    """

    reward_key: NestedKey = "reward"
    min_std: float = 0.0
    mean_range: tuple[float, float] | None = None
    weight_fn: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward_key", checked_key("reward_key", self.reward_key))
        if self.reward_key is None:
            raise TypeError("reward_key must name the entry with the rewards, got None")
        if not 0 <= self.min_std < math.inf:
            raise ValueError(f"min_std must be at least 0 and finite, got {self.min_std}")
        if self.mean_range is not None:
            least, most = self.mean_range
            if not least <= most:
                raise ValueError(f"mean_range must be a pair of a least and a greatest mean, got {self.mean_range}")
            object.__setattr__(self, "mean_range", (float(least), float(most)))

    def measured(self, storage: Storage, slots: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Standard deviation and mean of groups, float64 [groups, 2].

        The groups are of the items at flat slots, [items], and each begins at a place in `starts`. O(items).
        """
        rewards = self._rewards(storage, slots)
        counts = np.diff(np.append(starts, slots.size))
        mean = np.add.reduceat(rewards, starts) / counts
        with np.errstate(invalid="ignore"):  # of rewards that are not finite
            std = np.sqrt(np.add.reduceat((rewards - np.repeat(mean, counts)) ** 2, starts) / counts)
        least, most = np.minimum.reduceat(rewards, starts), np.maximum.reduceat(rewards, starts)
        std[least == most] = 0.0  # a mean may round
        return np.stack([std, mean], 1)

    def judged(self, measured: np.ndarray) -> Judged:
        """What follows from the standard deviations and means of groups, [groups, 2]."""
        std, mean = measured.T
        lowest, highest = self.mean_range or (-math.inf, math.inf)
        is_of = {
            NOT_SCORED: ~np.isfinite(mean),
            NO_SPREAD: std <= self.min_std,
            TOO_HARD: mean < lowest,
            TOO_EASY: mean > highest,
        }
        code = np.select(list(is_of.values()), range(1, len(is_of) + 1), 0)
        reasons = [None, *is_of]
        weights = np.zeros(std.size)
        weights[code == 0] = self._weights(std[code == 0])
        return Judged(std, [reasons[each] for each in code], weights)

    def _rewards(self, storage: Storage, slots: np.ndarray) -> np.ndarray:
        """The reward of each item, float64 [items]."""
        column = columns.read(storage, self.reward_key, slots)
        if column.is_complex():
            raise TypeError(f"rewards must be real numbers, {self.reward_key!r} holds {column.dtype}")
        if not column.numel() and slots.size:
            raise ValueError(f"{self.reward_key!r}: an item without values has no reward")
        found: np.ndarray = column.reshape(slots.size, -1).double().mean(1).cpu().numpy()
        return found

    def _weights(self, std: np.ndarray) -> np.ndarray | float:
        if self.weight_fn is None or not std.size:
            return 1.0
        result = self.weight_fn(torch.from_numpy(std.copy()))
        if not isinstance(result, Tensor) or result.shape != std.shape:
            came = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"weight_fn must give a tensor of {std.size} weights, got {came}")
        weights = result.detach().double().cpu().numpy()
        wrong = ~((weights >= 0) & (weights < np.inf))  # a NaN is neither
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"weights must be finite and at least 0, a standard deviation of {std[at]:g} has {weights[at]}"
            )
        return weights
