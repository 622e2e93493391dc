"""The rows of a queue: which segment has which field of a row, as the entries of the log say."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

Entry = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Fields of a row that one put wrote: at `position` of `segment`."""

    segment: str
    position: int
    fields: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row: its partition, and its parts, the newest last. `name` stays the same when the row gets another index."""

    name: str
    partition: str
    parts: tuple[Part, ...]

    @property
    def fields(self) -> frozenset[str]:
        return frozenset().union(*(part.fields for part in self.parts))

    def part_of(self, field: str) -> Part | None:
        """The part that has a field, or None."""
        return next((part for part in self.parts if field in part.fields), None)

    def with_part(self, new: Part) -> "Row":
        """The row after a put. Its fields are not in another part any more."""
        rest = (dataclasses.replace(part, fields=part.fields - new.fields) for part in self.parts)
        return dataclasses.replace(self, parts=(*(part for part in rest if part.fields), new))

    def described(self) -> list[Any]:
        return [self.name, self.partition, [[p.segment, p.position, sorted(p.fields)] for p in self.parts]]

    @classmethod
    def of(cls, described: list[Any]) -> Self:
        name, partition, parts = described
        return cls(name, partition, tuple(Part(segment, place, frozenset(fields)) for segment, place, fields in parts))


class Rows:
    """What a log says: the stored rows by index, and what a mark keeps. To apply entries again, in order, changes nothing.

    `generation` is the number of the run that may write. `mark` names the last checkpoint, or is None. `marked` has the rows
    of that moment by index, and `later` the rows that puts have changed since, by name, also those that were cleared.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.mark: str | None = None
        self.stored: dict[int, Row] = {}
        self.marked: dict[int, Row] = {}
        self.later: dict[str, Row] = {}

    def apply(self, entry: Entry) -> None:
        """Apply one entry of the log."""
        match entry:
            case {"put": segment, "partition": partition, "indexes": indexes, "fields": fields}:
                names = frozenset(fields)
                for position, index in enumerate(indexes):
                    row = self.stored.get(index)
                    if row is None or row.partition != partition:
                        row = Row(f"{segment}:{position}", partition, ())
                    self.stored[index] = row = row.with_part(Part(segment, position, names))
                    if self.mark is not None:
                        self.later[row.name] = row
            case {"clear": indexes}:
                for index in indexes:
                    self.stored.pop(index, None)
            case {"mark": name}:
                self.mark, self.marked, self.later = name, dict(self.stored), {}
            case {"snapshot": generation}:
                self.generation, self.mark = generation, entry["marked_as"]
                self.stored = {index: Row.of(row) for index, row in entry["stored"]}
                self.marked = {index: Row.of(row) for index, row in entry["marked"]}
                self.later = {row.name: row for row in map(Row.of, entry["later"])}
            case _:
                raise ValueError(f"an entry of another version: {sorted(entry)}")

    def snapshot(self) -> dict[str, Any]:
        """One entry that has all of this."""
        return {
            "snapshot": self.generation,
            "marked_as": self.mark,
            "stored": [[index, row.described()] for index, row in self.stored.items()],
            "marked": [[index, row.described()] for index, row in self.marked.items()],
            "later": [row.described() for row in self.later.values()],
        }

    def segments(self) -> set[str]:
        """The segments that are needed."""
        kept: Iterable[Row] = (*self.stored.values(), *self.marked.values(), *self.later.values())
        return {part.segment for row in kept for part in row.parts}
