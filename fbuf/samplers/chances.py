"""The probability of each slot in the next draw, and why some slots have none: NumPy arrays on the host."""

import dataclasses
import enum

import numpy as np

from fbuf.keywords import checked


class Reason(enum.IntEnum):
    """Why a slot is not in the next draw."""

    NONE = 0  # it can be drawn
    NOT_WRITTEN = 1
    TOO_SHORT = 2
    CONSUMED = 3
    ZERO_PRIORITY = 4
    EXCLUDED = 5
    STALE = 6
    LOST = 7
    WAITING = 8
    UNKNOWN = 9

    @property
    def words(self) -> str:
        """The reason as a part of a sentence."""
        return _WORDS[self]

    @property
    def label(self) -> str:
        """The reason in a few words, for tables."""
        return self.name.lower().replace("_", " ")


_WORDS = {
    Reason.NONE: "it can be drawn",
    Reason.NOT_WRITTEN: "it holds no item",
    Reason.TOO_SHORT: "too few rows of its trajectory are stored for a slice",
    Reason.CONSUMED: "it was drawn before, and comes again in the next epoch or not at all",
    Reason.ZERO_PRIORITY: "its priority is zero",
    Reason.EXCLUDED: "it is excluded",
    Reason.STALE: "it is stale",
    Reason.LOST: "the frames of its observations are not all stored",
    Reason.WAITING: "items come in a fixed order, and others come before it",
    Reason.UNKNOWN: "the sampler does not say how often it draws an item",
}


@checked
@dataclasses.dataclass(frozen=True)
class Chances:
    """The law of the next draw. A draw is one item, or with `Slices` one slice.

    Attributes:
        probability: float64 [slots], that the draw contains the slot; with `Slices` as a row whose mask is True, rows of
            burn-in included. None if the sampler does not say.
        reason: uint8 [slots], a `Reason` for each slot; `Reason.NONE` exactly where the probability is above 0.
        starts: float64 [slots], the probability that the slice starts at the slot; None if not of `Slices`.

    The sum of `probability` is the expected number of rows of a draw: 1 for single items, if there are any.
    """

    probability: np.ndarray | None
    reason: np.ndarray
    starts: np.ndarray | None = None

    @classmethod
    def unknown(cls, size: int) -> "Chances":
        """Chances of a sampler whose law is not known, over `size` slots."""
        return cls(None, np.full(size, Reason.UNKNOWN, np.uint8))

    @classmethod
    def of(cls, mass: np.ndarray, otherwise: Reason | np.ndarray) -> "Chances":
        """Chances in proportion to `mass` [slots], and the reasons for slots without mass."""
        total = mass.sum(dtype=np.float64)
        probability = mass.astype(np.float64) / (total if total > 0 else 1)
        reason = np.where(probability > 0, np.uint8(Reason.NONE), np.asarray(otherwise, np.uint8))
        return cls(probability, reason)

    @property
    def known(self) -> bool:
        """Whether the sampler says how often it draws an item."""
        return self.probability is not None

    @property
    def drawable(self) -> np.ndarray:
        """bool [slots]: the slots that a draw may have before the next write: in the next draw, or in a later one."""
        found: np.ndarray = (self.reason == Reason.NONE) | (self.reason == Reason.WAITING)
        return found

    def over(self, slots: int) -> "Chances":
        """Chances over more slots. The additional ones hold no item."""
        more = slots - self.reason.size

        def padded(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else np.concatenate([values, np.zeros(more)])

        reason = np.concatenate([self.reason, np.full(more, Reason.NOT_WRITTEN, np.uint8)])
        return Chances(padded(self.probability), reason, padded(self.starts))

    def without(self, lost: np.ndarray) -> "Chances":
        """Chances after the `lost` slots, bool [slots], were made invalid."""
        probability = None if self.probability is None else np.where(lost, 0.0, self.probability)
        reason = np.where(lost & (self.reason == Reason.NONE), np.uint8(Reason.LOST), self.reason)
        return dataclasses.replace(self, probability=probability, reason=reason)


def says_its_chances(rule: object) -> bool:
    """Whether `rule.chances` describes `rule.sample`: no subclass has another `sample` than the class with `chances`."""
    for kind in type(rule).__mro__:
        if "chances" in vars(kind):
            return True
        if "sample" in vars(kind):
            return False
    return False
