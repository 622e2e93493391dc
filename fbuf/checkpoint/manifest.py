"""The manifest of a checkpoint: its files, their sizes and checksums, and its tree as JSON. No manifest, no checkpoint.

Its first line has the size and the digest of the rest, so every byte of a checkpoint is checked.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fbuf.checkpoint import json_text
from fbuf.checkpoint.arrays import Columns
from fbuf.checkpoint.fields import CheckpointCorrupt, CheckpointMismatch, Fields
from fbuf.checkpoint.files import opened, read_into

NAME = "MANIFEST.json"
FOLDER = "data-"  # begins the name of the folder with the files of one checkpoint
SCHEMA = 1
LARGEST = json_text.LARGEST  # bytes
_FOLDER = re.compile(rf"{FOLDER}[0-9a-f]{{16}}")
_DEPTH = 200
_MARK = "$"  # begins the keys that say what a dict stands for


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    Attributes:
        name: its path in the folder.
        size: bytes.
        checksum: CRC-32.

    Attributes:
        name: TODO.
        size: TODO.
        checksum: TODO.
    """

    name: str
    size: int
    checksum: int


@dataclass
class Manifest:
    """The content of a manifest.

    Args:
        folder: the data folder, in the folder of the manifest.
        tree: the saved tree; descriptions stand for its arrays.
        files: all files.
        versions: of the libraries that wrote it, for people.
    """

    folder: str
    tree: Any
    files: list[FileEntry]
    versions: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The content of the file. ValueError if it is too large."""
        files = [[each.name, each.size, each.checksum] for each in self.files]
        body = dump_json({"folder": self.folder, "versions": self.versions, "files": files, "tree": self.tree})
        head = dump_json({"schema": SCHEMA, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()})
        if len(head) + len(body) + 2 > LARGEST:
            raise ValueError(
                f"the description of the checkpoint takes {len(body)} bytes, the most is {LARGEST}: it has too many "
                "separate values. Save items that are alike, or tensors of many values"
            )
        return head + b"\n" + body + b"\n"

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of the checkpoint in a folder. FileNotFoundError if there is none; other errors as `decoded`."""
        name = folder / NAME
        try:
            with opened(name) as (handle, size):
                if not 0 <= size <= LARGEST:
                    raise CheckpointCorrupt(f"{name}: {size} bytes, or no plain file: no manifest of a checkpoint")
                content = np.empty(size, np.uint8)
                read_into(handle, content)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"there is no checkpoint in {folder}: {NAME} is missing") from error
        except OSError as error:
            raise unreadable(str(name), error) from error
        except EOFError as error:
            raise CheckpointCorrupt(f"{name}: ends too soon") from error
        return cls.decoded(content.tobytes(), str(name))

    @classmethod
    def decoded(cls, content: bytes, where: str = NAME) -> "Manifest":
        """CheckpointCorrupt for damage, CheckpointMismatch for an unknown schema."""
        first, _, rest = content.partition(b"\n")
        if len(first) > 1000:
            raise CheckpointCorrupt(f"{where}: the first line is not that of a manifest")
        head, body = Fields(parse_json(first, where), where), rest[:-1]
        schema = head.whole("schema", 1)
        if schema != SCHEMA:
            raise CheckpointMismatch(f"{where}: schema {schema} is not known here, {SCHEMA} is: use a newer version")
        if head.whole("bytes") != len(body) or rest[-1:] != b"\n":
            raise CheckpointCorrupt(f"{where}: {len(body)} bytes of {head.any('bytes')} are there")
        if head.text("sha256") != hashlib.sha256(body).hexdigest():
            raise CheckpointCorrupt(f"{where}: damaged, its digest is another")
        described = Fields(parse_json(body, where), where)
        folder, versions = described.text("folder"), described.any("versions")
        if not _FOLDER.fullmatch(folder):
            raise CheckpointCorrupt(f"{where}: {folder[:40]!r} is no folder of a checkpoint")
        files = [_entry(each, where) for each in described.items("files")]
        if len({each.name for each in files}) < len(files):
            raise CheckpointCorrupt(f"{where}: a file comes twice")
        return cls(folder, described.any("tree"), files, versions if isinstance(versions, dict) else {})


def _entry(described: Any, where: str) -> FileEntry:
    if not isinstance(described, list) or len(described) != 3:
        raise CheckpointCorrupt(f"{where}: a file is described by a name, a size and a checksum")
    entry = Fields(dict(zip(("name", "size", "checksum"), described, strict=True)), f"{where}, a file")
    return FileEntry(plain(entry.any("name"), where), entry.whole("size"), entry.whole("checksum", most=2**32 - 1))


def plain(name: Any, where: str) -> str:
    """The relative path of a file, if it stays in its folder and has at most 8 parts. CheckpointCorrupt otherwise."""
    try:
        parts = name.split("/") if isinstance(name, str) and os.fsencode(name) and len(name) < 1000 else [""]
    except UnicodeEncodeError:
        parts = [""]
    if len(parts) > 8 or any(part in ("", ".", "..") or len(part) > 250 or "\0" in part for part in parts):
        raise CheckpointCorrupt(f"{where}: {str(name)[:40]!r} is no name of a file")
    return str(name)


def unreadable(name: str, error: OSError) -> Exception:
    """The error of a file that cannot be opened or read: an OSError if the process lacks rights or resources."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM):
        return OSError(error.errno, error.strerror, name)
    return CheckpointCorrupt(f"{name}: cannot be read ({error.strerror})")


# ---------------------------------------------------------------------- trees as JSON


def lower(value: Any, place: Callable[[Any], dict[str, Any]], depth: int = 0) -> Any:
    """The JSON of a tree; `place` describes an array or columns. TypeError for other values.

    A tree is made of dicts with text keys, lists, None, bools, integers of 64 bits, floats, texts, arrays and `Columns`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"an integer of more than 64 bits cannot be saved: {value}")
        return value
    if type(value) is float:
        return value if -1e308 <= value <= 1e308 else {"$float": value.hex()}
    if depth > _DEPTH:
        raise ValueError(f"the saved tree is nested more than {_DEPTH} deep")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"the keys of saved dicts must be texts, got {[*value][:5]}")
        entries = {key: lower(each, place, depth + 1) for key, each in value.items()}
        return {"$dict": entries} if any(key.startswith(_MARK) for key in entries) else entries
    if isinstance(value, list | tuple):
        return [lower(each, place, depth + 1) for each in value]
    if isinstance(value, np.ndarray | np.generic | Columns):
        return place(value)
    raise TypeError(f"{type(value).__name__} cannot be saved here")


def lift(value: Any, found: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """The tree of JSON; `found(mark, description)` returns an array or columns. CheckpointCorrupt for other JSON."""
    if not isinstance(value, list | dict):
        return value
    if depth > _DEPTH:
        raise CheckpointCorrupt(f"the manifest is nested more than {_DEPTH} deep")
    if isinstance(value, list):
        return [lift(each, found, depth + 1) for each in value]
    if len(value) == 1:
        (mark, described), *_ = value.items()
        if mark == "$dict" and isinstance(described, dict):
            return {key: lift(each, found, depth + 1) for key, each in described.items()}
        if mark == "$float":
            try:
                return float.fromhex(described)
            except (TypeError, ValueError, OverflowError) as error:
                raise CheckpointCorrupt("a number in the manifest is none") from error
        if mark.startswith(_MARK):
            return found(mark, described)
    if any(key.startswith(_MARK) for key in value):
        raise CheckpointCorrupt(f"unknown entries in the manifest: {[*value][:5]}")
    return {key: lift(each, found, depth + 1) for key, each in value.items()}


def dump_json(value: Any) -> bytes:
    """JSON in one line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def parse_json(text: bytes, name: str) -> Any:
    """Strict JSON: no NaN, no key twice, no endless nesting. CheckpointCorrupt naming the file for anything else."""
    return json_text.parsed(text, name, CheckpointCorrupt, deepest=3 * _DEPTH, constants=False, halves=True)
