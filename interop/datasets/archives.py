"""Streaming reader of tar archives."""

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from interop.datasets import allowance
from interop.datasets.compressed import Readable, Stream, decompressed
from interop.datasets.errors import CorruptDatasetError

_BLOCK = tarfile.BLOCKSIZE
_MOST_ABOUT = 1 << 20  # bytes of a long name, or of the records about a member
_MOST_HEADERS = 16  # before a member
# Types of headers about a member.
_LONG_NAME = b"L"
_LONG_LINK = b"K"
_RECORDS = (b"x", b"X")
_COMMON = b"g"
_RECORD = re.compile(rb"([0-9]{1,7}) ([^=]+)=", re.DOTALL)
_AT_ONCE = 1 << 20  # bytes


def tar_members(path: Path) -> Iterator[tuple[str, Readable]]:
    """Yield the name and content of each file of an archive (tar, tar.gz, tar.xz), in order. Writes nothing to disk.

    Read each content before requesting the next; the rest of the archive is not in memory. `CorruptDatasetError`, also
    while a content is read, for a damaged or truncated archive, a member that is no plain file or directory, a path
    that is absolute or contains "..", and a member of a compressed archive that takes more memory than
    `interop.datasets.allowance` allows.
    """
    with decompressed(path) as stream:
        yield from members_of(stream, path)


def members_of(stream: Stream, path: object) -> Iterator[tuple[str, Readable]]:
    """Yield the members of an archive from a stream. `path` names the archive in errors.

    A reader of its own, as `tarfile` reads descriptions of any size into memory.
    """
    reader = _Reader(stream, path)
    while (header := reader.header()) is not None:
        name = _checked(header, path)
        content = _Content(reader, header.size, f"{path}, {name}", stream.most_held)
        if header.isfile():
            yield name, content
        content.skip()
    stream.finish()


class _Reader:
    """Reads headers, and the blocks behind them."""

    def __init__(self, stream: Stream, path: object) -> None:
        self._stream = stream
        self._path = path

    def exactly(self, size: int) -> bytes:
        data = self._stream.read(size) if size else b""
        if len(data) < size:
            raise CorruptDatasetError(f"{self._path} is truncated: it ends within a member")
        return data

    def header(self) -> tarfile.TarInfo | None:
        """The header of the next member, with its long name; None at the end of the archive."""
        name: str | None = None
        size: int | None = None
        for _ in range(_MOST_HEADERS):
            block = self.exactly(_BLOCK)
            if block == bytes(_BLOCK):
                return None
            try:
                header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except (tarfile.HeaderError, ValueError) as error:
                raise self._damaged(str(error)) from error
            if header.size < 0:
                raise self._damaged(f"a member of {header.size} bytes")
            if header.type == _LONG_NAME:
                name = self._about(header.size).rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif header.type == _LONG_LINK:
                self._about(header.size)
            elif header.type in _RECORDS or header.type == _COMMON:
                records = self._records(self._about(header.size))
                if any(key.startswith("GNU.sparse") for key in records):
                    raise CorruptDatasetError(f"{self._path}: a member is a sparse file, not a plain one")
                if header.type == _COMMON and records.keys() & {"path", "size"}:
                    raise self._damaged("one name or size for all members")
                name = records.get("path", name)
                size = self._size(records, size)
            else:
                header.name = (header.name if name is None else name).rstrip("/")
                header.size = header.size if size is None else size
                return header
        raise self._damaged(f"more than {_MOST_HEADERS} headers for one member")

    def _about(self, size: int) -> bytes:
        """The content behind a header about a member."""
        if size > _MOST_ABOUT:
            raise self._damaged(f"a description of {size} bytes")
        return self.exactly(-(-size // _BLOCK) * _BLOCK)[:size]

    def _records(self, content: bytes) -> dict[str, str]:
        """Records `<length> <key>=<value>\\n`."""
        records = {}
        place = 0
        while place < len(content) and content[place]:
            record = _RECORD.match(content, place)
            if record is None or (end := place + int(record[1])) > len(content) or end <= record.end():
                raise self._damaged("records that are none")
            key = record[2]
            value = content[record.end() : end - 1]
            records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
            place = end
        return records

    def _size(self, records: dict[str, str], size: int | None) -> int | None:
        text = records.get("size")
        if text is None:
            return size
        if not re.fullmatch("[0-9]{1,18}", text):
            raise self._damaged(f"a member of {text[:40]!r} bytes")
        return int(text)

    def _damaged(self, fault: str) -> CorruptDatasetError:
        return CorruptDatasetError(f"{self._path} is no tar archive, or a damaged one: {fault}")


class _Content:
    """The bytes of a member, in order."""

    def __init__(self, reader: _Reader, size: int, where: str, most: int | None) -> None:
        self._reader = reader
        self._left = size
        self._where = where
        self._most = most
        self._padding = -size % _BLOCK

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes; by default the rest, which is compared with the size of the archive before."""
        count = self._left if size < 0 else min(size, self._left)
        if self._most is not None:
            allowance.check(count, self._most, self._where)
        data = self._reader.exactly(count)
        self._left -= count
        return data

    def skip(self) -> None:
        """Read on to the next header."""
        while self._left:
            self.read(min(self._left, _AT_ONCE))
        self._reader.exactly(self._padding)
        self._padding = 0


def _checked(member: tarfile.TarInfo, path: object) -> str:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or ":" in member.name or "\0" in member.name:
        raise CorruptDatasetError(f"{path}: member {member.name!r} leads out of the folder of the archive")
    if not (member.isfile() or member.isdir()) or member.issparse():
        raise CorruptDatasetError(f"{path}: member {member.name!r} is a link, device or sparse file, not a plain file")
    return str(name)
