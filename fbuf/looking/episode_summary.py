"""The episodes of a buffer in numbers: how many, how long, what they returned, and how they end."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from fbuf.keywords import checked
from fbuf.looking.quantiles import Quantiles

ENDS = ("terminated", "truncated", "done", "followed", "cursor", "cut", "padding", "open")


@checked
@dataclasses.dataclass(frozen=True)
class EpisodeSummary:
    """The stored parts of trajectories.

    Attributes:
        count: how many trajectories have stored rows.
        lengths: quantiles of the numbers of their stored rows; None without trajectories.
        returns: quantiles of the sums of their stored rewards, where these are finite; None without a reward.
        undefined_returns: how many of these sums are NaN or infinite.
        reward: the key of the reward, as text; None if no leaf is known to be one.
        ends: how many end in each way: "terminated"; "truncated"; "done", by a marker that does not say which; "followed" by
            another trajectory without a marker of the end; at the "cursor", where newer rows overwrote the rest; "cut", by
            either; or still "open". "padding" is none, but a run of rows that a mask says are padding.
        begun_before: how many began with rows that are overwritten; None if that is not known.
    """

    count: int
    lengths: Quantiles | None
    returns: Quantiles | None
    reward: str | None
    ends: Mapping[str, int]
    begun_before: int | None
    undefined_returns: int = 0

    @classmethod
    def of(
        cls,
        lengths: np.ndarray,
        ends: Mapping[str, int],
        *,
        begun_before: int | None = 0,
        returns: np.ndarray | None = None,
        reward: str | None = None,
    ) -> "EpisodeSummary":
        """The summary of trajectories with these lengths and returns. ValueError for an end that is not in `ENDS`."""
        if unknown := set(ends) - set(ENDS):
            raise ValueError(f"ends are {', '.join(ENDS)}, got {', '.join(sorted(unknown))}")
        return cls(
            count=int(np.size(lengths)),
            lengths=Quantiles.of(lengths),
            returns=None if returns is None else Quantiles.of(returns),
            reward=reward,
            ends={name: int(ends.get(name, 0)) for name in ENDS},
            begun_before=begun_before,
            undefined_returns=0 if returns is None else int(np.count_nonzero(~np.isfinite(returns))),
        )

    def to_dict(self) -> dict[str, object]:
        """The fields as plain values."""
        return {
            "count": self.count,
            "lengths": self.lengths and self.lengths.to_dict(),
            "returns": self.returns and self.returns.to_dict(),
            "reward": self.reward,
            "ends": dict(self.ends),
            "begun_before": self.begun_before,
            "undefined_returns": self.undefined_returns,
        }
