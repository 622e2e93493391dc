"""Checksums of the files of a storage, by block: written when the folder is closed, compared by `interop.verify`.

`storage.sums` has the CRC-32 of each block of each file, and the counters of the rows at that moment. Writes would make
it wrong, so the first thing that an owner does is to mark it as outdated. A writer that is killed leaves that mark: such a
folder has no checksums, and never wrong ones.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fbuf.checkpoint import CheckpointCorrupt, Fields
from fbuf.checkpoint.files import opened
from fbuf.checkpoint.writing import flush
from interop.shared.folder_description import (
    DESCRIPTION,
    LONGEST,
    PRIORITIES,
    STATE,
    SUMS,
    USES,
    VALUES,
    check_file,
    check_folders,
    commits_of,
    counters_of,
    description,
)

BLOCK = 4 << 20  # bytes with one checksum
_FORMAT = 1
_PIECE = 1 << 20
Progress = Callable[[int], None]  # is told how many more bytes were read


@dataclass(frozen=True)
class Sums:
    """The checksums of a folder, as they were when it was sealed."""

    block: int
    files: Mapping[str, tuple[int, str]]  # size, and 8 hexadecimal digits a block
    counters: Mapping[str, int]
    commits: int

    @classmethod
    def read(cls, root: Path) -> "Sums | None":
        """Those of a folder; None where there are none, or outdated ones. CheckpointCorrupt for a damaged file."""
        path = root / SUMS
        if not os.path.lexists(path):
            return None
        check_file(path)
        head, _, body = path.read_bytes()[: 4 * LONGEST].partition(b"\n")
        if head != b"%08x" % zlib.crc32(body):
            raise CheckpointCorrupt(f"{path} is damaged: its own checksum is another")
        fields = Fields(json.loads(body), str(path))
        if fields.whole("format") != _FORMAT:
            raise CheckpointCorrupt(f"{path} has the format {fields.whole('format')}, known is {_FORMAT}")
        if not fields.flag("sealed"):
            return None
        files = {name: (size, digits) for name, size, digits in fields.items("files")}
        return cls(fields.whole("block", 1), files, fields.any("counters"), fields.whole("commits"))

    def is_outdated(self, root: Path) -> bool:
        """Whether transactions were committed since: by a version of this library that knows no checksums."""
        return commits_of(root / STATE) != self.commits


def seal(root: Path, progress: Progress | None = None) -> None:
    """Flush the files of a storage that nobody writes, and write their checksums. O(bytes)."""
    mark_outdated(root, always=True)
    files = []
    for name in files_of(root):
        flush(root / name)
        blocks = list(blocks_of(root, name, BLOCK, progress))
        files.append([name, os.path.getsize(root / name), "".join(f"{each:08x}" for each in blocks)])
    state = root / STATE
    flush(state)
    _write(
        root,
        {"sealed": True, "block": BLOCK, "files": files, "counters": counters_of(state), "commits": commits_of(state)},
    )


def mark_outdated(root: Path, always: bool = False) -> bool:
    """Say that the checksums of a folder are outdated. Returns whether it has, or had, some."""
    there = os.path.lexists(root / SUMS)
    if there or always:
        _write(root, {"sealed": False})
    return there


def files_of(root: Path) -> list[str]:
    """The files with rows of a storage and what belongs to them, by name. The errors of `description`."""
    names = [name for name in description(root).fields("files") if name != STATE]
    names += [name for name in (DESCRIPTION, PRIORITIES, USES) if os.path.lexists(root / name)]
    values = root / VALUES
    if values.is_dir() and not values.is_symlink():
        names += [each.relative_to(root).as_posix() for each in values.rglob("*") if each.is_file()]
    return sorted(names)


def blocks_of(root: Path, name: str, block: int, progress: Progress | None = None) -> Iterator[int]:
    """The CRC-32 of each block of a file, in memory of 1 MiB. OSError, or CheckpointCorrupt for what is no plain file."""
    check_folders(root, name)
    memory = bytearray(_PIECE)
    with opened(root / name) as (handle, size):
        if size < 0:
            raise CheckpointCorrupt(f"{root / name} should be a plain file")
        for start in range(0, size, block):
            checksum, left = 0, min(block, size - start)
            while left:
                view = memoryview(memory)[: min(left, _PIECE)]
                count = os.readv(handle, [view])
                if not count:
                    raise CheckpointCorrupt(f"{root / name}: ends too soon")
                checksum, left = zlib.crc32(view[:count], checksum), left - count
                if progress is not None:
                    progress(count)
            yield checksum


def _write(root: Path, content: dict[str, Any]) -> None:
    """Replace the file of checksums, flushed."""
    body = json.dumps({"format": _FORMAT, **content}, separators=(",", ":")).encode() + b"\n"
    beside = root / f".{SUMS}.tmp"
    beside.write_bytes(b"%08x\n" % zlib.crc32(body) + body)
    flush(beside)
    os.replace(beside, root / SUMS)
    flush(root)
