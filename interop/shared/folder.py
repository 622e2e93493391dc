"""The folder of a storage that can be opened again: who owns it, and how it comes into being though one may be killed.

`storage.lock` is locked by the owner, and lists the files that it makes, before it makes them. `storage.json` describes
the storage. It appears when all files are there at their full size: without it what is listed is what an unfinished
creation has left, which the next one removes.
"""

import contextlib
import copyreg
import errno
import fcntl
import gc
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from fbuf.checkpoint import CheckpointCorrupt, Fields
from interop.shared.files import Files, check_folders, write
from interop.shared.thread_lock import renew_in_children
from interop.shared.undo import commits_of
from interop.storages import planning

DESCRIPTION, STATE, LOCK, PRIORITIES = "storage.json", "storage.state", "storage.lock", "storage.priorities"
VALUES = "storage.values"  # a folder
OWN = (DESCRIPTION, STATE, LOCK, PRIORITIES, VALUES)
_FORMAT = 2
_LONGEST = 1 << 26  # bytes of a description


class Owner:
    """The lock of a folder, held by one storage and the worker processes that have it. Released by the last of them.

    RuntimeError if another storage holds it, in this process or in another. CheckpointCorrupt for a lock file with other
    content.

    Attributes:
        is_open: whether this process holds it, perhaps as a worker.
        is_here: whether this process took it and still holds it.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / LOCK
        self._pid = os.getpid()
        self.is_here = self.is_open = True
        renew_in_children(self)
        self._handle, self.is_new = self._locked()
        try:
            self.list(self.noted())
        except BaseException:
            self.close()
            raise

    def _locked(self) -> tuple[int, bool]:
        mine = True
        while True:
            new = not os.path.lexists(self.path)
            handle = _plain(self.path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.lexists(self.path) and os.path.samestat(os.fstat(handle), os.lstat(self.path)):
                    return handle, new
                os.close(handle)  # its owner has removed it meanwhile
            except BlockingIOError:
                try:
                    pid: Any = _listed(handle, self.path)[0]
                except CheckpointCorrupt:
                    pid = "unknown"
                finally:
                    os.close(handle)
                if pid == os.getpid() and mine:  # of a storage that nobody has any more, perhaps
                    mine = False
                    gc.collect()
                    continue
                who = "another storage of this process" if pid == os.getpid() else f"the process {pid}"
                raise RuntimeError(
                    f"{self.path.parent} is in use by {who} (pid {pid}): only one writes to it, and the workers that it "
                    "starts. Open it with mode='r' to read, or wait until that one is gone"
                ) from None
            except BaseException:
                os.close(handle)
                raise

    def noted(self) -> list[str]:
        """The files that are listed by now, by another process with this right perhaps."""
        return _listed(self._handle, self.path)[1]

    def list(self, names: list[str]) -> None:
        """Note which files are made here, in one write."""
        self.listed = names
        text = json.dumps({"pid": self._pid, "files": names})
        line = f"{zlib.crc32(text.encode()):08x} {text}\n".encode()
        os.lseek(self._handle, 0, os.SEEK_SET)
        write(self._handle, line)
        os.ftruncate(self._handle, len(line))

    def clear(self, keep: frozenset[str] = frozenset()) -> None:
        """Remove the files that are listed, the description first."""
        for path in files_below(self.path.parent, set(self.listed) - keep - {LOCK}):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def renew(self) -> None:
        self.is_here = False

    def close(self) -> None:
        """Release the lock in this process."""
        self.is_here = self.is_open = False
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)  # to unlock it would unlock it for workers, too

    def folder(self) -> Path:
        """Where the folder is now: it may have been renamed, and its name be another's. RuntimeError where it is gone."""
        held, now = os.fstat(self._handle), _name_of(self._handle)
        for path in (self.path, now):
            if path is not None and path.name == LOCK and _is_at(held, path):
                return path.parent
        here = self.path.parent
        found = "the folder of that name is another one" if here.exists() else "there is no folder of that name"
        raise RuntimeError(
            f"{here} was removed, or renamed, while the storage in it was open: {found}, and its lock is "
            f"{'not to be found' if now is None else f'at {now}'}. Give the folder its name again, or open it by the new one"
        )

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (Owner,), (DupFd(self._handle), self.folder() / LOCK, self._pid)  # type: ignore[attr-defined]

    def __setstate__(self, state: tuple[Any, Path, int]) -> None:
        duplicate, self.path, self._pid = state
        self._handle, self.is_new, self.listed = duplicate.detach(), False, []
        self.is_here, self.is_open = False, True


def _name_of(handle: int) -> Path | None:
    """What the file is called by now, where the system tells."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{handle}"))
    except OSError:
        return None


def _is_at(held: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(held, os.lstat(path))
    except OSError:
        return False


def files_below(root: Path, names: Iterable[str]) -> Iterator[Path]:
    """Those of the names that are files in the folder, or in real folders in it, a description first."""
    for name in sorted(names, key=lambda name: name != DESCRIPTION):
        parts = Path(name).parts
        if not parts or ".." in parts or Path(name).is_absolute():
            continue
        try:
            check_folders(root, name)
            mode = os.lstat(root / name).st_mode
        except (CheckpointCorrupt, OSError):  # what is not there, or cannot be, is of no other
            continue
        if not stat.S_ISDIR(mode):
            yield root / name


def _plain(path: Path, flags: int) -> int:
    """A descriptor of a plain file. CheckpointCorrupt for a link, a folder or whatever else."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    else:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
    raise CheckpointCorrupt(f"{path} should be a plain file, found a link, a folder or something else")


def _listed(handle: int, path: Path) -> tuple[Any, list[str]]:
    """The process that wrote the lock file last, and which files it was making. Nothing of a file that was half written."""
    checksum, _, text = os.pread(handle, _LONGEST, 0).partition(b"\n")[0].partition(b" ")
    if checksum != f"{zlib.crc32(text):08x}".encode():
        return "unknown", []
    try:
        fields = Fields(json.loads(text), str(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {error}") from error
    names = fields.items("files")
    if not all(isinstance(name, str) and _may_name(name) for name in names):
        raise CheckpointCorrupt(f"{path}: files should be names of files")
    return fields.whole("pid"), names


def _may_name(name: str) -> bool:
    """Whether a file can have this name."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


# ------------------------------------------------------------------ making it


def is_there(root: Path) -> bool:
    """Whether a storage is there that was ever written; another one is as good as an unfinished one."""
    try:
        return (root / DESCRIPTION).exists() and commits_of(root / STATE) > 0
    except FileNotFoundError:
        return False


def own(root: Path) -> tuple[Owner, Files]:
    """Make a folder, where it is missing, and take it; with what was made for that."""
    files = Files()
    try:
        files.folder(root)
        owner = Owner(root)
        if owner.is_new:
            files.adopt([owner.path])
    except BaseException:
        files.remove()
        raise
    return owner, files


def make(
    root: Path,
    sizes: Mapping[str, int],
    texts: Mapping[str, str],
    described: Mapping[str, Any],
    existsok: bool,
    owner: Owner | None = None,
    fill: Callable[[], None] | None = None,
) -> tuple[Owner, Files]:
    """Make files of zeros, texts and a description, all or none.

    RuntimeError where files of these names or a storage are there, unless that is ok: then they are replaced, and no row of
    them is seen again. OSError where the disk is full.

    Args:
        described: what the storage is.
        owner: of the storage that is there. It goes on with the state that it has, and other files. A process that is
            killed within this leaves it as it was, or as it is to be.
        fill: the files come beside those of the storage that is there: writes them, before texts and description replace
            those that do not name them.
    """
    goes_on = owner is not None
    owner, files = (owner, Files()) if owner is not None else own(root)
    listed = owner.listed
    try:
        owner.listed = listed = owner.noted()  # a worker may have been killed making them
        there = goes_on or is_there(root)
        if fill is not None:
            owner.clear(frozenset(listed) - sizes.keys())  # what one has left that was broken off
        elif there and not (existsok or goes_on):
            raise RuntimeError(
                f"{root} already exists as a storage: LazyMemmapStorage.open() goes on with it, existsok=True puts a new "
                "one in its place"
            )
        elif not there:
            owner.clear()
            listed = []
            owner.list(listed)
        new = {name: size for name, size in sizes.items() if not (goes_on and name == STATE)}
        for name in (*new, *texts):
            files.claim(root, name, existsok or (goes_on and name in listed))
        files.claim(root, DESCRIPTION, existsok or goes_on, aside=True)
        kept = {*sizes, *texts, DESCRIPTION, *(listed if fill is not None else ())}
        made = kept | {path.relative_to(root).as_posix() for path in files.names}
        owner.list(sorted(made | set(listed)))
        planning.refuse_files(str(root), new)
        for name, size in new.items():
            files.reserve(root / name, size)
        for name, text in texts.items():
            files.write(root / name, text)
        files.write(root / DESCRIPTION, sealed({"format": _FORMAT, "files": dict(sizes), **described}))
        if not goes_on:
            owner.clear(keep=frozenset(made - {DESCRIPTION}))  # what is there now is no storage any more
        if fill is not None:
            fill()
        files.put_in_place()
        if goes_on:
            owner.clear(keep=frozenset(kept))
        owner.list(sorted(kept))
    except BaseException:
        files.remove()
        with contextlib.suppress(OSError):
            owner.list(listed)
        if not goes_on:
            owner.close()
        raise
    return owner, files


def sealed(described: dict[str, Any]) -> str:
    """The text of a description, with its checksum."""
    text = json.dumps(described)
    return f'{{"checksum": "{zlib.crc32(text.encode()):08x}",\n"storage": {text}}}\n'


def description(root: Path) -> Fields:
    """What the description says, which is as it was written. FileNotFoundError where there is none."""
    path = root / DESCRIPTION
    try:
        handle = _plain(path, os.O_RDONLY)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{root} holds no storage that can be opened: there is no {DESCRIPTION} in it. LazyMemmapStorage(max_size, "
            "scratch_dir=...) makes one"
        ) from None
    with os.fdopen(handle, "rb") as file:
        text = file.read(_LONGEST)
    try:
        found = Fields(json.loads(text), str(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {error}") from error
    body = text.partition(b'"storage": ')[2].rpartition(b"}")[0]
    if found.text("checksum") != f"{zlib.crc32(body):08x}":
        raise CheckpointCorrupt(f"{path} is damaged: its checksum is of something else")
    fields = Fields(found.any("storage"), str(path))
    if (version := fields.whole("format")) != _FORMAT:
        raise CheckpointCorrupt(f"{path} has the format {version}, known is {_FORMAT}")
    return fields


def reserve_again(path: Path, least: int = 0) -> None:
    """Have disk space for all of a file: a copy of it may have none for zeros. OSError where the disk has no room."""
    if hasattr(os, "posix_fallocate") and (size := max(os.path.getsize(path), least)):
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.posix_fallocate(handle, 0, size)
        finally:
            os.close(handle)


def check_size(path: Path, size: int) -> None:
    """CheckpointCorrupt for what is not a plain file of this size."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise CheckpointCorrupt(f"{path} is missing, a file of a storage") from error
    if os.path.islink(path) or not os.path.isfile(path) or found.st_size != size:
        raise CheckpointCorrupt(f"{path} should be a file of {size} bytes, found {found.st_size}")
