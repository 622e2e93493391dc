"""The gate for descriptions in JSON: every metadata file of a dataset, and every answer in JSON, is read through it.

    info = described(folder / "meta/info.json")   # one object; CorruptDatasetError names the file
    steps = info.whole("total_steps", most=MOST_ROWS)  # an int of these bounds, or CorruptDatasetError names file and entry

Entries are taken by the methods of `Fields`, with their types and bounds. Nothing is converted: the text "3" is no number.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from fbuf.checkpoint import Fields, json_text
from interop.datasets.errors import CorruptDatasetError, DownloadError

MOST_ROWS = 1 << 40
"""The largest number of rows that a description may announce."""


_DEEPEST = 64


class Described(Fields):
    """An object of a file. Methods raise CorruptDatasetError."""

    corrupt: ClassVar[type[Exception]] = CorruptDatasetError

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        values = self.items(name)
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(name, "a list of texts", values)
        return tuple(values)

    def within(self, name: str) -> "Described":
        """The object in an entry that is JSON once more, as text."""
        where = f"{self.where}, {name}"
        return Described(json_of(self.text(name).encode(errors="replace"), where), where)


class Answered(Described):
    """An object that a server sent. Methods raise DownloadError."""

    corrupt = DownloadError


def described(path: Path) -> Described:
    """The object of a JSON file. CorruptDatasetError if the file is missing, too large, or has anything else."""
    return Described(json_in(path), str(path))


def noted(path: Path) -> dict[str, Any]:
    """The object of a JSON file that this library wrote, of any size. CorruptDatasetError as for `described`."""
    with _reading(path):
        text = path.read_bytes()
    fields = Described(
        json_text.parsed(text, str(path), CorruptDatasetError, deepest=4 * _DEEPEST, largest=len(text), halves=True),
        str(path),
    )
    return {name: fields.any(name) for name in fields}


def json_in(path: Path) -> Any:
    """The value of a JSON file. CorruptDatasetError as for `described`."""
    with _reading(path):
        if (size := path.stat().st_size) > json_text.LARGEST:
            raise CorruptDatasetError(f"{path} has {size} bytes, {json_text.LARGEST} at most are read")
        text = path.read_bytes()
    return json_of(text, str(path))


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The value of each line of a JSON lines file, with its place for messages.

    Lines end at line feeds and carriage returns alone, as text may have U+2028, U+0085 and other ends of lines. Empty ones
    are skipped.
    """
    with _reading(path), path.open("rb") as file:
        for number, line in enumerate(line for piece in file for line in piece.splitlines()):
            if line.strip():
                where = f"{path}, line {number + 1}"
                yield where, json_of(line, where)


def json_of(text: bytes, where: str) -> Any:
    """The value of JSON text: at most 64 MiB, nested at most 64 deep, no key twice. CorruptDatasetError otherwise."""
    return json_text.parsed(text, where, CorruptDatasetError, deepest=_DEEPEST)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorruptDatasetError(f"{path} is missing, or cannot be read: {error}") from error
