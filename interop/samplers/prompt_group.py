"""What is known of one group of completions."""

import dataclasses

from fbuf.samplers import Reason
from interop.samplers.groups import Id
from interop.samplers.reward_spread import REWARD_REASONS

OVERWRITTEN = "overwritten"  # a completion of it was
REASONS = (
    Reason.INCOMPLETE.label,
    OVERWRITTEN,
    Reason.CONSUMED.label,
    Reason.STALE.label,
    Reason.ZERO_WEIGHT.label,
    *REWARD_REASONS,
)


@dataclasses.dataclass(frozen=True)
class PromptGroup:
    """A group of completions of one prompt, as it is stored.

    Attributes:
        number: how many groups were begun before, as "group_number" in the info of a batch.
        id: of the prompt.
        slots: of its stored completions, in the order of writing.
        uses: how often it was drawn. Draws are counted where the sampler has `max_uses`, else it is 0.
        staleness: of its stalest completion; None where the sampler has no `staleness`.
        reason: why it cannot be drawn: "incomplete", "overwritten", "consumed", "stale" or "zero weight"; with a `spread`
            also "not scored", "no spread", "too hard" or "too easy". None if it can.
        spread: the standard deviation of its rewards; None where the sampler has no `spread`, or the group is not ready.
    """

    number: int
    id: Id
    slots: tuple[int, ...]
    uses: int
    staleness: float | None
    reason: str | None
    spread: float | None = None

    @property
    def rows(self) -> int:
        """Stored completions."""
        return len(self.slots)
