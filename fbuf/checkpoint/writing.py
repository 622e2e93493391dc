"""Writing a checkpoint: beside the previous one, flushed, and then committed by one rename.

A checkpoint is a folder with a manifest and a data folder, whose name is in the manifest. A save makes a new data folder
and renames its manifest over the old one: the commit. Before it the old checkpoint is complete, after it the new one.
Files whose bytes are in the old checkpoint are linked, not written again.
"""

import contextlib
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from fbuf._version import __version__
from fbuf.checkpoint import files, manifest
from fbuf.checkpoint.arrays import Columns, as_bytes, as_native, name_of
from fbuf.checkpoint.fields import CheckpointError
from fbuf.checkpoint.files import FolderLock
from fbuf.checkpoint.manifest import FileEntry, Manifest
from fbuf.keywords import checked

_OURS = re.compile(rf"{manifest.FOLDER}[0-9a-f]{{16}}|\.{re.escape(manifest.NAME)}\.[0-9a-f]{{16}}\.tmp")
_SMALL = 1 << 18  # bytes up to which arrays share a file


@checked
class Writing:
    """A checkpoint that is being written. Leaving the context without an error commits it.

        with Writing(path) as out:
            with lock:  # only for this call: the flushes that follow take long
                out.write(tree)

    After an error nothing of it is left, and the previous checkpoint is unchanged. Other writers to the path wait.

    Args:
        path: a folder; made if it is missing, below one that exists. Other files in it stay. Symbolic links in the path
            are resolved now; later changes of them have no effect.
        previous: folders of other checkpoints; files with the same bytes are links to theirs.

    Raises:
        FileNotFoundError: the folder above is missing.
        NotADirectoryError: a file is in the way.
        OSError: the disk is full, or fails.
    """

    def __init__(self, path: str | os.PathLike[str], previous: Iterable[str | os.PathLike[str]] = ()) -> None:
        if not (path := os.fspath(path)):
            raise FileNotFoundError("a checkpoint needs a folder, the path is empty")
        self.path = Path(os.path.realpath(path, strict=os.path.lexists(path)))  # a link that leads nowhere is an error
        self._candidates = [self.path, *(Path(os.fspath(each)).absolute() for each in previous)]
        self._files: list[FileEntry] = []
        self.files: list[str] = []  # files that the caller writes
        self.folders: list[str] = []  # and folders of them
        self._tree: Any = None
        self._folder = self.path / (manifest.FOLDER + secrets.token_hex(8))  # the data folder
        self._made = False  # whether there was no folder at the path
        self._lock: FolderLock | None = None
        self._placing = False  # whether the rename was begun, after which it may count

    def __enter__(self) -> Self:
        try:
            self._handle = self._open()
            current = self._current()
            self._is_first = not current
            self._sweep(keep=current)
            self._known = _known(self._candidates)
            os.mkdir(self._folder)
        except BaseException:
            self._close(failed=True)
            raise
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        failed = True
        try:
            if kind is None:
                self._commit()
                failed = False
        finally:
            self._close(failed)

    def write(self, tree: Any) -> None:
        """Write a tree, up to the page cache: its arrays may change afterwards. TypeError or ValueError, see `lower`."""
        if self._files:
            raise CheckpointError("a checkpoint is written once")
        small: list[np.ndarray] = []
        jobs: list[Callable[[], FileEntry]] = []
        taken = 0

        def place(value: Any) -> dict[str, Any]:
            nonlocal taken
            if isinstance(value, Columns):
                return {"$columns": self._columns(value, jobs)}
            array = as_native(np.asarray(value))
            if array.ndim and (array.nbytes > _SMALL or taken + array.nbytes > manifest.LARGEST):
                return {"$column": self._columns(Columns([array]), jobs)}
            described = [name_of(array.dtype), list(array.shape), taken]
            small.append(as_bytes(array))
            taken += array.nbytes
            return {"$array": described}

        jobs.append(lambda: self._put("small", small))
        self._tree = manifest.lower(tree, place)
        self._files = files.at_once(jobs)

    def file(self, name: str) -> Path:
        """The path for a file that the caller writes before the context ends. It becomes part of the checkpoint."""
        self.files.append(manifest.plain(name, "a file of a checkpoint"))
        return self._folder / name

    def folder(self, name: str) -> Path:
        """The path for a folder of such files, of any names. The caller makes the folder."""
        self.folders.append(manifest.plain(name, "a folder of a checkpoint"))
        return self._folder / name

    # ------------------------------------------------------------------ files

    def _columns(self, columns: Columns, jobs: list[Callable[[], FileEntry]]) -> list[Any]:
        """Add the jobs that write columns; returns their description."""
        first = len(jobs)
        for place, pieces in enumerate(columns.parts(), first):
            jobs.append(lambda place=place, pieces=pieces: self._put(f"{place:06d}", pieces))  # type: ignore[misc]
        kinds = [[name_of(dtype), list(shape)] for dtype, shape in zip(columns.dtypes, columns.shapes, strict=True)]
        return [columns.rows, columns.rows_a_file, first, kinds]

    def _put(self, name: str, pieces: Sequence[np.ndarray]) -> FileEntry:
        """Make a file of these bytes, or a link to one that has them."""
        content = files.joined(pieces)  # a copy: checksum and file agree even if the arrays change meanwhile
        entry = FileEntry(name, content.size, zlib.crc32(content.data))
        path = self._folder / name
        for known in self._known.get((entry.size, entry.checksum), ()):
            if entry.size and _holds(known, content):
                try:
                    os.link(known, path, follow_symlinks=False)
                    return entry
                except OSError:  # on another disk, or linked too often
                    break
        files.write_new(path, content)
        return entry

    def _commit(self) -> None:
        if not self._files:  # there is one in each
            raise CheckpointError("nothing was written to the checkpoint")
        import jax  # here: a reader needs none

        inside, given = self._inside()
        entries = [*self._files, *(_entry(self._folder, name) for name in given)]
        versions = {"fbuf": __version__, "jax": jax.__version__, "numpy": np.__version__}
        content = Manifest(self._folder.name, self._tree, entries, versions).encoded()
        files.at_once([partial(flush, self._folder / each.name) for each in entries])
        for folder in [*inside, self._folder]:
            flush(folder)
        beside = self.path / f".{manifest.NAME}.{secrets.token_hex(8)}.tmp"
        try:
            files.write_new(beside, np.frombuffer(content, np.uint8), flushed=True)
            os.fsync(self._handle)
            if self._is_first:  # flush the name of this folder, too: a process that was killed may have made it
                try:
                    flush(self.path.parent)
                except PermissionError:
                    if self._made:
                        raise
            self._placing = True
            os.rename(beside, self.path / manifest.NAME)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        os.fsync(self._handle)
        with contextlib.suppress(OSError):  # the next save removes the rest
            self._sweep(keep=self._folder.name)

    def _inside(self) -> tuple[list[Path], list[str]]:
        """Folders that the caller made, the deepest first, and the names of all their files."""
        folders, names = [], list(self.files)
        for above in self.folders:
            for found, _, inside in os.walk(self._folder / above, topdown=False, onerror=_raised):
                folders.append(Path(found))
                names += [str(Path(found, name).relative_to(self._folder)) for name in inside]
        return folders, names

    # ------------------------------------------------------------------ the folder

    def _open(self) -> int:
        """Make the folder if it is missing, wait for its lock, and return the open folder."""
        _make(self.path.parent)
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path)
                self._made = True
            try:
                self._lock = FolderLock(self.path)
                if os.path.samestat(os.fstat(self._lock.handle), os.stat(self.path)):
                    return self._lock.handle
                self._lock.release()
                self._lock = None
            except FileNotFoundError:
                if os.path.lexists(self.path):  # a link that leads nowhere
                    raise
            self._made = False  # another writer that failed has removed it meanwhile

    def _current(self) -> str | None:
        """The name of the current data folder; "" if there is none, None if the manifest cannot be read."""
        try:
            return Manifest.read(self.path).folder
        except FileNotFoundError:
            return ""
        except (CheckpointError, OSError):
            return None

    def _sweep(self, keep: str | None) -> None:
        """Remove files of killed writers and data folders of older checkpoints."""
        left = [name for name in os.listdir(self._handle) if _OURS.fullmatch(name) and name != keep]
        if keep is None or not left:
            return
        os.fsync(self._handle)  # a writer that was killed may not have flushed the current manifest
        for name in left:
            if name.startswith("."):
                with contextlib.suppress(OSError):
                    os.unlink(self.path / name)
            else:
                files.remove_folder(self.path / name)

    def _close(self, failed: bool) -> None:
        try:
            # An error or a signal may come after the rename: a committed checkpoint stays.
            if failed and not (self._placing and self._current() in (self._folder.name, None)):
                files.remove_folder(self._folder)
            if failed and self._made:
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(self.path)
        finally:
            if self._lock is not None:
                self._lock.release()


def _known(folders: Sequence[Path]) -> dict[tuple[int, int], list[Path]]:
    """The files of checkpoints by size and checksum."""
    known: dict[tuple[int, int], list[Path]] = {}
    for folder in dict.fromkeys(folders):
        try:
            found = Manifest.read(folder)
        except (CheckpointError, OSError):
            continue
        for each in found.files:
            known.setdefault((each.size, each.checksum), []).append(folder / found.folder / each.name)
    return known


def _raised(error: OSError) -> None:
    raise error


def _holds(path: Path, content: np.ndarray) -> bool:
    """Whether a file has exactly these bytes."""
    try:
        with files.opened(path) as (handle, size):
            at = 0
            for piece in files.chunks(content.size) if size == content.size else ():
                files.read_into(handle, piece)
                if not np.array_equal(piece, content[at : at + piece.size]):
                    return False
                at += piece.size
            return size == content.size
    except (OSError, EOFError):
        return False


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make(folder: Path) -> None:
    """Make a folder and those above it that are missing; each is on the disk before the next."""
    if folder.is_dir():
        return
    _make(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process was faster; a file fails where it is used
        os.mkdir(folder)
    flush(folder.parent)


def _entry(folder: Path, name: str) -> FileEntry:
    """The entry of a file that the caller wrote."""
    path, size, checksum = folder / name, 0, 0
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{path}: a checkpoint consists of plain files")
    with path.open("rb") as handle:
        while piece := handle.read(1 << 20):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    path.chmod(0o444)
    return FileEntry(manifest.plain(name, str(path)), size, checksum)
