"""Folders that are there as a whole or not at all."""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from fbuf.checkpoint import CheckpointCorrupt
from fbuf.checkpoint.files import FolderLock
from fbuf.checkpoint.writing import flush

RECORD = "made_from.json"  # the last file written to a folder
DOWNLOADS, PROGRESS = "downloads", "progress"  # folders of the scratch folder that an error or a kill leaves
_REPLACED = "replaced"  # the old folder, between the two renames of a replacement

_log = logging.getLogger("interop")
T = TypeVar("T")


def publish(
    folder: Path, made_from: Mapping[str, Any] | None, make: Callable[[Path], Mapping[str, Any] | None], *,
    when: Literal["missing", "differs", "always"] = "missing", replaces_foreign: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Make a folder by `make(scratch)` where it is missing. Returns its record: `made_from`, what `make` returned, and the
    sizes of its "files".

    `make` writes to `scratch / "data"`, which one rename puts in place. A process that is killed leaves the folder as it
    was, or as it is to be. What it leaves beside it is removed by the next call, but for `scratch / DOWNLOADS` and
    `scratch / PROGRESS`, which the next `make` gets. One process makes a folder at a time. Others wait for it, and log that
    they do. Symbolic links in the path are resolved once.

    Args:
        made_from: None for a folder of files for others, which gets no record, and is never one that need not be made.
        when: "differs" makes a folder anew that was made from something else, "always" any. The old folder is replaced
            when the new one is complete. Both have the same "kind" in their records.
        replaces_foreign: replace a folder without a record.

    Raises:
        FileExistsError: something else is there, which stays.
        ValueError: the folder was made from something else, or by a newer version.
        CheckpointCorrupt: its record is damaged.
    """
    folder = Path(os.path.realpath(folder))
    scratch = _scratch(folder)
    if found := _usable(folder, made_from or {}, when, replaces_foreign):
        if scratch.exists():
            with contextlib.suppress(OSError), _locked(scratch, _do_not_wait):
                _clear(scratch, PROGRESS)
        return found
    with _locked(scratch, lambda: _log.warning("another process is making %s: waiting for it", folder)):
        _put_back(scratch, folder)
        if found := _usable(folder, made_from or {}, when, replaces_foreign):  # another process made it meanwhile
            _clear(scratch, PROGRESS)
            return found
        _clear(scratch, DOWNLOADS, PROGRESS)
        replaces = not _is_empty(folder)
        try:
            data = scratch / "data"
            record = {**(made_from or {}), **(make(scratch) or {})}
            record["files"] = {os.fspath(each.relative_to(data)): each.stat().st_size for each in _files(data)}
            if made_from is not None:
                (data / RECORD).write_text(json.dumps(record))
            for each in [*data.rglob("*"), data]:
                flush(each)
            if replaces:
                folder.rename(scratch / _REPLACED)
            data.rename(folder)
            flush(folder.parent)
            _clear(scratch)
        except BaseException:
            _put_back(scratch, folder)
            _clear(scratch, DOWNLOADS, PROGRESS)
            raise
    return record


def check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    """CheckpointCorrupt where files, by their names in the folder, do not have these sizes."""
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            came = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointCorrupt(f"{folder / name} {came}, it was written with {size}")


def read_whole(folder: Path, make_sure: Callable[[], object], read: Callable[[], T]) -> T:
    """`read()` of a folder that `make_sure()` makes where it is missing.

    Both are called again where another process has replaced, or removed, the folder meanwhile.
    """
    while True:
        make_sure()
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # no other one gets its number
        except FileNotFoundError:
            continue
        try:
            found = read()
        except Exception:
            if _is_still(folder, held):
                raise
        else:
            if _is_still(folder, held):
                return found
        finally:
            os.close(held)


def _is_still(folder: Path, held: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.fstat(held))
    except FileNotFoundError:
        return False


def is_there(folder: Path) -> bool:
    """Whether a folder was made, be it that it is being replaced, or that a process was killed when it replaced it."""
    folder = Path(os.path.realpath(folder))
    return any((each / RECORD).exists() for each in (folder, _scratch(folder) / _REPLACED, folder))


def remove(folder: Path) -> None:
    """Remove a folder as a whole, and what was left beside it."""
    folder = Path(os.path.realpath(folder))
    scratch = _scratch(folder)
    with _locked(scratch, lambda: _log.warning("another process is making %s: waiting for it", folder)):
        with contextlib.suppress(FileNotFoundError):
            folder.rename(scratch / "removed")
        _clear(scratch)


def _is_empty(folder: Path) -> bool:
    """Whether there is no such folder, or nothing in it."""
    try:
        return not os.listdir(folder)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _scratch(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.making")


def _usable(
    folder: Path, made_from: Mapping[str, Any], when: Literal["missing", "differs", "always"], replaces_foreign: bool
) -> dict[str, Any] | None:
    """The record of a folder that need not be made. None where it may."""
    try:
        found = json.loads((folder / RECORD).read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"it has a {type(found).__name__}")
    except (FileNotFoundError, NotADirectoryError):
        if _is_empty(folder) or (replaces_foreign and folder.is_dir()):
            return None
        if (folder / RECORD).exists():  # it was put in place at this moment
            return _usable(folder, made_from, when, replaces_foreign)
        raise FileExistsError(
            f"{folder} is in the way: it was not made by this library. Move it, or pass another root"
        ) from None
    except ValueError as error:
        if when == "always":
            return None
        raise CheckpointCorrupt(f"{folder / RECORD} is damaged: {error}") from error
    if found.get("kind") != made_from.get("kind"):
        has = found.get("kind", "something else")
        raise FileExistsError(f"{folder} is in the way: it has {has}. Move it, or pass another root")
    if when == "always":
        return None
    if found.get("schema", 0) > made_from.get("schema", found.get("schema", 0)):
        raise ValueError(
            f"{folder} was written by a newer version of this library (schema {found['schema']}): upgrade it"
        )
    if differ := [key for key, value in made_from.items() if found.get(key) != value]:
        if when == "differs":
            return None
        there, asked = ({key: each.get(key) for key in differ} for each in (found, made_from))
        raise ValueError(f"{folder} was made from {there}, not {asked}: pass another root, or remove the folder")
    return found


@contextlib.contextmanager
def _locked(scratch: Path, waits: Callable[[], None]) -> Iterator[None]:
    """The scratch folder, held by this thread alone. It goes at the end, unless files are kept in it."""
    while True:
        with contextlib.suppress(FileExistsError):
            scratch.mkdir(parents=True)
        with contextlib.suppress(FileNotFoundError):  # its last holder removes it
            lock = FolderLock(scratch, waits)
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


def _do_not_wait() -> NoReturn:
    raise BlockingIOError


def _put_back(scratch: Path, folder: Path) -> None:
    """Undo a replacement that was broken off between its two renames."""
    if not os.path.lexists(folder) and (scratch / _REPLACED).exists():
        (scratch / _REPLACED).rename(folder)


def _clear(scratch: Path, *but: str) -> None:
    for each in scratch.iterdir():
        if each.name not in but:
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
