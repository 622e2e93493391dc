"""Reading a checkpoint: every byte is checked before it is used, and nothing in the folder is changed."""

import contextlib
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np

from fbuf.checkpoint import files, manifest
from fbuf.checkpoint.arrays import BY_NAME, as_bytes, row_bytes
from fbuf.checkpoint.fields import CheckpointCorrupt
from fbuf.checkpoint.manifest import FileEntry, Manifest
from fbuf.keywords import checked

Verify = Literal["full", "size"]
_Result = TypeVar("_Result")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@checked
def load(path: str | os.PathLike[str], use: Callable[["Reading"], _Result], verify: Verify = "full") -> _Result:
    """The result of `use` on the checkpoint in a folder; repeated if the checkpoint is replaced meanwhile.

    Args:
        path: the folder.
        use: takes the `Reading`. It must not change anything: its result counts only after all files are checked. If
            that fails, `abandon()` of the result is called, if it has one.
        verify: "full" compares the checksum of every byte, "size" that of the manifest and the sizes of files.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointCorrupt: it is damaged; the message names the file.
        CheckpointMismatch: its format is of a newer version.
    """
    if verify not in ("full", "size"):
        raise ValueError(f"verify must be 'full' or 'size', got {verify!r}")
    while True:
        source = Reading(path, verify)
        try:
            with source:
                result = use(source)
                try:
                    source.check_rest()
                except BaseException:
                    if hasattr(result, "abandon"):
                        result.abandon()
                    raise
                return result
        except (CheckpointCorrupt, FileNotFoundError):
            if not source.superseded():
                raise


@checked
class Reading:
    """A checkpoint that is being read. `tree` is the saved tree, with `StoredColumns` and arrays that are read when used."""

    tree: Any

    def __init__(self, path: str | os.PathLike[str], verify: Verify = "full") -> None:
        self.path = Path(os.fspath(path)).absolute()
        self._full, self._name = verify == "full", ""

    def __enter__(self) -> Self:
        found = Manifest.read(self.path)
        self._name, self.versions, self._files = found.folder, found.versions, found.files
        self._unread = {each.name: each for each in found.files}
        self._small: np.ndarray | None = None
        self._taken, self._first = 0, 1  # bytes of the small file, and files, that the tree has described so far
        try:
            self._folder = os.open(self.path / found.folder, _DIRECTORY)
        except OSError as error:
            raise manifest.unreadable(str(self.path / found.folder), error) from error
        try:
            for each in found.files:
                with self._opened(each):
                    pass
            self.tree = manifest.lift(found.tree, self._found)
        except BaseException:
            os.close(self._folder)
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._folder)

    def superseded(self) -> bool:
        """Whether another checkpoint has replaced this one."""
        with contextlib.suppress(Exception):
            return Manifest.read(self.path).folder != self._name
        return False

    def file(self, name: str) -> Path:
        """The path of a file that the caller wrote, after a check of its bytes. Open it for reading only."""
        entries = [each for each in self._files if each.name == name]
        if not entries:
            raise CheckpointCorrupt(f"{self._at(manifest.NAME)}: names no file {name!r}")
        self.check_file(*entries)
        return self.path / self._name / name

    def folder(self, name: str) -> Path:
        """The path of a folder of such files, after a check of their bytes."""
        manifest.plain(name, self._at(manifest.NAME))
        for each in self._files:
            if each.name.startswith(f"{name}/"):
                self.check_file(each)
        return self.path / self._name / name

    def check_rest(self) -> None:
        """Check the files that were not read."""
        if self._full:
            files.at_once([partial(self.check_file, each) for each in list(self._unread.values())])

    def check_file(self, entry: FileEntry) -> None:
        """Check a file without keeping its content."""
        if self._full and entry.name in self._unread:
            self.read_file(entry, files.chunks(entry.size))

    def read_file(self, entry: FileEntry, pieces: Iterable[np.ndarray]) -> None:
        """Fill pieces of memory, [bytes] uint8 each, that are together as large as the file, and check them."""
        checksum = 0
        with self._opened(entry) as handle:
            for piece in pieces:
                try:
                    files.read_into(handle, piece)
                except EOFError as error:
                    raise CheckpointCorrupt(f"{self._at(entry.name)}: ends too soon") from error
                if self._full:
                    checksum = zlib.crc32(piece.data, checksum)
        if self._full and checksum != entry.checksum:
            raise CheckpointCorrupt(f"{self._at(entry.name)}: damaged, its checksum is another")
        self._unread.pop(entry.name, None)

    def map_columns(
        self, entry: FileEntry, rows: int, dtypes: Sequence[np.dtype], shapes: Sequence[tuple[int, ...]]
    ) -> list[np.ndarray]:
        """Columns that lie one behind the other in a file, as read-only memory maps."""
        if not entry.size:
            return [np.empty((rows, *shape), dtype) for dtype, shape in zip(dtypes, shapes, strict=True)]
        with self._opened(entry) as handle:
            memory = mmap.mmap(handle, entry.size, prot=mmap.PROT_READ)
        found, at = [], 0
        for dtype, shape in zip(dtypes, shapes, strict=True):
            found.append(np.ndarray((rows, *shape), dtype, memory, at))
            at += rows * row_bytes(dtype, shape)
        return found

    @contextlib.contextmanager
    def _opened(self, entry: FileEntry) -> Iterator[int]:
        """A file of the right kind and size, open for reading. It is reached through folders that are no links."""
        *folders, last = entry.name.split("/")
        try:
            with contextlib.ExitStack() as stack:
                above = self._folder
                for folder in folders:
                    above = os.open(folder, _DIRECTORY, dir_fd=above)
                    stack.callback(os.close, above)
                handle, size = stack.enter_context(files.opened(last, above))
                if size != entry.size:
                    raise CheckpointCorrupt(
                        f"{self._at(entry.name)}: has {size} bytes of {entry.size}, or is no plain file"
                    )
                yield handle
        except OSError as error:
            raise manifest.unreadable(self._at(entry.name), error) from error

    def _at(self, name: str) -> str:
        return str(self.path / self._name / name)

    def _found(self, mark: str, described: Any) -> Any:
        """The array or columns of a description in the tree."""
        where = self.path / manifest.NAME
        try:
            if mark == "$array":
                name, shape, offset = described
                return self._small_array(BY_NAME[name], _shape(shape), _whole(offset))
            if mark in ("$columns", "$column"):
                rows, rows_a_file, first, kinds = described
                dtypes, shapes = [BY_NAME[name] for name, _ in kinds], [_shape(shape) for _, shape in kinds]
                if first != self._first:
                    raise ValueError("files are described in their order")
                self._first += -(-_whole(rows) // _whole(rows_a_file, 1))
                columns = StoredColumns(self, rows, rows_a_file, self._files[first : self._first], dtypes, shapes)
                if mark == "$columns" or len(kinds) == 1:
                    return columns if mark == "$columns" else StoredArray(columns)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise CheckpointCorrupt(f"{where}: an array is not described as it should be ({error})") from error
        raise CheckpointCorrupt(f"{where}: the entry {mark[:40]!r} is not known")

    def _small_array(self, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
        """An array of the file of small arrays, which is the first one."""
        if self._small is None:
            entry = self._files[0] if self._files else FileEntry("", 0, 0)
            if entry.name != "small" or entry.size > manifest.LARGEST * 2:
                raise ValueError("the file of small arrays is not the first one")
            self._small = np.empty(entry.size, np.uint8)
            self.read_file(entry, [self._small])
        end = offset + row_bytes(dtype, shape)
        if offset != self._taken or end > self._small.size:
            raise ValueError("arrays are described in their order")
        self._taken = end
        return self._small[offset:end].copy().view(dtype).reshape(shape)


@checked
class StoredColumns:
    """Columns in files. See `Columns`."""

    def __init__(
        self,
        source: Reading,
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
        width = sum(map(row_bytes, dtypes, shapes))
        sizes, count = [each.size for each in entries], -(-rows // rows_a_file)
        if len(sizes) != count or any(size != width * rows_a_file for size in sizes[:-1]) or sum(sizes) != width * rows:
            raise ValueError("the files do not have the size of the rows")

    def read(self) -> list[np.ndarray]:
        """All columns, in new memory."""
        found = [np.empty((self.rows, *shape), dtype) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        self.read_into(found)
        return found

    def check(self) -> None:
        """Compare the checksums of the files, without keeping their content."""
        for entry in self._entries:
            self._source.check_file(entry)

    def maps(self) -> list[list[np.ndarray]]:
        """The columns of each file as memory maps, [rows of the file, ...]. Nothing is read, no checksum is compared.

        They are read-only, perhaps not aligned, and stay when another checkpoint replaces this one.
        """
        found, starts = [], range(0, self.rows, self._step)
        for entry, start in zip(self._entries, starts, strict=True):
            count = min(self._step, self.rows - start)
            found.append(self._source.map_columns(entry, count, self.dtypes, self.shapes))
        return found

    def read_into(self, arrays: Sequence[np.ndarray | None]) -> None:
        """Fill arrays of [rows, ...], in one piece each; None for a column that is not wanted."""
        for array, dtype, shape in zip(arrays, self.dtypes, self.shapes, strict=True):
            if array is None:
                continue
            if array.shape != (self.rows, *shape) or array.dtype != dtype or not array.flags.c_contiguous:
                raise ValueError(f"columns of {dtype} {(self.rows, *shape)} need such memory, in one piece")

        def fill(entry: FileEntry, start: int) -> None:
            stop = min(start + self._step, self.rows)
            pieces = [
                np.empty((stop - start) * row_bytes(dtype, shape), np.uint8)
                if array is None
                else as_bytes(array[start:stop])
                for array, dtype, shape in zip(arrays, self.dtypes, self.shapes, strict=True)
            ]
            self._source.read_file(entry, pieces)

        starts = range(0, self.rows, self._step)
        files.at_once([partial(fill, *each) for each in zip(self._entries, starts, strict=True)])


@checked
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

    def maps(self) -> list[np.ndarray]:
        """The parts of the array in the files, as `StoredColumns.maps`; all have equal lengths but for the last."""
        return [part for [part] in self._columns.maps()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        (array,) = self._columns.read()
        return array if dtype is None else array.astype(dtype)


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > 64 or math.prod(map(_whole, shape)) >= 2**62:
        raise ValueError("no shape")
    return tuple(shape)


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**62:
        raise ValueError("no size")
    return value
