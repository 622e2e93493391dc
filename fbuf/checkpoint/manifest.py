"""The manifest of a checkpoint: its files, their sizes, checksums and contents. Without one there is no checkpoint.

Its first line has the size and the digest of the rest, so that no byte of a checkpoint is without a check.
"""

import errno
import hashlib
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
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
    """The content of a manifest.

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
    def read(cls, folder: Path) -> "Manifest":
        """That of the checkpoint in a folder. FileNotFoundError where there is none, else as `decoded`."""
        return cls.decoded(_content(folder), str(folder / NAME))

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


def unreadable(name: str, error: OSError) -> Exception:
    """The error of a file that cannot be opened or read: what this process lacks is no fault of the file."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM):
        return OSError(error.errno, error.strerror, name)
    return CheckpointCorrupt(f"{name}: cannot be read ({error.strerror})")


def _content(folder: Path) -> bytes:
    name = folder / NAME
    try:  # without waiting for the other end of a pipe
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"there is no checkpoint in {folder}: {NAME} is missing") from error
    except OSError as error:
        raise unreadable(str(name), error) from error
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
            raise CheckpointCorrupt(f"{name}: {found.st_size} bytes, or no plain file: no manifest of a checkpoint")
        pieces = []
        while piece := os.read(handle, 1 << 22):
            pieces.append(piece)
        return b"".join(pieces)
    except OSError as error:
        raise unreadable(str(name), error) from error
    finally:
        os.close(handle)


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
    if not isinstance(name, str):
        raise CheckpointCorrupt(f"{where}: the name of a file is none")
    parts = name.split("/") if len(name) < 1000 else [""]
    odd = any(part in ("", ".", "..") or len(part) > 250 or "\0" in part for part in parts)
    if odd or len(parts) > 8 or not _is_encodable(name):
        raise CheckpointCorrupt(f"{where}: {name[:40]!r} is no name of a file")
    return name


def _is_encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True
