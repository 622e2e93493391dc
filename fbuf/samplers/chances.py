"""The probability of each slot in the next draw, and why some slots have none: NumPy arrays on the host."""

import dataclasses
import enum
from collections.abc import Sequence

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
    ZERO_WEIGHT = 10
    INCOMPLETE = 11
    BLOCKED = 12
    TOO_FEW = 13

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
    Reason.ZERO_WEIGHT: "its weight is zero, by its staleness or by the rewards of its group",
    Reason.INCOMPLETE: "not all rows of its group are stored",
    Reason.BLOCKED: "another member that may be drawn from has no items, so that no batch can be drawn",
    Reason.TOO_FEW: "with drop_last no batch can be drawn, which has more items or slices than there are",
}


@checked
@dataclasses.dataclass(frozen=True)
class Chances:
    """The law of the next draw. A draw is one item, one slice of a sampler of slices, or one group of a sampler of groups.

    Attributes:
        probability: float64 [slots], that the draw contains the slot; of a slice as a row whose mask is True, rows of
            burn-in included. None if the sampler does not say.
        reason: uint8 [slots], a `Reason` for each slot; `Reason.NONE` exactly where the probability is above 0.
        starts: float64 [slots], the probability that the slice starts at the slot; None if not of slices.
        of_groups: whether a draw is one group.

    The sum of `probability` is the expected number of rows of a draw: 1 for single items, if there are any.
    """

    probability: np.ndarray | None
    reason: np.ndarray
    starts: np.ndarray | None = None
    of_groups: bool = False

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

    @classmethod
    def in_epoch(cls, size: int, left: np.ndarray, shuffle: bool) -> "Chances":
        """Chances of `size` places, of which the epoch still has to return `left`, int64 [n]: alike, or in this order."""
        mass, reason = np.zeros(size), np.full(size, Reason.CONSUMED, np.uint8)
        if shuffle:
            mass[left] = 1
        else:
            reason[left] = Reason.WAITING
            mass[left[:1]] = 1
        return cls.of(mass, reason)

    @property
    def unit(self) -> str:
        """What one draw is: "item", "slice" or "group"."""
        return "slice" if self.starts is not None else "group" if self.of_groups else "item"

    @property
    def known(self) -> bool:
        """Whether the sampler says how often it draws an item."""
        return self.probability is not None

    @property
    def drawable(self) -> np.ndarray:
        """bool [slots]: the slots that a draw may have before the next write: in the next draw, or in a later one."""
        found: np.ndarray = (self.reason == Reason.NONE) | (self.reason == Reason.WAITING)
        return found

    @property
    def refused(self) -> np.ndarray:
        """bool [slots]: the slots that no draw before the next write has, for a known reason."""
        found: np.ndarray = ~self.drawable & (self.reason != Reason.UNKNOWN)
        return found

    @property
    def likely(self) -> np.ndarray | None:
        """float64 [slots]: the probability that the slot is the drawn item, or the start of the slice; None if unknown."""
        return self.probability if self.starts is None else self.starts

    @property
    def smallest(self) -> float | None:
        """The probability of the least likely item, or start, that can be drawn: inf if none can be, None if unknown."""
        likely = self.likely
        return None if likely is None else float(likely[likely > 0].min(initial=np.inf))

    def weight(self, slot: int) -> float | None:
        """The importance weight of an item, or start, for beta 1, relative to the largest; None if it is not drawn."""
        likely, smallest = self.likely, self.smallest
        return None if likely is None or smallest is None or not likely[slot] > 0 else smallest / float(likely[slot])

    def over(self, slots: int) -> "Chances":
        """Chances over more slots. The additional ones hold no item."""
        more = slots - self.reason.size

        def padded(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else np.concatenate([values, np.zeros(more)])

        reason = np.concatenate([self.reason, np.full(more, Reason.NOT_WRITTEN, np.uint8)])
        return dataclasses.replace(
            self, probability=padded(self.probability), reason=reason, starts=padded(self.starts)
        )

    def without(self, lost: np.ndarray) -> "Chances":
        """Chances after the `lost` slots, bool [slots], were made invalid."""
        probability = None if self.probability is None else np.where(lost, 0.0, self.probability)
        reason = np.where(lost & (self.reason == Reason.NONE), np.uint8(Reason.LOST), self.reason)
        return dataclasses.replace(self, probability=probability, reason=reason)

    def scaled(self, part: float, otherwise: Reason) -> "Chances":
        """Chances of a member that has this part of all draws; `otherwise` is the reason if it has none."""
        if part > 0:
            return dataclasses.replace(
                self,
                probability=None if self.probability is None else self.probability * part,
                starts=None if self.starts is None else self.starts * part,
            )
        reason = np.where(self.refused, self.reason, np.uint8(otherwise))
        zeros = np.zeros(self.reason.size)
        return dataclasses.replace(
            self, probability=zeros, reason=reason, starts=None if self.starts is None else zeros
        )

    @classmethod
    def joined(cls, laws: Sequence["Chances"]) -> "Chances":
        """Chances over the slots of several members, one after the other; not known if that of a member is not.

        `starts` are None unless all are of slices, and it is `of_groups` if all are.
        """
        probability = starts = None
        if all(law.probability is not None for law in laws):
            probability = np.concatenate([law.probability for law in laws if law.probability is not None])
        if all(law.starts is not None for law in laws):
            starts = np.concatenate([law.starts for law in laws if law.starts is not None])
        reason = np.concatenate([law.reason for law in laws])
        if probability is None:
            reason[reason == Reason.NONE] = Reason.UNKNOWN
        return cls(probability, reason, starts, all(law.of_groups for law in laws))


def says_its_chances(rule: object) -> bool:
    """Whether `rule.chances` describes `rule.sample`: no subclass has another `sample` than the class with `chances`."""
    for kind in type(rule).__mro__:
        if "chances" in vars(kind):
            return True
        if "sample" in vars(kind):
            return False
    return False
