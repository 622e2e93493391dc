"""What the folder of a storage says about itself: its description, the counters of its rows, and checks of its files.

Nothing here needs torch or JAX.
"""

import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt, Fields, manifest

DESCRIPTION, STATE, LOCK = "storage.json", "storage.state", "storage.lock"
PRIORITIES, USES = "storage.priorities", "storage.uses"  # of the items: what one sampler keeps
VALUES = "storage.values"  # a folder
SUMS = "storage.sums"  # checksums of the files, see `interop.shared.checksums`
OWN = (DESCRIPTION, STATE, LOCK, PRIORITIES, USES, VALUES, SUMS)
FORMAT = 2
LONGEST = 1 << 26  # bytes of a description

# Words of the head of the state file: whether a transaction is open, and how many were committed. The counters follow.
ACTIVE, COMMITS, HEAD = 0, 4, 8
COUNTERS = ("size", "cursor", "written", "version", "count", "emptied")


def words_of(path: str | os.PathLike[str]) -> np.ndarray:
    """The head of a state file, and its counters twice: now, and before an open transaction. int64 [HEAD + 16]."""
    size = 8 * (HEAD + 16)
    with open(path, "rb") as file:
        return np.frombuffer(file.read(size).ljust(size, b"\0"), np.int64)


def commits_of(path: str | os.PathLike[str]) -> int:
    """The number of committed transactions of a record in a file."""
    return int(words_of(path)[COMMITS])


def counters_of(path: str | os.PathLike[str]) -> dict[str, int]:
    """The counters of the rows by name, as the last committed transaction left them."""
    words = words_of(path)
    start = HEAD + 8 if words[ACTIVE] else HEAD
    return dict(zip(COUNTERS, words[start : start + len(COUNTERS)].tolist(), strict=True))


def check_folders(root: Path, name: str) -> None:
    """`CheckpointCorrupt` where a link, or anything but a folder, is in the place of a folder between root and a file."""
    for folder in list((root / name).parents)[: len(Path(name).parts) - 1]:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            found = "a symbolic link" if folder.is_symlink() else "something else"
            raise CheckpointCorrupt(
                f"{folder} should be a folder, found {found}: files of a storage are below its folder"
            )


def check_file(path: Path, size: int | None = None) -> None:
    """`CheckpointCorrupt` for what is not a plain file, or not of this size."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise CheckpointCorrupt(f"{path} is missing, a file of a storage") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointCorrupt(f"{path} should be a plain file, found a link, a folder or something else")
    if size is not None and found.st_size != size:
        raise CheckpointCorrupt(f"{path} should be a file of {size} bytes, found {found.st_size}")


def is_there(root: Path) -> bool:
    """Whether the folder has a storage that was ever written. Others count as an unfinished creation."""
    try:
        return (root / DESCRIPTION).exists() and commits_of(root / STATE) > 0
    except FileNotFoundError:
        return False


def sealed(described: dict[str, Any]) -> str:
    """The text of a description, with its checksum."""
    text = json.dumps(described)
    return f'{{"checksum": "{zlib.crc32(text.encode()):08x}",\n"storage": {text}}}\n'


def description(root: Path) -> Fields:
    """What the description says. FileNotFoundError where there is none, `CheckpointCorrupt` for a damaged one."""
    path = root / DESCRIPTION
    if not os.path.lexists(path):
        if os.path.lexists(root / manifest.NAME):
            raise FileNotFoundError(
                f"{root} is a checkpoint, not a folder of rows: interop.open({str(root)!r}) opens it; or build the buffer "
                f"or storage, and load it by loads({str(root)!r})"
            )
        raise FileNotFoundError(
            f"{root} holds no storage that can be opened: there is no {DESCRIPTION} in it. LazyMemmapStorage(max_size, "
            "scratch_dir=...) makes one"
        )
    check_file(path)
    with open(path, "rb") as file:
        text = file.read(LONGEST)
    try:
        found = Fields(json.loads(text), str(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {error}") from error
    body = text.partition(b'"storage": ')[2].rpartition(b"}")[0]
    if found.text("checksum") != f"{zlib.crc32(body):08x}":
        raise CheckpointCorrupt(f"{path} is damaged: its checksum is of something else")
    fields = Fields(found.any("storage"), str(path))
    if (version := fields.whole("format")) != FORMAT:
        raise CheckpointCorrupt(f"{path} has the format {version}, known is {FORMAT}")
    return fields
