"""H5 files of plain datasets: written so that no failed write passes unseen, and read without following where they lead."""

import contextlib
import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError
from fbuf.checkpoint.writing import flush

_MOST_DEEP = 64
_TIMES_SMALLER = 1 << 17  # a filter makes nothing smaller than that
_FAULTS = (OSError, RuntimeError, KeyError, ValueError, TypeError, IndexError, RecursionError, OverflowError)
_KINDS = "?bhilqBHILQefdFD"  # of plain numbers, by NumPy's letters


def h5py_module() -> Any:
    """h5py. ImportError saying what to install."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise ImportError("H5 files need h5py: install it with `pip install h5py`, or `fbuf[interop]`") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Any]:
    """A new H5 file, open. OSError where the disk is full or fails; the file is then the caller's to remove.

    HDF5 loses errors of writes that it has put off, or ends the process: it is not told of them, the caller is.
    """
    h5py = h5py_module()
    with open(path, "x+b", buffering=0) as raw:
        file = _Watched(raw)
        try:
            with h5py.File(file, "w") as opened:
                yield opened
        except BaseException:
            file.tell_failure()
            raise
        file.tell_failure()


class _Watched:
    """A file whose first failure is kept for later."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._failure: OSError | None = None

    def tell_failure(self) -> None:
        """Raise it."""
        if self._failure is not None:
            raise self._failure

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self._failure is None:
            try:
                rest = memoryview(data).cast("B")
                while rest:
                    rest = rest[self._raw.write(rest) :]
            except OSError as error:
                self._failure = error
        return size

    def read(self, size: int = -1) -> bytes:
        found: bytes = self._raw.read(size)
        return found

    def readinto(self, memory: Any) -> int:
        if self._failure is not None:
            view = memoryview(memory).cast("B")
            view[:] = bytes(len(view))
            return len(view)
        found: int = self._raw.readinto(memory)
        return found

    def truncate(self, size: int | None = None) -> int:
        if self._failure is None:
            try:
                self._raw.truncate(size)
            except OSError as error:
                self._failure = error
        return size or 0

    def seek(self, *where: int) -> int:
        found: int = self._raw.seek(*where)
        return found

    def tell(self) -> int:
        found: int = self._raw.tell()
        return found

    def flush(self) -> None:
        """Nothing is held back."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Any]:
    """An H5 file, open; nothing is written to it. FileNotFoundError; CheckpointCorrupt for one that is damaged."""
    h5py = h5py_module()
    with open(path, "rb"):
        pass
    with faults_of(path):
        opened = h5py.File(path, "r", locking=False)
    with opened:
        yield opened


@contextlib.contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside is a CheckpointCorrupt that names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except _FAULTS as error:
        raise CheckpointCorrupt(f"{path}: cannot be read as an H5 file ({error})") from error


class Stored(NamedTuple):
    """A dataset that can be read."""

    held: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    has_data: bool

    def read(self, memory: np.ndarray | None = None) -> np.ndarray:
        """The values, in memory of this shape and dtype. ValueError where there are none, which reads as zeros."""
        memory = np.empty(self.shape, self.dtype) if memory is None else memory
        if memory.size and not self.has_data:
            raise ValueError(f"{self.held.name} is without data")
        if memory.ndim == 0 or not memory.size:
            memory[...] = self.held[()]
        else:
            self.held.read_direct(memory)
        return memory


def datasets(opened: Any, path: Path) -> dict[tuple[str, ...], Stored]:
    """Every dataset of an open file by its path. CheckpointCorrupt for what is not a dataset of numbers in this file.

    Links of other kinds, virtual datasets and data in other files are not followed; nothing of the data is read.
    """
    h5py = h5py_module()
    found: dict[tuple[str, ...], Stored] = {}
    seen = {_place(opened)}
    rest: list[tuple[tuple[str, ...], Any]] = [((), opened)]
    while rest:
        above, group = rest.pop()
        for name in group:
            here = (*above, name)
            shown = "/".join(here)
            link = group.get(name, getlink=True)
            if type(link) is not h5py.HardLink:
                raise CheckpointCorrupt(f"{path}: {shown!r} leads elsewhere, by a {type(link).__name__}")
            held = group[name]
            place = _place(held)
            if place in seen:
                raise CheckpointCorrupt(f"{path}: {shown!r} is there under another name too")
            if len(here) > _MOST_DEEP:
                raise CheckpointCorrupt(f"{path}: {shown!r} is nested too deeply")
            seen.add(place)
            if isinstance(held, h5py.Group):
                rest.append((here, held))
            elif isinstance(held, h5py.Dataset):
                found[here] = _stored(held, f"{path}: {shown!r}")
            else:
                raise CheckpointCorrupt(f"{path}: {shown!r} is a {type(held).__name__}, no dataset")
    return found


def _place(held: Any) -> int:
    place: int = h5py_module().h5o.get_info(held.id).addr
    return place


def _stored(held: Any, where: str) -> Stored:
    made, dtype, shape = held.id.get_create_plist(), held.dtype, held.shape
    if made.get_layout() == h5py_module().h5d.VIRTUAL or made.get_external_count():
        raise CheckpointCorrupt(f"{where} has its data in other files")
    if shape is None or dtype.char not in _KINDS:
        raise CheckpointCorrupt(f"{where} is of {dtype}, no array of numbers")
    size, stored = math.prod(shape) * dtype.itemsize, held.id.get_storage_size()
    if stored and size > stored * (_TIMES_SMALLER if made.get_nfilters() else 1):
        raise CheckpointCorrupt(f"{where} says {size} bytes, of which {stored} are there")
    return Stored(held, shape, dtype, bool(stored))


def write(opened: Any, path: tuple[str, ...], array: np.ndarray, options: dict[str, Any]) -> None:
    """Make a dataset; `options` are for those with elements."""
    opened.create_dataset("/".join(path), data=array, **(options if array.ndim and array.size else {}))


def leave(opened: Any, path: tuple[str, ...], shape: tuple[int, ...], dtype: np.dtype, options: dict[str, Any]) -> None:
    """Make a dataset without data, which takes no room and reads as zeros."""
    opened.create_dataset("/".join(path), shape=shape, dtype=dtype, **(options if math.prod(shape) else {}))


def flushed(path: Path) -> None:
    """Have a file and its name on the disk."""
    flush(path)
    flush(path.parent)
