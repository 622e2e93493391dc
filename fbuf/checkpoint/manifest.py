"""The one file that says what a checkpoint is: which files, how large, what they contain. There is none without it.

Its first line has the size and the digest of the rest, so that no byte of a checkpoint is without a check.
"""

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from fbuf.checkpoint.errors import CheckpointCorrupt, CheckpointMismatch
from fbuf.checkpoint.fields import Fields
from fbuf.checkpoint.tree import dump_json, parse_json

NAME = "MANIFEST.json"
FOLDER = "data-"  # begins the name of the folder with the files of one checkpoint
SCHEMA = 1
LARGEST = 1 << 26  # bytes
_FOLDER = re.compile(rf"{FOLDER}[0-9a-f]{{16}}")


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    name: str
    size: int  # bytes
    checksum: int  # CRC-32


@dataclass
class Manifest:
    """What a checkpoint consists of.

    Args:
        folder: where its files are, below the folder of the manifest.
        tree: what was saved, its arrays described by where they are.
        files: all files.
        versions: of the libraries that wrote it, for people.
    """

    folder: str
    tree: Any
    files: list[FileEntry]
    versions: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The content of the file. ValueError where there is too much of it."""
        body = dump_json(
            {
                "folder": self.folder,
                "versions": self.versions,
                "files": [[each.name, each.size, each.checksum] for each in self.files],
                "tree": self.tree,
            }
        )
        head = dump_json({"schema": SCHEMA, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()})
        if len(head) + len(body) + 2 > LARGEST:
            raise ValueError(
                f"what is to be saved takes {len(body)} bytes to describe, {LARGEST} is the most: it has too many separate "
                "values. Save items that are alike, or tensors of many values"
            )
        return head + b"\n" + body + b"\n"

    @classmethod
    def decoded(cls, content: bytes, where: str = NAME) -> "Manifest":
        """CheckpointCorrupt for damage, CheckpointMismatch for a schema that is not known."""
        first, _, rest = content.partition(b"\n")
        if len(first) > 1000:
            raise CheckpointCorrupt(f"{where}: the first line is not that of a manifest")
        head = Fields(parse_json(first, where), where)
        schema = head.whole("schema", 1)
        if schema != SCHEMA:
            raise CheckpointMismatch(f"{where}: schema {schema} is not known here, {SCHEMA} is: use a newer version")
        body = rest[:-1]
        if head.whole("bytes") != len(body) or rest[-1:] != b"\n":
            raise CheckpointCorrupt(f"{where}: {len(body)} bytes of {head.any('bytes')} are there")
        if head.text("sha256") != hashlib.sha256(body).hexdigest():
            raise CheckpointCorrupt(f"{where}: damaged, its digest is another")
        described = Fields(parse_json(body, where), where)
        versions = described.any("versions")
        return cls(
            folder=_folder(described.text("folder"), where),
            tree=described.any("tree"),
            files=_entries(described.items("files"), where),
            versions=versions if isinstance(versions, dict) else {},
        )


def _entries(listed: list[Any], where: str) -> list[FileEntry]:
    entries = []
    for each in listed:
        if not isinstance(each, list) or len(each) != 3:
            raise CheckpointCorrupt(f"{where}: a file is described by a name, a size and a checksum")
        name, size, checksum = each
        if type(size) is not int or not 0 <= size < 2**63 or type(checksum) is not int or not 0 <= checksum < 2**32:
            raise CheckpointCorrupt(f"{where}: the size or checksum of a file is none")
        entries.append(FileEntry(plain(name, where), size, checksum))
    if len({each.name for each in entries}) < len(entries):
        raise CheckpointCorrupt(f"{where}: a file comes twice")
    return entries


def _folder(name: str, where: str) -> str:
    if not _FOLDER.fullmatch(name):
        raise CheckpointCorrupt(f"{where}: {name[:40]!r} is no folder of a checkpoint")
    return name


def plain(name: Any, where: str) -> str:
    """A name of a file that leads nowhere else; of one in a folder the names of both, with a slash between."""
    parts = name.split("/") if isinstance(name, str) and 0 < len(name) < 1000 else [""]
    if len(parts) > 8 or any(part in ("", ".", "..") or len(part) > 250 or "\0" in part for part in parts):
        raise CheckpointCorrupt(f"{where}: {str(name)[:40]!r} is no name of a file")
    return str(name)
