"""Reading a checkpoint: every byte is checked before it is used, and nothing in the folder is changed."""

import contextlib
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np

from fbuf.checkpoint import direct, manifest
from fbuf.checkpoint.arrays import as_bytes, row_bytes
from fbuf.checkpoint.dtypes import BY_NAME
from fbuf.checkpoint.errors import CheckpointCorrupt
from fbuf.checkpoint.manifest import FileEntry, Manifest
from fbuf.checkpoint.threads import at_once
from fbuf.checkpoint.tree import lift

_NOTHING = np.zeros(0, np.uint8)
Verify = Literal["full", "size"]
_Result = TypeVar("_Result")


def load(path: str | os.PathLike[str], use: Callable[["Source"], _Result], verify: Verify = "full") -> _Result:
    """The result of `use` on the checkpoint in a folder; repeated if the checkpoint was replaced meanwhile.

    Args:
        path: the folder.
        use: is given the `Source`. What it returns counts only when all was checked: it should change nothing itself, and
            what it has taken is given back by `abandon()` of the result, if that has one.
        verify: "full" to compare the checksum of every byte, "size" for that of the manifest and the sizes of files.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointCorrupt: it is damaged; the message names the file.
        CheckpointMismatch: its format is of a newer version.
    """
    if verify not in ("full", "size"):
        raise ValueError(f"verify must be 'full' or 'size', got {verify!r}")
    while True:
        with Source(path, verify) as source:
            try:
                result = use(source)
                try:
                    source.check_rest()
                except BaseException:
                    getattr(result, "abandon", _nothing)()
                    raise
                return result
            except (CheckpointCorrupt, FileNotFoundError):
                if not source.superseded():
                    raise


def _nothing() -> None:
    pass


class Source:
    """A checkpoint that is being read. `tree` is what was saved, with `StoredColumns` and arrays that are read when used."""

    def __init__(self, path: str | os.PathLike[str], verify: Verify = "full") -> None:
        self.path = Path(os.fspath(path)).absolute()
        self._full = verify == "full"

    def __enter__(self) -> Self:
        self._manifest = Manifest.read(self.path)
        self.versions = self._manifest.versions
        self._folder = self._manifest.folder
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._handle = os.open(self.path / self._folder, flags)
        except OSError as error:
            if self.superseded():
                return self.__enter__()
            raise manifest.unreadable(str(self.path / self._folder), error) from error
        self._unread = {each.name: each for each in self._manifest.files}
        self._by_name = dict(self._unread)
        try:
            for each in self._manifest.files:
                os.close(self._open(each))
            self._small: Any = None
            self._taken, self._first = 0, 1  # bytes of the small file, and files, that were described: each is once
            self.tree = lift(self._manifest.tree, self._found)
        except CheckpointCorrupt:
            os.close(self._handle)
            if self.superseded():
                return self.__enter__()
            raise
        except BaseException:
            os.close(self._handle)
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._handle)

    def superseded(self) -> bool:
        """Whether this checkpoint was replaced by another."""
        with contextlib.suppress(Exception):
            return Manifest.read(self.path).folder != self._folder
        return False

    def file(self, name: str) -> Path:
        """The path of a file that was written by itself; its bytes are checked. Open it for reading only."""
        if name not in self._by_name:
            raise CheckpointCorrupt(f"{self._at(manifest.NAME)}: names no file {name!r}")
        self.check_file(self._by_name[name])
        return self.path / self._folder / name

    def folder(self, name: str) -> Path:
        """The path of a folder of such files; their bytes are checked."""
        manifest.plain(name, self._at(manifest.NAME))
        inside = [each for each in self._manifest.files if each.name.startswith(f"{name}/")]
        for each in inside:
            self.check_file(each)
        return self.path / self._folder / name

    def check_rest(self) -> None:
        """Check the files that were not read."""
        if self._full:
            at_once([partial(self.check_file, each) for each in self._unread.values()])

    # ------------------------------------------------------------------ files

    def _at(self, name: str) -> str:
        return str(self.path / self._folder / name)

    def _open(self, entry: FileEntry) -> int:
        """A file of the right kind and size, open for reading."""
        try:  # without waiting for the other end of a pipe
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = self._reached(entry.name, flags)
        except OSError as error:
            raise manifest.unreadable(self._at(entry.name), error) from error
        found = os.fstat(handle)
        if stat.S_ISREG(found.st_mode) and found.st_size == entry.size:
            return handle
        os.close(handle)
        raise CheckpointCorrupt(
            f"{self._at(entry.name)}: has {found.st_size} bytes of {entry.size}, or is no plain file"
        )

    def _reached(self, name: str, flags: int) -> int:
        """A file below the data folder, through folders that are no links."""
        *folders, last = name.split("/")
        above = os.dup(self._handle)
        try:
            for folder in folders:
                inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
                os.close(above)
                above = inner
            return os.open(last, flags, dir_fd=above)
        finally:
            os.close(above)

    def _content(self, entry: FileEntry) -> Iterator[np.ndarray]:
        """A file in pieces, [bytes] uint8, good until the next one. CheckpointCorrupt at its end where they are others."""
        handle, checksum = self._open(entry), 0
        try:
            for piece in direct.read(handle, entry.size):
                if self._full:
                    checksum = zlib.crc32(piece.data, checksum)
                yield piece
        except OSError as error:
            raise manifest.unreadable(self._at(entry.name), error) from error
        finally:
            os.close(handle)
        if self._full and checksum != entry.checksum:
            raise CheckpointCorrupt(f"{self._at(entry.name)}: damaged, its checksum is another")
        self._unread.pop(entry.name, None)

    def read_file(self, entry: FileEntry, pieces: Sequence[np.ndarray]) -> None:
        """Fill pieces of memory, [bytes] uint8 each, with a file."""
        wanted = iter(pieces)
        rest: np.ndarray | None = next(wanted, _NOTHING)
        for piece in self._content(entry):
            while piece.size:
                while rest is not None and not rest.size:
                    rest = next(wanted, None)
                if rest is None:
                    raise CheckpointCorrupt(f"{self._at(entry.name)}: is longer than it was")
                count = min(rest.size, piece.size)
                rest[:count], rest, piece = piece[:count], rest[count:], piece[count:]
        if (rest is not None and rest.size) or any(each.size for each in wanted):
            raise CheckpointCorrupt(f"{self._at(entry.name)}: ends too soon")

    def check_file(self, entry: FileEntry) -> None:
        """Check a file without keeping its content."""
        if self._full and entry.name in self._unread:
            for _ in self._content(entry):
                pass

    # ------------------------------------------------------------------ arrays

    def _found(self, mark: str, described: Any) -> Any:
        """The array that a description in the tree stands for."""
        try:
            if mark == "$array":
                name, shape, offset = described
                return self._small_array(_dtype(name), _shape(shape), _whole(offset))
            if mark in ("$columns", "$column"):
                rows, rows_a_file, first, kinds = described
                dtypes = [_dtype(name) for name, _ in kinds]
                shapes = [_shape(shape) for _, shape in kinds]
                if first != self._first:
                    raise ValueError("files are described in their order")
                stop = first + -(-_whole(rows) // _whole(rows_a_file, 1))
                columns = StoredColumns(self, rows, rows_a_file, self._manifest.files[first:stop], dtypes, shapes)
                self._first = stop
                if mark == "$columns":
                    return columns
                if len(kinds) == 1:
                    return StoredArray(columns)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            where = self.path / manifest.NAME
            raise CheckpointCorrupt(f"{where}: an array is not described as it should be ({error})") from error
        raise CheckpointCorrupt(f"{self.path / manifest.NAME}: the entry {mark[:40]!r} is not known")

    def _small_array(self, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
        if self._small is None:
            entry = self._manifest.files[0] if self._manifest.files else FileEntry("small", 0, 0)
            if entry.name != "small" or entry.size > manifest.LARGEST * 2:
                raise CheckpointCorrupt(
                    f"{self.path / manifest.NAME}: the file of small arrays is not where it should be"
                )
            self._small = np.empty(entry.size, np.uint8)
            self.read_file(entry, [self._small])
        size = row_bytes(dtype, shape)
        if offset != self._taken or offset + size > self._small.size:
            raise ValueError("arrays are described in their order")
        self._taken += size
        return self._small[offset : offset + size].copy().view(dtype).reshape(shape)


class StoredColumns:
    """Arrays with the same first dim, in files. See `Columns`."""

    def __init__(
        self,
        source: Source,
        rows: int,
        rows_a_file: int,
        entries: Sequence[FileEntry],
        dtypes: list[np.dtype],
        shapes: list[tuple[int, ...]],
    ) -> None:
        self.rows, self.dtypes, self.shapes = rows, dtypes, shapes
        self._source, self._step, self._entries = source, rows_a_file, entries
        for dtype, shape in zip(dtypes, shapes, strict=True):
            np.broadcast_to(np.empty((), dtype), (rows, *shape))  # ValueError where NumPy has no such shape
        width = sum(row_bytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True))
        count = -(-rows // rows_a_file)
        sizes = [each.size for each in self._entries]
        if len(sizes) != count or any(size != width * rows_a_file for size in sizes[:-1]):
            raise ValueError("the files do not have the size of the rows")
        if sizes and sizes[-1] != width * (rows - rows_a_file * (count - 1)):
            raise ValueError("the last file does not have the size of its rows")

    def read(self) -> list[np.ndarray]:
        """All of it, in memory of its own."""
        found = [np.empty((self.rows, *shape), dtype) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        self.read_into(found)
        return found

    def check(self) -> None:
        """Compare the checksums of the files; nothing is kept."""
        for entry in self._entries:
            self._source.check_file(entry)

    def read_into(self, arrays: Sequence[np.ndarray | None]) -> None:
        """Fill arrays of [rows, ...], in one piece each; None for a column that is not wanted."""
        wanted = list(zip(arrays, self.dtypes, self.shapes, strict=True))
        for array, dtype, shape in wanted:
            fits = array is None or (
                array.shape == (self.rows, *shape) and array.dtype == dtype and array.flags.c_contiguous
            )
            if not fits:
                raise ValueError(f"columns of {dtype} {(self.rows, *shape)} need such memory, in one piece")

        def fill(place: int) -> None:
            start = place * self._step
            stop = min(start + self._step, self.rows)
            pieces = [
                np.empty((stop - start) * row_bytes(dtype, shape), np.uint8)
                if array is None
                else as_bytes(array[start:stop])
                for array, dtype, shape in wanted
            ]
            self._source.read_file(self._entries[place], pieces)

        at_once([partial(fill, place) for place in range(len(self._entries))])


class StoredArray:
    """One array in files: `np.asarray` reads it."""

    def __init__(self, columns: StoredColumns) -> None:
        self._columns = columns
        self.dtype = columns.dtypes[0]
        self.shape = (columns.rows, *columns.shapes[0])
        self.ndim = len(self.shape)
        self.size = math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        (array,) = self._columns.read()
        return array if dtype is None else array.astype(dtype)


def _dtype(name: Any) -> np.dtype:
    return BY_NAME[name]


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > 64 or math.prod(map(_whole, shape)) >= 2**62:
        raise ValueError("no shape")
    return tuple(shape)


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**62:
        raise ValueError("no size")
    return value
