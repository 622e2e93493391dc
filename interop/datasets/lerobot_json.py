"""Reading of the JSON and Parquet files in `meta/` of a LeRobot dataset, with the types of their values."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interop.data.arguments import required
from interop.datasets.errors import CorruptDatasetError

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST = 1 << 53  # of whole numbers: JSON has no larger ones that are exact everywhere


def read_json(path: Path) -> Any:
    """Read a JSON file; a `.jsonl` file gives a list of the values of its lines."""
    try:
        content = path.read_bytes()
        if path.suffix != ".jsonl":
            return json.loads(content)
        # Lines end at line feeds and carriage returns only: text may have U+2028, U+0085 and other ends of lines.
        return [json.loads(line) for line in content.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise CorruptDatasetError(f"{path} is missing, or no JSON: {error}") from error
    except RecursionError as error:
        raise CorruptDatasetError(f"{path} is no JSON of a dataset: its values are nested too deeply") from error


def read_table(
    path: Path, columns: Sequence[str] | None = None, filters: list[tuple[str, str, int]] | None = None
) -> "pa.Table":
    """Read columns of a Parquet file, by default all. CorruptDatasetError if it is damaged, or one is not there once."""
    parquet, pyarrow = required("pyarrow.parquet", "datasets"), required("pyarrow", "datasets")
    try:
        names = parquet.read_schema(path).names
        for name in names if columns is None else columns:
            if (times := names.count(name)) != 1:
                raise CorruptDatasetError(
                    f"{path}: there is no column {name}" if times == 0 else f"{path}: {times} columns are named {name}"
                )
        return (
            parquet.ParquetFile(path).read()
            if columns is None
            else parquet.read_table(path, columns=columns, filters=filters)
        )
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise CorruptDatasetError(f"{path} is missing, or no whole Parquet file: {error}") from error


@dataclass(frozen=True)
class Entries:
    """The entries of a JSON object or of a row of a table.

    The methods return entries of one type, or `default` if there is no entry of that name. CorruptDatasetError, prefixed by
    `where`, for a missing entry without a default, and for an entry of another type or out of its range.
    """

    found: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, value: object, where: str) -> "Entries":
        if not isinstance(value, Mapping):
            raise CorruptDatasetError(f"{where} must be an object, it is {_shown(value)}")
        return cls(value, where)

    def whole(self, name: str, least: int = 0, default: int | None = None) -> int:
        """A whole number. Floats without a fraction count, as some writers have only floats."""
        value = self._entry(name, default)
        if not _is_number(value, least) or value % 1 != 0:
            raise self.wrong(name, f"a whole number from {least} to 2**53")
        return int(value)

    def number(self, name: str, least: float = 0.0, default: float | None = None) -> float:
        value = self._entry(name, default)
        if not _is_number(value, least):
            raise self.wrong(name, f"a number from {least:g} to 2**53")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._entry(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "text")
        return value

    def objects(self, name: str) -> dict[str, "Entries"]:
        """An object of objects."""
        value = self._entry(name, None)
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return {key: Entries.of(each, f"{self.where}: {name} {key}") for key, each in value.items()}

    def wrong(self, name: str, needed: str) -> CorruptDatasetError:
        return CorruptDatasetError(f"{self.where}: {name} must be {needed}, it is {_shown(self.found.get(name))}")

    def _entry(self, name: str, default: Any) -> Any:
        if name not in self.found and default is None:
            raise CorruptDatasetError(f"{self.where}: there is no {name}")
        return self.found.get(name, default)


def _is_number(value: object, least: float) -> bool:
    """Whether the value is a number in the range. Infinities and NaN are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= LARGEST


def _shown(value: object) -> str:
    """The value as JSON, cut after some characters; deep ones by their type."""
    if isinstance(value, Mapping | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) > LARGEST:
        return "a larger number"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
