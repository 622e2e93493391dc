"""The folder of a storage in files: who owns it, and how its files come into being though a process may be killed.

`storage.lock` is locked by the owner. It lists the files of the storage, each before it is made. `storage.json`
describes the storage and is the last file to appear: without it, the listed files are the rest of an unfinished
creation, which the next owner removes.
"""

import contextlib
import copyreg
import fcntl
import gc
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from fbuf.checkpoint import CheckpointCorrupt
from fbuf.checkpoint.files import remove_folder
from fbuf.memory_plan import Plan, Share
from interop.host.threads import renew_in_children
from interop.shared.folder_description import (
    DESCRIPTION,
    FORMAT,
    LOCK,
    LONGEST,
    PRIORITIES,
    STATE,
    SUMS,
    VALUES,
    check_file,
    check_folders,
    is_there,
    sealed,
)

_CHUNK = bytes(1 << 20)


class Folder:
    """A folder that one storage owns, together with the worker processes that were given the storage.

    The kernel ends the ownership with the last of these processes. RuntimeError at construction where another storage
    owns the folder, in this process or in another one.

    Attributes:
        is_open: whether this process, the owner or a worker, may write.
        is_here: whether this process is the owner, and has not closed the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._pid, self._handle = path, os.getpid(), -1
        self.is_here = self.is_open = True
        renew_in_children(self.renew)
        self._holds_storage = False  # which this object made or opened
        self._made = [each for each in (path, *path.parents) if not each.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._is_new = not os.path.lexists(path / LOCK)
            self._handle = _locked(path / LOCK)
            self._list(self.files())
        except BaseException:
            self.close()
            self._remove_folders()
            raise

    @property
    def path(self) -> Path:
        """The folder. RuntimeError where it was removed or renamed."""
        if _is_at(self._handle, self._path / LOCK):
            return self._path
        raise RuntimeError(
            f"{self._path} was removed or renamed while the storage in it was open: give the folder its name again, or open "
            "the storage anew"
        )

    def renew(self) -> None:
        self.is_here = False  # in a forked child

    def close(self) -> None:
        """Give up the folder, in this process."""
        self.is_here = self.is_open = False
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)  # not unlocked: that would unlock it for workers, too

    def files(self) -> list[str]:
        """The listed files; a worker may have changed the list."""
        return _listed(self._handle)[1]

    def opened(self) -> None:
        """The storage that is in the folder goes on."""
        self._holds_storage = True

    def _list(self, names: Iterable[str]) -> None:
        line = json.dumps({"pid": self._pid, "files": sorted(set(names))}).encode() + b"\n"
        os.pwrite(self._handle, line, 0)
        os.ftruncate(self._handle, len(line))

    # ------------------------------------------------------------------ files

    def make(
        self,
        sizes: Mapping[str, int],
        texts: Mapping[str, str],
        described: Mapping[str, Any],
        existsok: bool = False,
        fill: Callable[[], None] | None = None,
    ) -> None:
        """Make files of zeros, texts and a description: all of them, or none where it raises.

        A storage that this object holds already keeps its state file, and a kill leaves it as it was or as it is to be.

        Args:
            sizes: bytes by name.
            existsok: replace files and a storage that are there, whose rows are lost then.
            fill: the files are added to those of the storage; it writes them before the description names them.

        RuntimeError where a storage or files of these names are there, OSError where the disk is full,
        `CheckpointCorrupt` where a link is in the place of a subfolder.
        """
        root, listed, held = self.path, self.files(), self._holds_storage
        if not held and not is_there(root):
            self._remove(listed)  # an unfinished creation
            listed = []
        elif not held and not existsok:
            raise RuntimeError(
                f"{root} already exists as a storage: LazyMemmapStorage.open() goes on with it, existsok=True puts a new "
                "one in its place"
            )
        sizes = {name: size for name, size in sizes.items() if not (held and name == STATE)}
        texts = {**texts, DESCRIPTION: sealed({"format": FORMAT, **described})}
        beside = {name: _beside(name) for name in (*sizes, *texts)}
        replaceable = {*listed, DESCRIPTION} if held else set()
        for name in beside:
            refuse_existing(root, name, existsok or name in replaceable)
        placed: list[str] = []
        try:
            self._list([*listed, *beside, *beside.values()])
            refuse_full(root, sizes)
            for name, size in sizes.items():
                zeros(root / beside[name], size)
            for name, text in texts.items():
                _parent(root / beside[name]).write_text(text)
            if not held:  # what is there now is a storage no more
                self._remove([DESCRIPTION, PRIORITIES, SUMS, *(set(listed) - beside.keys())])
            for name in sizes:
                os.replace(root / beside[name], root / name)  # a process that has the old file open keeps it
                placed.append(name)
            if fill is not None:
                fill()
            for name in texts:
                os.replace(root / beside[name], root / name)
        except BaseException:
            self._remove([*beside.values(), *placed])
            with contextlib.suppress(OSError):
                self._list(listed)
            raise
        kept = {STATE, *beside, *(listed if fill is not None else ())}
        self._remove(set(listed) - kept)
        self._list(kept)
        self._holds_storage = True

    def add(self, name: str, size: int) -> None:
        """Make one more file of zeros, which replaces a file of this name."""
        root, beside, listed = self.path, _beside(name), self.files()
        self._list([*listed, name, beside])
        try:
            zeros(root / beside, size)
            os.replace(root / beside, root / name)
        except BaseException:
            self._remove([beside])
            raise
        self._list([*listed, name])

    def drop(self, name: str) -> None:
        """Remove one file."""
        self._remove([name])
        self._list([each for each in self.files() if each != name])

    def remove(self) -> bool:
        """Remove the files, and the folders that this leaves empty. False where there are none, or for a worker."""
        if not self.is_here or not self._holds_storage:
            return False
        try:
            root = self.path
        except RuntimeError:  # it is another folder by now
            return False
        self._holds_storage = False
        self._remove([DESCRIPTION, *self.files(), SUMS, LOCK])
        if not (root / VALUES).is_symlink():
            remove_folder(root / VALUES)
        self._remove_folders()
        return True

    def end(self, removes: bool = False) -> None:
        """Give up the folder. Files are removed on request, or where nothing was ever stored in them."""
        if self.is_here and not self._holds_storage:  # none was made
            self._remove([LOCK] if self._is_new else [])
            self._remove_folders()
        elif removes or not is_there(self._path):
            self.remove()
        self.close()

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files, and subfolders that become empty. Ignores names that lead out of the folder or through a link."""
        for name in names:
            path, parts = self._path / name, Path(name).parts
            with contextlib.suppress(OSError, ValueError, CheckpointCorrupt):
                if ".." in parts or Path(name).is_absolute():
                    continue
                check_folders(self._path, name)
                path.unlink()
                for folder in path.parents[: len(parts) - 1]:
                    folder.rmdir()

    def _remove_folders(self) -> None:
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (Folder,), (DupFd(self._handle), self.path, self._pid)  # type: ignore[attr-defined]

    def __setstate__(self, state: tuple[Any, Path, int]) -> None:
        duplicate, self._path, self._pid = state
        self._handle, self._holds_storage, self._is_new, self._made = duplicate.detach(), True, False, []
        self.is_here, self.is_open = False, True


def _locked(path: Path) -> int:
    """A descriptor of the lock file, locked. RuntimeError where another storage has locked it."""
    collected = False
    while True:
        if os.path.lexists(path):
            check_file(path)
        with contextlib.ExitStack() as closing:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            closing.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = _listed(handle)[0]
                if pid == os.getpid() and not collected:  # perhaps of a storage that only a cycle of references keeps
                    collected = True
                    gc.collect()
                    continue
                who = "another storage of this process" if pid == os.getpid() else f"the process {pid}"
                raise RuntimeError(
                    f"{path.parent} is in use by {who} (pid {pid}): only one storage, with its workers, writes to it. "
                    "Open it with mode='r' to read, or wait until that one is closed"
                ) from None
            if _is_at(handle, path):  # else its owner has removed it meanwhile
                closing.pop_all()
                return handle


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def _listed(handle: int) -> tuple[Any, list[str]]:
    """The process that wrote the lock file, and the files that it listed; no files where the list is half-written."""
    try:
        found = json.loads(os.pread(handle, LONGEST, 0).partition(b"\n")[0])
        return found["pid"], [name for name in found["files"] if isinstance(name, str)]
    except (ValueError, LookupError, TypeError, RecursionError):
        return "unknown", []


def _beside(name: str) -> str:
    """A temporary name in the same subfolder."""
    path = Path(name)
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp").as_posix()


def _parent(path: Path) -> Path:
    """The path, in a folder that exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# ------------------------------------------------------------------ files


def zeros(path: Path, size: int) -> None:
    """Make a file of zeros that has its space on the disk. OSError where there is no room."""
    with open(_parent(path), "xb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:  # macOS: a file that was only made longer would kill the process once the disk is full
            for start in range(0, size, len(_CHUNK)):
                file.write(_CHUNK[: size - start])


def reserve_again(path: Path, least: int = 0) -> None:
    """Reserve disk space for all of a file: a copy may have none for its zeros. OSError where there is no room."""
    if hasattr(os, "posix_fallocate") and (size := max(os.path.getsize(path), least)):
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.posix_fallocate(handle, 0, size)
        finally:
            os.close(handle)


def refuse_full(folder: Path, sizes: Mapping[str, int]) -> None:
    """NotEnoughDiskError, an OSError, for files that the disk has no room for."""
    shares = [Share("file", name, str(folder), size) for name, size in sizes.items()]
    Plan.of(shares).check()


def refuse_existing(root: Path, name: str, existsok: bool) -> None:
    """RuntimeError for a file that is there and must not be replaced, `CheckpointCorrupt` where a link leads to it."""
    check_folders(root, name)
    path = root / name
    if os.path.lexists(path) and (not existsok or path.is_dir()):
        raise RuntimeError(
            f"{path} already exists: another buffer may use it. Pass another scratch_dir, or existsok=True to "
            "write over it"
        )
