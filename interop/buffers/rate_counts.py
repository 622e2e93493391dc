"""What was written and drawn under a rate limiter, and what it therefore allows: plain numbers, on the host."""

import dataclasses
import math
from abc import abstractmethod
from typing import Literal

from fbuf import rate_limits
from fbuf.shown import Shown

Call = Literal["extend", "sample"]


@dataclasses.dataclass(frozen=True, slots=True)
class RateCounts:
    """What a limiter counts.

    Attributes:
        inserted: items ever written.
        sampled: items ever drawn.
        size: items that are stored.
    """

    inserted: int
    sampled: int
    size: int

    def diff(self, rule: rate_limits.RateLimiter) -> float:
        """`inserted * samples_per_insert - sampled`; 0 without a ratio."""
        return 0.0 if rule.samples_per_insert is None else self._credit(rule) / rule.units.denominator

    def allow(self, rule: rate_limits.RateLimiter, call: Call, items: int) -> bool:
        """Whether so many items may be written, or drawn, now."""
        enough = self.size >= rule.min_size
        if rule.samples_per_insert is None:
            return enough or call == "extend"
        units = rule.units
        if call == "sample":
            return enough and units.credit(self.inserted, self.sampled + items) >= units.least
        return not enough or units.credit(self.inserted + items, self.sampled) <= units.most

    def _credit(self, rule: rate_limits.RateLimiter) -> int:
        return rule.units.credit(self.inserted, self.sampled)

    def balanced(self, rule: rate_limits.RateLimiter) -> "RateCounts":
        """The counts with as many draws as the ratio wants for these writes."""
        if rule.samples_per_insert is None:
            return dataclasses.replace(self, sampled=0)
        units = rule.units
        middle = min(units.ratio * rule.min_size, units.max_diff)
        return dataclasses.replace(self, sampled=max(0, math.floor(self.inserted * units.ratio - middle)))

    def numbers(self, rule: rate_limits.RateLimiter) -> dict[str, int | float | bool]:
        """Plain numbers for logs: the counters, the ratio so far, and the band."""
        numbers: dict[str, int | float | bool] = {
            "limiter/inserted": self.inserted,
            "limiter/sampled": self.sampled,
            "limiter/min_size": rule.min_size,
        }
        if rule.samples_per_insert is not None:
            numbers |= {
                "limiter/samples_per_insert": self.sampled / self.inserted if self.inserted else 0.0,
                "limiter/target": rule.samples_per_insert,
                "limiter/diff": self.diff(rule),
                "limiter/min_diff": rule.min_diff,
                "limiter/max_diff": rule.max_diff,
            }
        return numbers

    def account(self, rule: rate_limits.RateLimiter, call: Call, items: int) -> str:
        """What a call of so many items waits for, in numbers."""
        counted = f"{self.inserted} items were inserted and {self.sampled} sampled, {self.size} are stored"
        if call == "sample" and self.size < rule.min_size:
            return f"{counted}: {rule.min_size - self.size} more are needed for min_size={rule.min_size}"
        ratio = rule.samples_per_insert
        assert ratio is not None  # else nothing waits
        units = rule.units
        formula = f"diff = inserted * {ratio:g} - sampled = {self.diff(rule):g}"
        if call == "sample":
            short = units.least - units.credit(self.inserted, self.sampled + items)
            return (
                f"{counted}, so {formula}; a draw of {items} needs a diff of at least {rule.min_diff:g} + {items}: "
                f"{-int(-short // units.numerator)} more items must be inserted"
            )
        over = units.credit(self.inserted + items, self.sampled) - units.most
        return (
            f"{counted}, so {formula}; a write of {items} needs a diff of at most {rule.max_diff:g} - {items} * {ratio:g}: "
            f"{-int(-over // units.denominator)} more items must be sampled"
        )


class LimiterNumbers(Shown):
    """The numbers of a limiter, of a buffer in this process or in others: what it has counted, and what that allows.

    Attributes:
        rule: the `fbuf.RateLimiter`.
    """

    rule: rate_limits.RateLimiter

    @abstractmethod
    def counts(self) -> RateCounts:
        """What was written and drawn until now."""

    @property
    def inserted(self) -> int:
        """Items ever written, as the limiter counts them; 0 without a buffer."""
        return self.counts().inserted

    @property
    def sampled(self) -> int:
        """Items ever drawn, as the limiter counts them; 0 without a buffer."""
        return self.counts().sampled

    @property
    def diff(self) -> float:
        """`inserted * samples_per_insert - sampled`: between `rule.min_diff` and `rule.max_diff` in the long run."""
        return self.counts().diff(self.rule)

    def can_insert(self, items: int = 1) -> bool:
        """Whether `items` may be written now. Does not wait, and takes no lock."""
        return self.counts().allow(self.rule, "extend", items)

    def can_sample(self, items: int = 1) -> bool:
        """Whether a batch of `items` may be drawn now. Does not wait, and takes no lock."""
        return self.counts().allow(self.rule, "sample", items)


def refuse_endless(rule: rate_limits.RateLimiter, inserts: int, samples: int) -> None:
    """ValueError if writes and draws of so many items a call could wait for each other without end."""
    ratio = rule.samples_per_insert
    if ratio is None:
        return
    needed, band = inserts * rule.units.ratio + samples, rule.units.band
    if needed > band:
        raise ValueError(
            f"the limiter leaves diff a band of {float(band):.12g} items, from {rule.min_diff:g} to {rule.max_diff:g}, and "
            f"writes of {inserts} with draws of {samples} items a call need {float(needed):.12g} ({inserts} * "
            f"{ratio:g} + {samples}), or they could wait for each other without end: use a larger error_buffer, or smaller "
            "calls"
        )
