"""Folders that are complete or absent: made beside their place, and put there by one rename."""

import contextlib
import ctypes
import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from fbuf.checkpoint import CheckpointCorrupt, Fields, json_text
from fbuf.checkpoint.files import FolderLock
from fbuf.checkpoint.writing import flush

RECORD = "made_from.json"  # the last file that is written to a folder
DOWNLOADS, PROGRESS = "downloads", "progress"  # folders of the scratch folder that stay after an error or a kill
_REPLACED = "replaced"  # the old folder, between the two renames of a replacement
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux

_log = logging.getLogger("interop")
T = TypeVar("T")


def publish(
    folder: Path, made_from: Mapping[str, Any] | None, make: Callable[[Path], Mapping[str, Any] | None], *,
    when: Literal["missing", "differs", "always"] = "missing", replaces_foreign: bool = False,
    states: Collection[str] = (), exchanges: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Make a folder by `make(scratch)` where it is missing. Returns its record: `made_from`, the result of `make`, and
    the sizes of its "files".

    `make` writes to `scratch / "data"`, and one rename commits it. A killed process leaves the folder as it was, or as
    it is to be. The next call removes its leftovers, except `scratch / DOWNLOADS` and `scratch / PROGRESS`, which the
    next `make` gets. One process makes a folder at a time; others log that they wait. Symbolic links in the path are
    resolved once.

    Args:
        made_from: None for a folder of files for other programs. It gets no record, and is made each time.
        when: "differs" replaces a folder that was made from something else, "always" any folder, when the new one is
            complete. Both have the same "kind" in their records.
        replaces_foreign: replace a folder without a record.
        states: keys of `made_from` with states of the files that the folder was made from. A folder that differs in these
            alone is stale, and is replaced.
        exchanges: replace a folder by one rename that exchanges it with the new one, where the system has it, so that
            other programs find a folder at every moment. Otherwise there are two renames, and the next call puts the old
            folder back after a kill between them.

    Raises:
        FileExistsError: something else is there, which stays.
        ValueError: the folder was made from something else, or by a newer version.
        CheckpointCorrupt: its record is damaged.
    """
    folder = Path(os.path.realpath(folder))
    scratch = _scratch(folder)
    if found := _usable(folder, made_from or {}, when, replaces_foreign, states):
        if scratch.exists():
            with contextlib.suppress(OSError), _locked(scratch, _do_not_wait):
                _clear(scratch, PROGRESS)
        return found
    with _locked(scratch, lambda: _log.warning("another process is making %s: waiting for it", folder)):
        _put_back(scratch, folder)
        if found := _usable(
            folder, made_from or {}, when, replaces_foreign, states
        ):  # another process made it meanwhile
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
            if not (replaces and exchanges and _exchanged(data, folder)):
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


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders by one rename, so that a kill leaves one of them at each path. False where it cannot be done."""
    try:
        exchange = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # not Linux, or an old libc
        return False
    return exchange(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


def check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    """CheckpointCorrupt where files of a folder do not have these sizes."""
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            came = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointCorrupt(f"{folder / name} {came}, it was written with {size}")


def read_whole(folder: Path, make_sure: Callable[[], object], read: Callable[[], T]) -> T:
    """The result of `read()`, after `make_sure()` has made the folder.

    Both are called again where another process replaced or removed the folder meanwhile.
    """
    while True:
        make_sure()
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # keeps its inode
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
    """Whether a folder was made, also while a process replaces it or after it was killed then."""
    folder = Path(os.path.realpath(folder))
    return any((each / RECORD).exists() for each in (folder, _scratch(folder) / _REPLACED, folder))


def remove(folder: Path) -> None:
    """Remove a folder by one rename, with the leftovers beside it."""
    folder = Path(os.path.realpath(folder))
    scratch = _scratch(folder)
    with _locked(scratch, lambda: _log.warning("another process is making %s: waiting for it", folder)):
        with contextlib.suppress(FileNotFoundError):
            folder.rename(scratch / "removed")
        _clear(scratch)


def _is_empty(folder: Path) -> bool:
    """Whether the folder is missing or has no files."""
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
    folder: Path, made_from: Mapping[str, Any], when: Literal["missing", "differs", "always"], replaces_foreign: bool,
    states: Collection[str],
) -> dict[str, Any] | None:  # fmt: skip
    """The record of a folder that can be used; None for one that is to be made."""
    try:
        text = (folder / RECORD).read_bytes()
        held = Fields(
            json_text.parsed(text, RECORD, CheckpointCorrupt, deepest=256, largest=len(text), halves=True), RECORD
        )
        found = {name: held.any(name) for name in held}
        schema = held.whole("schema") if "schema" in held else 0
    except (FileNotFoundError, NotADirectoryError):
        if _is_empty(folder) or (replaces_foreign and folder.is_dir()):
            return None
        if (folder / RECORD).exists():  # it was put in place at this moment
            return _usable(folder, made_from, when, replaces_foreign, states)
        raise FileExistsError(
            f"{folder} is in the way: it was not made by this library. Move it, or pass another root"
        ) from None
    except CheckpointCorrupt as error:
        if when == "always":
            return None
        raise CheckpointCorrupt(f"{folder / RECORD} is damaged: {error}") from error
    if found.get("kind") != made_from.get("kind"):
        has = found.get("kind", "something else")
        raise FileExistsError(f"{folder} is in the way: it has {has}. Move it, or pass another root")
    if when == "always":
        return None
    if schema > made_from.get("schema", schema):
        raise ValueError(f"{folder} was written by a newer version of this library (schema {schema}): upgrade it")
    different = [key for key, value in made_from.items() if found.get(key) != value]
    if differ := [key for key in different if key not in states]:
        if when == "differs":
            return None
        there, asked = ({key: each.get(key) for key in differ} for each in (found, made_from))
        raise ValueError(f"{folder} was made from {there}, not {asked}: pass another root, or remove the folder")
    return None if different else found


@contextlib.contextmanager
def _locked(scratch: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Lock the scratch folder, and remove it at the end unless files are kept in it."""
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
    """Roll back a replacement that ended between its two renames."""
    if not os.path.lexists(folder) and (scratch / _REPLACED).exists():
        (scratch / _REPLACED).rename(folder)


def _clear(scratch: Path, *but: str) -> None:
    for each in scratch.iterdir():
        if each.name not in but:
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
