"""Files that another program wrote: opened by name below one folder, for reading only; links are not followed."""

import contextlib
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt
from fbuf.checkpoint.arrays import as_bytes, row_bytes
from fbuf.checkpoint.manifest import parse_json
from interop.checkpoint.layouts import dtype_stored
from interop.data.bridge import DTYPES

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe does not block
_LARGEST_JSON = 1 << 26  # bytes


@dataclass(frozen=True)
class Folder:
    """A folder. CheckpointCorrupt, naming the file, for one that is missing, damaged, a link or no plain file.

    Args:
        top: its path, or that of a folder above it.
        names: the folders from `top` to it.
    """

    top: str
    names: tuple[str, ...] = ()

    def where(self, name: str = "") -> str:
        """A path for messages."""
        return os.path.join(self.top, *self.names, *filter(None, [name]))

    def folder(self, name: str) -> "Folder":
        """A folder in this one, which need not exist."""
        return Folder(self.top, (*self.names, name))

    def kind(self, name: str) -> str:
        """What has this name: "file", "folder", or "" for nothing."""
        with self.opened() as handle:
            try:
                mode = os.lstat(self._plain(name), dir_fd=handle).st_mode
            except FileNotFoundError:
                return ""
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise CheckpointCorrupt(f"{self.where(name)}: is neither a plain file nor a folder; links are not followed")
        return "file" if stat.S_ISREG(mode) else "folder"

    def entries(self) -> list[str]:
        """The names in it, sorted."""
        with self.opened() as handle:
            return sorted(os.listdir(handle))

    def json(self, name: str) -> Any:
        """The content of a JSON file."""
        return parse_json(self.read(name, _LARGEST_JSON), self.where(name))

    def read(self, name: str, most: int) -> bytes:
        """The bytes of a file, which has at most so many."""
        with self.opened(name) as handle:
            size = os.fstat(handle).st_size
            if size > most:
                raise CheckpointCorrupt(f"{self.where(name)}: has {size} bytes, {most} at most are read")
            content = np.empty(size, np.uint8)
            self.fill(handle, content, name)
        return content.tobytes()

    def tensor(self, name: str, dtype: Any, shape: Any) -> "TensorFile":
        """A file of nothing but the values of a tensor. Its size is compared with this dtype and shape, as described."""
        where = self.where(name)
        file = TensorFile(self, name, dtype_stored(str(dtype).removeprefix("torch."), where), _shape(shape, where))
        if file.size or self.kind(name):  # tensors without values have no file
            with self.opened(name) as handle:
                file.check_size(handle)
        return file

    @contextlib.contextmanager
    def opened(self, name: str | None = None) -> Iterator[int]:
        """The handle of a file in it, or of the folder itself."""
        where = self.where(name or "")
        steps = [(each, _FOLDER) for each in self.names] + ([] if name is None else [(name, _FILE)])
        try:
            handle = os.open(self.top, _FOLDER)  # the path of the caller may be a link
            try:
                for step, flags in steps:
                    below = os.open(self._plain(step), flags | os.O_NOFOLLOW, dir_fd=handle)
                    os.close(handle)
                    handle = below
                if name is not None and not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise CheckpointCorrupt(f"{where}: is no plain file")
                yield handle
            finally:
                os.close(handle)
        except OSError as error:
            raise CheckpointCorrupt(f"{where}: cannot be read ({error.strerror})") from error

    def _plain(self, name: str) -> str:
        if name in ("", ".", "..") or "/" in name or "\0" in name or not _encodes(name):
            raise CheckpointCorrupt(f"{self.where()}: {name[:60]!r} is no name of a file in it")
        return name

    def fill(self, handle: int, memory: np.ndarray, name: str) -> None:
        """Fill memory, uint8, with the first bytes of a file."""
        view = memory.data
        while view:
            count = os.readv(handle, [view[: 1 << 30]])
            if not count:
                raise CheckpointCorrupt(f"{self.where(name)}: ends too soon")
            view = view[count:]


@dataclass(frozen=True)
class TensorFile:
    """A tensor in a file, which is opened when the values are read."""

    folder: Folder
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def where(self) -> str:
        """Its path, for messages."""
        return self.folder.where(self.name)

    @property
    def size(self) -> int:
        """Its bytes."""
        return row_bytes(DTYPES[self.dtype], self.shape)

    def check_size(self, handle: int) -> None:
        """CheckpointCorrupt for an open file of another size."""
        found = os.fstat(handle).st_size
        if found != self.size:
            raise CheckpointCorrupt(
                f"{self.where}: has {found} bytes, a tensor of {self.dtype} {list(self.shape)} has {self.size}"
            )

    def read(self) -> np.ndarray:
        """The values, in new memory."""
        values = np.empty(self.shape, DTYPES[self.dtype])
        self.read_into(values)
        return values

    def read_into(self, values: np.ndarray) -> None:
        """Fill a contiguous array with the first values."""
        if not values.size:
            return
        with self.folder.opened(self.name) as handle:
            self.check_size(handle)
            self.folder.fill(handle, as_bytes(values), self.name)
        if self.dtype == torch.bool and values.view(np.uint8).max() > 1:
            raise CheckpointCorrupt(f"{self.where}: damaged, it holds bytes that are neither True nor False")


def _shape(shape: Any, where: str) -> tuple[int, ...]:
    """A described shape. CheckpointCorrupt for one that no tensor can have."""
    fits = isinstance(shape, list) and len(shape) <= 64 and all(type(each) is int and each >= 0 for each in shape)
    if not fits or math.prod(max(each, 1) for each in shape) >= 2**48:
        raise CheckpointCorrupt(f"{where}: {str(shape)[:60]} is no shape")
    return tuple(shape)


def _encodes(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False
