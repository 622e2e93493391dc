"""Files that one object makes: all of them or none, in the place of others only when asked, removed by their maker."""

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from fbuf.checkpoint import CheckpointCorrupt

_CHUNK = bytes(1 << 20)


class Files:
    """Files below a folder. They are made under their own names, or beside a file that they replace when all are made."""

    def __init__(self, contents: Path | None = None) -> None:
        self._maker = os.getpid()
        self._beside: dict[Path, Path] = {}  # where a file is until it takes its place
        self.made: dict[Path, tuple[int, int]] = {}  # device and inode: another may have taken the name since
        self.folders: list[Path] = []
        self.contents = contents  # a folder that goes with the files, whatever is in it

    def folder(self, path: Path) -> None:
        """Make a folder, where it is missing."""
        missing = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self.folders.extend(reversed(missing))

    def claim(self, root: Path, name: str, existsok: bool, aside: bool = False) -> None:
        """Make the folder of a file below root. RuntimeError for one that is there, unless that is ok.

        CheckpointCorrupt where a link leads to it. `aside`: make it beside its place even where nothing is there, to
        appear as a whole.
        """
        path = root / name
        if refuse_there(root, name, existsok) or aside:
            self._beside[path] = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        self.folder(path.parent)

    @property
    def names(self) -> list[Path]:
        """Where files that were claimed beside their place are."""
        return list(self._beside.values())

    def adopt(self, paths: Iterable[Path]) -> None:
        """Have files, those that are there, be some of those made here."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self.made[path] = _identity(os.lstat(path))

    def include(self, others: "Files") -> None:
        """Have the files that others have made be some of those made here."""
        self.made |= others.made
        self.folders += others.folders

    def reserve(self, path: Path, size: int) -> None:
        """Make a file of zeros. OSError where the disk has no room."""
        handle = self._open(path)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, size)
            else:  # macOS: a file that was only made longer would kill the process once the disk is full
                for start in range(0, size, len(_CHUNK)):
                    write(handle, _CHUNK[: size - start])
        finally:
            os.close(handle)

    def write(self, path: Path, text: str) -> None:
        """Make a file of text."""
        handle = self._open(path)
        try:
            write(handle, text.encode())
        finally:
            os.close(handle)

    def _open(self, path: Path) -> int:
        now = self._beside.get(path, path)
        handle = os.open(now, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        self.made[now] = _identity(os.fstat(handle))
        return handle

    def put_in_place(self) -> None:
        """Have the files that were made beside others replace them, in order; who has those open keeps them."""
        for path, beside in list(self._beside.items()):
            os.replace(beside, path)
            self.made[path] = self.made.pop(beside)
            del self._beside[path]

    def remove(self) -> bool:
        """Remove the files that are still those made here, and folders that this leaves empty. True if there were any.

        The last one that was made comes first. Nothing in another process than the maker.
        """
        if os.getpid() != self._maker:
            return False
        return self.remove_for_maker()

    def remove_for_maker(self) -> bool:
        """The same for files that another process has made for this one."""
        removed = False
        for path, identity in reversed(self.made.items()):
            try:
                if _identity(os.lstat(path)) == identity:
                    path.unlink()
                    removed = True
            except FileNotFoundError:
                continue
        if removed and self.contents is not None and not self.contents.is_symlink():
            shutil.rmtree(self.contents, ignore_errors=True)
        for folder in reversed(self.folders):
            try:
                folder.rmdir()
            except OSError:  # not empty: others use it
                continue
        self.made, self.folders = {}, []
        return removed


def refuse_there(root: Path, name: str, existsok: bool) -> bool:
    """Whether a file is below root. RuntimeError if so, unless that is ok; CheckpointCorrupt where a link leads there."""
    check_folders(root, name)
    path = root / name
    there = os.path.lexists(path)
    if there and (not existsok or path.is_dir()):
        raise RuntimeError(
            f"{path} already exists: another buffer may use it. Pass another scratch_dir, or existsok=True to "
            "write over it"
        )
    return there


def check_folders(root: Path, name: str) -> None:
    """CheckpointCorrupt where one of the folders between root and a file below it is a link, or no folder.

    Those that are missing are none of these: what is read in them is not found.
    """
    path = root
    for part in Path(name).parts[:-1]:
        path = path / part
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            found = "a symbolic link" if stat.S_ISLNK(mode) else "something else"
            raise CheckpointCorrupt(
                f"{path} should be a folder, found {found}: files of a storage are below its folder"
            )


def write(handle: int, data: bytes) -> None:
    """Write all of the data."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _identity(held: os.stat_result) -> tuple[int, int]:
    return held.st_dev, held.st_ino
