"""Five quantiles of many numbers."""

import dataclasses

import numpy as np

from fbuf.keywords import checked


@checked
@dataclasses.dataclass(frozen=True)
class Quantiles:
    """The quantiles of some numbers.

    Attributes:
        least: the smallest number.
        quarter: a quarter of the numbers are at most this one.
        median: half of them.
        three_quarters: three quarters of them.
        most: the largest number.
    """

    least: float
    quarter: float
    median: float
    three_quarters: float
    most: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Quantiles | None":
        """Those of the finite numbers among some, interpolated; None if there are none. O(values)."""
        held = np.asarray(values, np.float64).reshape(-1)
        held = held[np.isfinite(held)]
        return cls(*np.quantile(held, [0, 0.25, 0.5, 0.75, 1]).tolist()) if held.size else None

    def to_dict(self) -> dict[str, float]:
        """The quantiles by percent."""
        return dict(zip(("0", "25", "50", "75", "100"), dataclasses.astuple(self), strict=True))
