"""Folders that are there as a whole or not at all."""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fbuf.checkpoint.folder_lock import FolderLock
from fbuf.checkpoint.writing import flush

RECORD = "made_from.json"  # the last file written to a folder
KEPT = "downloads"  # a folder of the scratch folder that an error or a kill leaves, for the next attempt

_log = logging.getLogger("interop")


def publish(
    folder: Path, made_from: Mapping[str, Any], make: Callable[[Path], Mapping[str, Any] | None], *,
    anew: bool = False, replaces_foreign: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Make a folder by `make(scratch)` where it is missing. Returns its record: `made_from` and what `make` returned.

    `make` writes to `scratch / "data"`, which one rename puts in place: a process that is killed leaves no folder, and the
    next one removes what it did leave, except `scratch / "downloads"`. One process makes a folder at a time. Others wait
    for it, and log that they do.

    Args:
        anew: make it also where it is there. The old folder is replaced when the new one is complete.
        replaces_foreign: replace a folder without a record, which is not from here; otherwise it is a FileExistsError.

    Raises:
        ValueError: the folder was made from something else than `made_from`, or by a newer version.
    """
    if not anew and (found := _record(folder, made_from, replaces_foreign)):
        return found
    scratch = folder.parent / f".{folder.name}.making"
    with _locked(scratch, folder):
        found = _record(folder, {} if anew else made_from, replaces_foreign)
        if found and not anew:  # another process made it meanwhile
            return found
        _clear(scratch)
        try:
            data = scratch / "data"
            record = {**made_from, **(make(scratch) or {})}
            (data / RECORD).write_text(json.dumps(record))
            for each in [*data.rglob("*"), data]:
                flush(each)
            with contextlib.suppress(FileNotFoundError):
                folder.rename(scratch / "replaced")
            data.rename(folder)
            flush(folder.parent)
            _clear(scratch, but=())
        except BaseException:
            _clear(scratch)
            raise
    return record


def is_published(folder: Path, made_from: Mapping[str, Any]) -> bool:
    """Whether the folder is there, and was made from this."""
    try:
        return bool(_record(folder, made_from, False))
    except ValueError:
        return False


def _record(folder: Path, made_from: Mapping[str, Any], replaces_foreign: bool) -> dict[str, Any] | None:
    """The record of a complete folder, None where there is none."""
    try:
        found: dict[str, Any] = json.loads((folder / RECORD).read_bytes())
    except FileNotFoundError:
        is_empty = folder.is_dir() and not any(folder.iterdir())
        if replaces_foreign or is_empty or not os.path.lexists(folder):
            return None
        raise FileExistsError(
            f"{folder} is in the way: it is no dataset of this library. Move it, or pass another root"
        ) from None
    if found.get("schema", 0) > made_from.get("schema", found.get("schema", 0)):
        raise ValueError(
            f"{folder} was written by a newer version of this library (schema {found['schema']}): upgrade it"
        )
    if differ := [key for key, value in made_from.items() if found.get(key) != value]:
        there, asked = ({key: each.get(key) for key in differ} for each in (found, made_from))
        raise ValueError(f"{folder} was made from {there}, not {asked}: pass another root, or remove the folder")
    return found


@contextlib.contextmanager
def _locked(scratch: Path, folder: Path) -> Iterator[None]:
    """The scratch folder, held by this thread alone. It goes at the end, unless files are kept in it."""
    while True:
        scratch.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # its last holder removes it
            lock = FolderLock(scratch)
            lock.acquire(lambda: _log.warning("another process is making %s: waiting for it", folder))
            try:
                if os.path.samestat(os.stat(scratch), os.fstat(lock.handle)):
                    break
            except BaseException:
                lock.release()
                raise
            lock.release()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            scratch.rmdir()
        lock.release()


def _clear(scratch: Path, but: tuple[str, ...] = (KEPT,)) -> None:
    for each in scratch.iterdir():
        if each.name not in but:
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
