"""A buffer in numbers: prints as tables, shows as HTML in a notebook, and gives plain values."""

import dataclasses
from collections.abc import Iterator, Mapping

from fbuf.keywords import checked
from fbuf.looking.column_summary import ColumnSummary
from fbuf.looking.episode_summary import EpisodeSummary
from fbuf.looking.quantiles import Quantiles
from fbuf.looking.sampling_summary import SamplingSummary
from fbuf.memory_plan import size_text
from fbuf.page_tables import Cell, Section, html_page, text_page

_IN_LOGS = ("smallest", "mean", "largest", "nans", "infinite")  # of each key
_QUANTILES = ("", "least", "25 %", "median", "75 %", "most")


@checked
@dataclasses.dataclass(frozen=True)
class Description:
    """What a buffer holds, and what can be drawn from it. `print` it for tables.

    Attributes:
        title: the kind of buffer.
        facts: plain facts by name: capacity, rows that are stored, the rules.
        columns: the values of each key.
        episodes: the trajectories; None if the buffer does not know any.
        ages: quantiles of the ages of stored rows: how many rows were written after each; None if no order is known.
        priorities: quantiles of the priorities of stored items, as the user passed them; None if there are none.
        draws: the law of the next draw; None if nothing draws.
        members: the descriptions of the members of a mixture or ensemble.
    """

    title: str
    facts: Mapping[str, int | float | str]
    columns: tuple[ColumnSummary, ...] = ()
    episodes: EpisodeSummary | None = None
    ages: Quantiles | None = None
    priorities: Quantiles | None = None
    draws: SamplingSummary | None = None
    members: tuple["Description", ...] = ()

    def to_dict(self) -> dict[str, object]:
        """All of it as dicts, lists, numbers, texts and None, for JSON."""
        return {
            "title": self.title,
            "facts": dict(self.facts),
            "columns": [column.to_dict() for column in self.columns],
            "episodes": self.episodes and self.episodes.to_dict(),
            "ages": self.ages and self.ages.to_dict(),
            "priorities": self.priorities and self.priorities.to_dict(),
            "draws": self.draws and self.draws.to_dict(),
            "members": [member.to_dict() for member in self.members],
        }

    def numbers(self) -> dict[str, int | float]:
        """The numbers by flat names, for logs, such as "keys/next.reward/mean", "episodes/lengths/50" and "draws/drawable".

        Quantiles are named by percent. A number that is not known is left out.
        """
        tree: dict[str, object] = {**self.facts, **self.to_dict()}
        for name in ("title", "facts", "columns", "members"):
            del tree[name]
        tree["keys"] = {each.key: {name: getattr(each, name) for name in _IN_LOGS} for each in self.columns}
        if self.columns:
            tree["rows_looked_at"] = self.columns[0].looked_at
        tree["members"] = {str(place): member.numbers() for place, member in enumerate(self.members)}
        return dict(_flat(tree, ""))

    def sections(self) -> list[Section]:
        """The tables of the page."""
        found = [Section("", (), tuple(self.facts.items()))]
        if self.columns:
            found.append(self._of_columns())
        quantiles = [
            (name, getattr(self, field)) for name, field in (("age in rows", "ages"), ("priority", "priorities"))
        ]
        if self.episodes is not None:
            found.append(self._of_ends(self.episodes))
            quantiles = [
                ("episode length", self.episodes.lengths),
                (f"return, sum of {self.episodes.reward}", self.episodes.returns),
                *quantiles,
            ]
        rows = tuple((name, *dataclasses.astuple(each)) for name, each in quantiles if each is not None)
        if rows:
            found.append(Section("quantiles", _QUANTILES, rows))
        if self.draws is not None:
            found.append(self._of_draws(self.draws))
        for number, member in enumerate(self.members):
            found.append(Section(f"member {number}: {member.title}"))
            found += member.sections()
        return found

    def _of_columns(self) -> Section:
        header: tuple[str, ...] = ("key", "dtype", "shape", "size", "device", "smallest", "mean", "largest")
        header = (*header, "NaN", "infinite")
        rows: list[tuple[Cell, ...]] = [
            (
                *(each.key, each.dtype if each.measured == "values" else f"{each.dtype}, in {each.measured}"),
                *("varies" if each.shape is None else str(list(each.shape)), size_text(each.bytes), each.device),
                *(each.smallest, each.mean, each.largest, each.nans, each.infinite),
            )
            for each in self.columns
        ]
        if any(each.missing for each in self.columns):
            header = (*header, "missing")
            rows = [(*row, each.missing) for row, each in zip(rows, self.columns, strict=True)]
        looked_at, stored = self.columns[0].looked_at, self.columns[0].rows
        some = f"all {stored} rows" if looked_at == stored else f"{looked_at} evenly spaced rows of {stored}"
        return Section("items", header, tuple(rows), f"over {some}")

    @staticmethod
    def _of_ends(episodes: EpisodeSummary) -> Section:
        ends = {name: count for name, count in episodes.ends.items() if count}
        rows: list[tuple[Cell, ...]] = [("episodes", episodes.count), *ends.items()]
        if episodes.begun_before is not None:
            rows.append(("begun with overwritten rows", episodes.begun_before))
        if episodes.undefined_returns:
            rows.append(("whose return is NaN or infinite", episodes.undefined_returns))
        return Section("episodes, and how they end", (), tuple(rows))

    @staticmethod
    def _of_draws(draws: SamplingSummary) -> Section:
        if not draws.known:
            note = "the sampler does not say how often it draws an item: a rule of your own defines chances()"
            known = (("stored items", draws.stored), *draws.reasons.items())
            return Section(f"draws of one {draws.unit}: not known", (), known, note)
        rows: tuple[tuple[Cell, ...], ...] = (
            ("stored items", draws.stored),
            ("of these can be drawn", draws.drawable),
            *([] if draws.starts is None else [("a slice may start at", draws.starts)]),
            *((f"cannot be drawn: {reason}", count) for reason, count in draws.reasons.items()),
            ("effective sample size", draws.effective),
            ("share of the top 1 %", draws.top_share),
        )
        return Section(f"draws of one {draws.unit}", (), rows)

    def __str__(self) -> str:
        return text_page(self.title, self.sections())

    def _repr_html_(self) -> str:
        return html_page(self.title, self.sections())


def _flat(tree: Mapping[str, object], above: str) -> Iterator[tuple[str, int | float]]:
    """The numbers in a tree of dicts by path."""
    for name, value in tree.items():
        path = above + name.replace(" ", "_")
        if isinstance(value, Mapping):
            yield from _flat(value, path + "/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value
