"""Reading of the JSON and Parquet files in `meta/` of a LeRobot dataset, with the types of their values."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interop.datasets import parquet
from interop.datasets.described import Described, json_in, json_lines
from interop.datasets.errors import CorruptDatasetError

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST = 1 << 53  # of whole numbers: JSON has no larger ones that are exact everywhere


def read_json(path: Path) -> Any:
    """Read a JSON file; a `.jsonl` file gives a list of the values of its lines. CorruptDatasetError as for `described`."""
    return [value for _, value in json_lines(path)] if path.suffix == ".jsonl" else json_in(path)


def read_table(
    path: Path, columns: Sequence[str] | None = None, bounds: tuple[str, int, int] | None = None
) -> "pa.Table":
    """Read columns of a Parquet file, by default all, and rows as `Groups.table`.

    CorruptDatasetError if it is damaged, or if a column is not there once.
    """
    with parquet.opened(path) as file:
        names = file.schema.names
        for name in names if columns is None else columns:
            if (times := names.count(name)) != 1:
                raise CorruptDatasetError(
                    f"{path}: there is no column {name}" if times == 0 else f"{path}: {times} columns are named {name}"
                )
        return file.table(columns, bounds)


class JsonEntries(Described):
    """The entries of a JSON object or of a row of a table.

    Numbers are those that are exact in every program: up to 2**53.
    """

    def whole(self, name: str, least: int = 0, most: int = LARGEST) -> int:
        """A whole number. Floats without a fraction count, as some writers have only floats."""
        value = self.any(name)
        if not _is_number(value, least, most) or value % 1 != 0:
            raise self.wrong(name, f"a whole number from {least} to {most}", value)
        return int(value)

    def number(self, name: str, least: float = 0.0) -> float:
        """A number of at least `least`."""
        value = self.any(name)
        if not _is_number(value, least, LARGEST):
            raise self.wrong(name, f"a number from {least:g} to {LARGEST}", value)
        return float(value)

    def objects(self, name: str) -> dict[str, "JsonEntries"]:
        """An object of objects."""
        inner = self.fields(name)
        return {key: JsonEntries(inner.any(key), f"{self.where}: {name} {key}") for key in inner}


def _is_number(value: object, least: float, most: int) -> bool:
    """Whether the value is a number in the range. Infinities and NaN are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
