"""Decompressing byte streams of files."""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from interop.datasets.errors import CorruptDatasetError

_BLOCK = 1 << 20


class Readable(Protocol):
    """A sequential byte reader."""

    def read(self, size: int = -1, /) -> bytes: ...


class Stream:
    """A sequential byte stream of a file. Reading past the end is a `CorruptDatasetError`."""

    def __init__(self, file: BinaryIO, path: object) -> None:
        self._file, self._path = file, path

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes; by default the rest."""
        data = self._some(size)
        if not data and size > 0:
            raise CorruptDatasetError(f"{self._path} is truncated: more bytes were expected behind its last one")
        return data

    def finish(self) -> int:
        """Read the rest, so that the checksum of compressed data is verified. Returns its number of bytes."""
        return sum(map(len, iter(lambda: self._some(_BLOCK), b"")))

    def _some(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except EOFError as error:
            raise CorruptDatasetError(f"{self._path} is truncated: {error}") from error
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise CorruptDatasetError(f"{self._path} is damaged: {error}") from error


@contextmanager
def decompressed(path: Path) -> Iterator[Stream]:
    """Open a file as a stream. gzip and xz, detected by the first bytes, are decompressed."""
    with path.open("rb") as plain:
        start = plain.read(6)
        plain.seek(0)
        if start.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=plain) as file:
                yield Stream(file, path)  # type: ignore[arg-type]
        elif start == b"\xfd7zXZ\x00":
            with lzma.LZMAFile(plain) as file:
                yield Stream(file, path)  # type: ignore[arg-type]
        else:
            yield Stream(plain, path)
