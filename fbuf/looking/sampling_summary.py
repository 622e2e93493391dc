"""What a sampler can draw, and why not the rest."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from fbuf.keywords import checked
from fbuf.samplers import Chances, Reason


@checked
@dataclasses.dataclass(frozen=True)
class SamplingSummary:
    """The law of the next draw in a few numbers.

    Attributes:
        unit: what one draw is: "item", "slice" or "group".
        known: whether the sampler says how often it draws an item; if not, what depends on it is None.
        stored: how many items are stored.
        drawable: how many of them can be drawn, now or later in the epoch.
        starts: at how many of them a slice may start; None for single items.
        reasons: how many stored items cannot be drawn, by the label of a `Reason`.
        effective: effective sample size, (sum p)^2 / sum p^2 of the probabilities of items.
        top_share: share of the most likely 1 % of the stored items, rounded upwards, in the sum of the probabilities.
    """

    unit: str
    known: bool
    stored: int
    drawable: int | None
    starts: int | None
    reasons: Mapping[str, int]
    effective: float | None
    top_share: float | None

    @classmethod
    def of(cls, law: Chances) -> "SamplingSummary":
        """The summary of the law of a draw. O(slots)."""
        held = law.reason != Reason.NOT_WRITTEN
        stored = int(held.sum())
        codes, counts = np.unique(law.reason[held & law.refused], return_counts=True)
        effective = top_share = None
        if law.probability is not None and (total := float(law.probability.sum())) > 0:
            effective = total**2 / float((law.probability**2).sum())
            top = -(-stored // 100)
            top_share = float(np.partition(law.probability, -top)[-top:].sum()) / total
        return cls(
            unit=law.unit,
            known=law.known,
            stored=stored,
            drawable=int(law.drawable.sum()) if law.known else None,
            starts=None if law.starts is None else int((law.starts > 0).sum()),
            reasons={Reason(code).label: int(count) for code, count in zip(codes, counts, strict=True)},
            effective=effective,
            top_share=top_share,
        )

    def to_dict(self) -> dict[str, object]:
        """The fields as plain values."""
        return {**dataclasses.asdict(self), "reasons": dict(self.reasons)}
