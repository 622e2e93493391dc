"""Files of a folder that somebody else may have written: opened for reading alone, and never outside of the folder."""

import contextlib
import math
import os
import stat
from typing import Any, Self

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from fbuf.checkpoint.arrays import as_bytes, row_bytes
from fbuf.checkpoint.dtypes import BY_NAME
from fbuf.checkpoint.tree import parse_json

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LARGEST_JSON = 1 << 26  # bytes
_LARGEST_BLOB = 1 << 30
_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | frozenset(map(chr, range(32)))
_DTYPES = {
    f"torch.{name}": dtype for name, dtype in BY_NAME.items() if isinstance(getattr(torch, name, None), torch.dtype)
}
_OF_TORCH = frozenset(str(each) for each in vars(torch).values() if isinstance(each, torch.dtype))


class Folder:
    """A folder by its handle: its entries are opened relative to it, links are refused. Used in a `with`.

    Args:
        path: where it is.
        handle: of the open folder; it is closed at the end.
        names: from `top` to here.
        top: what messages and `reopened` begin with.
    """

    def __init__(self, path: str, handle: int | None = None, names: tuple[str, ...] = ()) -> None:
        self.top, self.names = path, names
        # The caller names the top, by a link if he likes.
        self._handle = os.open(path, _FOLDER & ~os.O_NOFOLLOW) if handle is None else handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._handle)

    def where(self, name: str = "") -> str:
        """A path for messages."""
        return os.path.join(self.top, *self.names, name) if name else os.path.join(self.top, *self.names)

    def kind(self, name: str) -> str:
        """What is under a name: "file", "folder", "" for nothing. CheckpointCorrupt for a link or anything else."""
        try:
            mode = os.lstat(self._plain(name), dir_fd=self._handle).st_mode
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise CheckpointCorrupt(f"{self.where(name)}: cannot be looked at ({error.strerror})") from error
        if stat.S_ISREG(mode):
            return "file"
        if stat.S_ISDIR(mode):
            return "folder"
        raise CheckpointCorrupt(f"{self.where(name)}: is neither a plain file nor a folder; links are not followed")

    def folder(self, name: str) -> "Folder":
        """A folder in this one. CheckpointCorrupt where there is none."""
        try:
            handle = os.open(self._plain(name), _FOLDER, dir_fd=self._handle)
        except OSError as error:
            raise CheckpointCorrupt(f"{self.where(name)}: is no folder that can be read ({error.strerror})") from error
        return Folder(self.top, handle, (*self.names, name))

    def entries(self) -> list[str]:
        """The names in it, in order."""
        return sorted(os.listdir(self._handle))

    def json(self, name: str) -> Any:
        """The content of a JSON file. CheckpointCorrupt where it is missing, too large or not JSON."""
        return parse_json(self._content(name, _LARGEST_JSON), self.where(name))

    def blob(self, name: str) -> bytes:
        """The bytes of a file."""
        return self._content(name, _LARGEST_BLOB)

    def size(self, name: str) -> int:
        """The bytes of a file. CheckpointCorrupt where it is missing."""
        handle = self._open(name)
        try:
            return os.fstat(handle).st_size
        finally:
            os.close(handle)

    def _content(self, name: str, most: int) -> bytes:
        handle = self._open(name)
        try:
            size = os.fstat(handle).st_size
            if size > most:
                raise CheckpointCorrupt(f"{self.where(name)}: has {size} bytes, {most} at most are read")
            content = np.empty(size, np.uint8)
            _fill(handle, content, self.where(name))
        finally:
            os.close(handle)
        return content.tobytes()

    def tensor(self, name: str, dtype: Any, shape: Any) -> "Tensor":
        """A file that is nothing but the values of a tensor; its size is looked at, its values are not yet read.

        Args:
            name: of the file.
            dtype: as it is described, such as "torch.float32".
            shape: as it is described.
        """
        kind, sizes = dtype_of(dtype, self.where(name)), shape_of(shape, self.where(name))
        wanted = row_bytes(kind, sizes)
        if wanted or self.kind(name):  # tensors without values have no file
            found = self.size(name)
            if found != wanted:
                raise CheckpointCorrupt(
                    f"{self.where(name)}: has {found} bytes, a tensor of {dtype} {list(sizes)} has {wanted}"
                )
        return Tensor(self, name, kind, sizes)

    def _open(self, name: str) -> int:
        """A plain file, open for reading."""
        try:
            handle = os.open(self._plain(name), _FILE, dir_fd=self._handle)
        except OSError as error:
            raise CheckpointCorrupt(f"{self.where(name)}: cannot be opened ({error.strerror})") from error
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
        raise CheckpointCorrupt(f"{self.where(name)}: is no plain file")

    def _plain(self, name: str) -> str:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name or not _encodes(name):
            raise CheckpointCorrupt(f"{self.where()}: {str(name)[:60]!r} is no name of a file in it")
        return name


class Tensor:
    """A tensor in a file: `dtype` and `shape` are NumPy's. The file is opened again, as carefully, when it is read."""

    def __init__(self, folder: Folder, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        self._top, self._names, self._name = folder.top, folder.names, name
        self.dtype, self.shape = dtype, shape

    @property
    def where(self) -> str:
        """Its path, for messages."""
        return os.path.join(self._top, *self._names, self._name)

    def read(self) -> np.ndarray:
        """The values, in memory of their own."""
        values = np.empty(self.shape, self.dtype)
        self.read_into(values)
        return values

    def read_into(self, values: np.ndarray) -> None:
        """Fill an array in one piece with the first values, which are as many."""
        if not values.size:
            return
        with contextlib.ExitStack() as opened:
            folder = opened.enter_context(Folder(self._top))
            for each in self._names:
                folder = opened.enter_context(folder.folder(each))
            handle = folder._open(self._name)
            opened.callback(os.close, handle)
            if os.fstat(handle).st_size != row_bytes(self.dtype, self.shape):
                raise CheckpointCorrupt(f"{self.where}: changes while it is read")
            _fill(handle, as_bytes(values), self.where)
        if self.dtype == np.bool_ and values.view(np.uint8).max() > 1:
            raise CheckpointCorrupt(f"{self.where}: damaged, it holds bytes that are neither True nor False")


def _fill(handle: int, memory: np.ndarray, where: str) -> None:
    """Fill memory, [bytes] uint8, with the beginning of a file."""
    view = memory.data
    while view:
        try:
            count = os.readv(handle, [view[: 1 << 30]])
        except OSError as error:
            raise CheckpointCorrupt(f"{where}: cannot be read ({error.strerror})") from error
        if not count:
            raise CheckpointCorrupt(f"{where}: ends too soon")
        view = view[count:]


def encoded(key: str) -> str:
    """The name of the file of an entry, without its ending."""
    if not key:
        return "%"
    if key in (".", ".."):
        return "%2E" * len(key)
    return "".join(f"%{ord(each):02X}" if each in _UNSAFE else each for each in key)


def dtype_of(name: Any, where: str) -> np.dtype:
    """NumPy's dtype of the name of torch's, looked up in a table."""
    if isinstance(name, str):
        if name in _DTYPES:
            return _DTYPES[name]
        if name in _OF_TORCH:
            raise CheckpointMismatch(f"{where}: values of {name} are not known here")
    raise CheckpointCorrupt(f"{where}: {str(name)[:60]!r} is no dtype")


def shape_of(shape: Any, where: str) -> tuple[int, ...]:
    """A shape that was read. CheckpointCorrupt for one that no tensor can have."""
    fits = isinstance(shape, list) and len(shape) <= 64 and all(type(each) is int and each >= 0 for each in shape)
    if not fits or math.prod(max(each, 1) for each in shape) >= 2**48:
        raise CheckpointCorrupt(f"{where}: {str(shape)[:60]} is no shape")
    return tuple(shape)


def _encodes(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
