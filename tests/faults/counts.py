"""Counts of the outcomes of a fault test, and the first cases that were wrong."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass
class Counts:
    """How many cases were tried, how many of them were wrong, and how often each outcome came."""

    cases: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)  # the first five
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.outcomes = Counter(self.outcomes)  # a dict, if it comes from JSON

    @classmethod
    def of(cls, parts: Iterable["Counts"]) -> "Counts":
        """The sum of several counts."""
        whole = cls()
        for each in parts:
            whole.cases, whole.wrong = whole.cases + each.cases, whole.wrong + each.wrong
            whole.errors = [*whole.errors, *each.errors][:5]
            whole.outcomes += each.outcomes
        return whole

    def note(self, outcome: str, good: Collection[str], where: str) -> None:
        """One case: its outcome is one of the good ones, or it is wrong."""
        self.cases += 1
        if outcome in good:
            self.outcomes[outcome] += 1
        else:
            self.fail(f"{where}: {outcome}")

    def fail(self, error: str, times: int = 1) -> None:
        """So many wrong cases; none where `times` is 0."""
        self.wrong += times
        if times and len(self.errors) < 5:
            self.errors.append(error)

    def check(self, cases: int, **outcomes: int) -> None:
        """AssertionError for wrong cases, or for too few cases or outcomes."""
        assert not self.wrong, self.errors
        assert self.cases >= cases, self
        assert all(self.outcomes[name] >= least for name, least in outcomes.items()), self
