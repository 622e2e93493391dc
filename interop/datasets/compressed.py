"""Decompressing byte streams of files."""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from interop.datasets import allowance
from interop.datasets.errors import CorruptDatasetError

_BLOCK = 1 << 20
_MOST_MEMORY = 1 << 27  # bytes, of xz's dictionary: `xz -9` needs 65 MiB


class Readable(Protocol):
    """A sequential byte reader."""

    def read(self, size: int = -1, /) -> bytes: ...


class Stream:
    """A sequential byte stream of a file. Reading past the end is a `CorruptDatasetError`.

    Args:
        file: the reader of the decompressed bytes.
        path: for messages.
        stored: the bytes of the file, which bound what it may hold (`interop.datasets.allowance`); None if unknown.
        packed: whether it is compressed.
    """

    def __init__(self, file: Readable, path: object, stored: int | None = None, packed: bool = False) -> None:
        self._file = file
        self._path = path
        self.most_held: int | None = allowance.held(stored) if packed and stored is not None else None
        """The most bytes of one object in memory. None if the file is not compressed: it bounds them itself."""
        self.most: int | None = allowance.unpacked(stored) if packed and stored is not None else stored
        """The most bytes of the whole stream; None if unknown."""

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes; by default the rest, of up to `most_held` bytes.

        Memory grows with the bytes that are there, not with `size`.
        """
        pieces = []
        came = 0
        while size < 0 or came < size:
            data = self._some(_BLOCK if size < 0 else min(_BLOCK, size - came))
            if not data:
                break
            came += len(data)
            if self.most_held is not None:
                allowance.check(came, self.most_held, str(self._path))
            pieces.append(data)
        if size > 0 and not came:
            raise CorruptDatasetError(f"{self._path} is truncated: more bytes were expected behind its last one")
        return b"".join(pieces)

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


class _Xz:
    """The content of an xz file, whose streams need at most `_MOST_MEMORY` bytes of memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._unread = b""
        self._decoder = self._new()

    @staticmethod
    def _new() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_MEMORY)

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        while True:
            if self._decoder.eof:  # of a stream; others, and padding, may follow
                self._unread = self._decoder.unused_data.lstrip(b"\0") or self._file.read(_BLOCK).lstrip(b"\0")
                if not self._unread:
                    return b""
                self._decoder = self._new()
            elif self._decoder.needs_input and not self._unread:
                self._unread = self._file.read(1 << 14)
                if not self._unread:
                    raise EOFError("the end of the compressed data is missing")
            data = self._decoder.decompress(self._unread, size)
            self._unread = b""
            if data:
                return data


@contextmanager
def decompressed(path: Path) -> Iterator[Stream]:
    """Open a file as a stream. gzip and xz, detected by the first bytes, are decompressed."""
    with path.open("rb") as plain:
        start = plain.read(6)
        stored = path.stat().st_size
        plain.seek(0)
        if start.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=plain) as file:
                yield Stream(file, path, stored, packed=True)
        elif start == b"\xfd7zXZ\x00":
            yield Stream(_Xz(plain), path, stored, packed=True)
        else:
            yield Stream(plain, path, stored)
