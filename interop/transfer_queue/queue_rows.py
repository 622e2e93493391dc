"""The rows of a queue: which segment has which field of a row, as the entries of the log say."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self

Entry = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class RowPart:
    """Fields of a row that one put wrote: at `position` of `segment`."""

    segment: str
    position: int
    fields: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One row: its partition, and its parts, the newest last."""

    partition: str
    parts: tuple[RowPart, ...]

    @property
    def fields(self) -> frozenset[str]:
        return frozenset().union(*(part.fields for part in self.parts))

    def part_of(self, field: str) -> RowPart | None:
        """The part that has a field, or None."""
        return next((part for part in self.parts if field in part.fields), None)

    def with_part(self, new: RowPart) -> "Row":
        """The row after a put. Its fields are not in another part any more."""
        rest = (dataclasses.replace(part, fields=part.fields - new.fields) for part in self.parts)
        return dataclasses.replace(self, parts=(*(part for part in rest if part.fields), new))

    def described(self) -> list[Any]:
        return [self.partition, [[p.segment, p.position, sorted(p.fields)] for p in self.parts]]

    @classmethod
    def of(cls, described: list[Any]) -> Self:
        partition, parts = described
        return cls(partition, tuple(RowPart(segment, place, frozenset(fields)) for segment, place, fields in parts))


class QueueRows:
    """What a log says: the stored rows by index, and `generation`, the number of the run that may write."""

    def __init__(self, generation: int = 0, stored: Mapping[int, Row] | None = None) -> None:
        self.generation = generation
        self.stored: dict[int, Row] = dict(stored or {})

    def apply(self, entry: Entry) -> None:
        """Apply one entry of the log. To apply the last one again changes nothing."""
        match entry:
            case {"put": segment, "partition": partition, "indexes": indexes, "fields": fields}:
                names = frozenset(fields)
                for position, index in enumerate(indexes):
                    row = self.stored.get(index)
                    if row is None or row.partition != partition:
                        row = Row(partition, ())
                    self.stored[index] = row.with_part(RowPart(segment, position, names))
            case {"clear": indexes}:
                for index in indexes:
                    self.stored.pop(index, None)
            case {"generation": generation, "stored": stored}:
                self.generation, self.stored = generation, {index: Row.of(row) for index, row in stored}
            case _:
                raise ValueError(f"an entry of another version: {sorted(entry)}")

    def snapshot(self) -> dict[str, Any]:
        """One entry that has all of this."""
        return {
            "generation": self.generation,
            "stored": [[index, row.described()] for index, row in self.stored.items()],
        }

    def needed(self, segments: Collection[str]) -> set[str]:
        """Those of the segments that have a field of a stored row. O(rows)."""
        return {part.segment for row in self.stored.values() for part in row.parts if part.segment in segments}

    def segments_of(self, indexes: Iterable[int]) -> set[str]:
        """The segments that have the rows with these indexes."""
        return {part.segment for index in indexes if index in self.stored for part in self.stored[index].parts}
