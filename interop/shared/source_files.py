"""The state of files that something is made from, to notice when they change."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from interop.shared.published_folder import RECORD


def files_below(folder: Path) -> list[Path]:
    """The files of a folder and its subfolders, sorted.

    Hidden files and folders, whose names begin with a dot, are left out, since programs put them into folders of data. So
    are folders that this library made, which may be below the folder that they are made from.
    """
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        if RECORD in names and Path(place) != folder:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def state_of(files: Iterable[Path], folder: Path) -> str:
    """A checksum of the names below `folder`, the sizes and the times of last modification of files.

    It changes when a file is written, added, removed or renamed. The contents are not read: a call takes some microseconds
    a file.
    """
    checksum = hashlib.sha256()
    for path in sorted(files):
        state = path.stat()
        name = os.fsencode(os.path.relpath(path, folder))
        checksum.update(b"%s\0%d\0%d\0" % (name, state.st_size, state.st_mtime_ns))
    return checksum.hexdigest()
