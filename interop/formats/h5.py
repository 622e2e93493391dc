"""TED data in an H5 file, with a group for each trajectory."""

import contextlib
import importlib
import io
import itertools
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tensordict.utils import NestedKey

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch, Fields, Reading, Verify, Writing
from fbuf.checkpoint.manifest import parse_json
from fbuf.checkpoint.writing import flush
from interop.checkpoint.checkpointer import Content
from interop.checkpoint.state import LoadOptions
from interop.engine.saved_rows import as_array
from interop.formats.ted_formats import NestedStorageCheckpointer
from interop.storages import TensorStorage
from interop.ted.flattening import KeyPath, shown
from interop.ted.hooks import trajectory_names

_DESCRIPTION = "_description"
_LARGEST_DESCRIPTION = 1 << 26
_TIMES_SMALLER = 1_100  # what the filters of HDF5 make smaller, at most, of any content
_OTHER_TIMES_SMALLER = 1 << 17  # what other filters do
_FILTERS = {1, 2, 3, 4, 32000}  # deflate, shuffle, Fletcher, szip, LZF
_FILLED = 4096  # bytes that a compressed dataset may say beside its compressed ones
_FAULTS = (OSError, RuntimeError, KeyError, ValueError, TypeError, IndexError, RecursionError, OverflowError)
_KINDS = "?bhilqBHILQefdFD"  # of plain numbers, by NumPy's letters


class H5StorageCheckpointer(NestedStorageCheckpointer):
    """TED data of a tensor storage in an H5 file, which can be compressed and which other programs read.

    The file has a group `traj_<i>` for each trajectory of the written rows, with the arrays of `TED2Nested`, the numbers
    `_len`, `shift`, `is_full` and `_storage_shape`, and `_description`, which is JSON. In a checkpoint it is a file of the
    folder. `dumps` and `loads` also take a path that ends with `.h5`, for a file by itself: it replaces another one when it
    is complete, and has no checksums.

    Only data in the file is read: links are ignored, and virtual datasets and data in other files are CheckpointCorrupt.
    Needs h5py. Takes no hooks.

    Args:
        checkpoint_file: the name of the file.
        done_keys: as of `FlatStorageCheckpointer`.
        reward_keys: the same.
        h5_kwargs: how datasets are made, such as `{"compression": "gzip"}`; not used for single numbers.
        done_key, shift_key, is_full_key: as of `TED2Nested`; None for its defaults.
    """

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Any = None,
        reward_keys: Any = None,
        h5_kwargs: Any = None,
        verify: bool = True,
        done_key: NestedKey | None = None,
        shift_key: NestedKey | None = None,
        is_full_key: NestedKey | None = None,
    ) -> None:
        super().__init__()
        if not checkpoint_file or os.path.basename(checkpoint_file) != checkpoint_file:
            raise ValueError(f"checkpoint_file must be the name of a file, got {checkpoint_file!r}")
        self.checkpoint_file = checkpoint_file
        self._options = dict(h5_kwargs or {})
        keys = {
            "done_key": done_key,
            "shift_key": shift_key,
            "is_full_key": is_full_key,
            "done_keys": done_keys,
            "reward_keys": reward_keys,
        }
        self._set_hooks(keys, verify)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """ValueError: an H5 file has the trajectories as they are."""
        raise ValueError(
            f"a {type(self).__name__} takes no hooks: use a TensorStorageCheckpointer, register TED2Flat() to save and "
            "Flat2TED() to load, and your hooks with them"
        )

    register_load_hook = register_save_hook

    def dumps(self, storage: Content, path: str | os.PathLike[str]) -> None:
        """Save the content in a folder, or in a file that ends with `.h5`: complete and flushed, or not at all."""
        if Path(path).suffix != ".h5":
            super().dumps(storage, path)
            return
        place = Path(os.path.realpath(path))  # a link is resolved once
        beside = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
        try:
            with self._held(storage), _writing(beside) as opened:
                self._write(opened, self._saveable(storage))
            flush(beside)
            flush(beside.parent)
            os.replace(beside, place)
            flush(place.parent)
        finally:
            beside.unlink(missing_ok=True)

    def _load_from(self, storage: Content, path: str | os.PathLike[str], verify: Verify, options: LoadOptions) -> None:
        if Path(path).suffix != ".h5" and not os.path.isfile(path):
            super()._load_from(storage, path, verify, options)
            return
        self._apply(storage, self._read(storage, Path(path), options))

    def _save(self, storage: Content, out: Writing) -> dict[str, Any]:
        saveable = self._saveable(storage)
        name = self.checkpoint_file
        for number in itertools.count(1):  # each storage of an ensemble has its own file
            if name not in out.files:
                break
            name = f"{number}-{self.checkpoint_file}"
        with _writing(out.file(name)) as opened:
            self._write(opened, saveable)
        return {"file": name}

    def _load(self, storage: Content, saved: Any, source: Reading, options: LoadOptions) -> Callable[[], None]:
        return self._read(storage, source.file(Fields(saved, f"{source.path}, storage").text("file")), options)

    def _write(self, opened: Any, storage: TensorStorage) -> None:
        """Write the groups, one flat array at a time, and the numbers beside them."""
        described = self._described(storage)
        hook = self._flattening
        flat = self._flattened(storage)
        if flat is not None:
            lengths, ended = (column.numpy() for column in flat.order.trajectories())
            names = trajectory_names(len(lengths))
            for path in flat.specs:
                if any(step in ("", ".", "..") or "/" in step or "\0" in step for step in path):
                    raise ValueError(f"the key {shown(path)} cannot be a name in an H5 file: rename it")
                array = as_array(flat.array(path))
                parts = np.split(array, np.cumsum(lengths + ended if path in flat.followed else lengths)[:-1])
                for name, rows in zip(names, parts, strict=True):
                    opened.create_dataset("/".join((name, *path)), data=rows, **(self._options if rows.size else {}))
        ring = described["ring"]
        numbers = {
            ("_storage_shape",): [ring["capacity"], *ring["lanes"]],
            ("_len",): len(storage),
            hook.shift_key: ring["end"],
            hook.is_full_key: ring["filled"] == ring["capacity"],
            (_DESCRIPTION,): np.frombuffer(json.dumps(described).encode(), np.uint8),
        }
        for path, value in numbers.items():
            opened.create_dataset("/".join(path), data=np.asarray(value))

    def _read(self, storage: Content, path: Path, options: LoadOptions) -> Callable[[], None]:
        """Check and read a file; the returned function stores its rows."""
        with _reading(path) as opened:
            with _faults_of(path):
                datasets = _datasets(opened, path)
                text = datasets.pop(_DESCRIPTION)
                if text.nbytes > _LARGEST_DESCRIPTION:
                    raise ValueError(f"a description of {text.nbytes} bytes")
                description = parse_json(text[()].tobytes(), str(path))
                parts: dict[KeyPath, dict[str, Any]] = {}
                for name, dataset in datasets.items():
                    first, *rest = name.split("/")
                    if rest and first.startswith("traj_"):
                        parts.setdefault(tuple(rest), {})[first] = dataset
                for parts_of_key in parts.values():
                    if set(parts_of_key) != set(trajectory_names(len(parts_of_key))):
                        raise ValueError(f"groups of trajectories are missing: found {sorted(parts_of_key)[:8]}")
                arrays = {
                    key: _Array([parts_of_key[name] for name in sorted(parts_of_key)], path)
                    for key, parts_of_key in parts.items()
                }
            return self._with_arrays(storage, Fields(description, str(path)), arrays, options)


class _Array:
    """A flat array in the datasets of trajectories; `np.asarray` reads it."""

    def __init__(self, parts: list[Any], path: Path) -> None:
        self._parts = parts
        self._path = path
        self.dtype = parts[0].dtype
        if any(
            (part.ndim, part.shape[1:], part.dtype) != (parts[0].ndim, parts[0].shape[1:], self.dtype) for part in parts
        ):
            raise ValueError(f"{parts[0].name} has another shape or dtype in some groups")
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        memory = np.empty(self.shape, self.dtype)
        start = 0
        with _faults_of(self._path):
            for part in self._parts:
                stop = start + part.shape[0]
                if memory[start:stop].size:
                    part.read_direct(memory[start:stop])
                start = stop
        return memory


# ---------------------------------------------------------------------- files


def shape_of(path: str | os.PathLike[str]) -> tuple[int, int]:
    """The capacity of a storage that was saved in an H5 file, in items, and the number of its dims.

    FileNotFoundError, or `CheckpointCorrupt` for a damaged file; `CheckpointMismatch` for one that another program wrote.
    """
    where = Path(path)
    with _reading(where) as opened:
        if _DESCRIPTION not in opened:
            raise CheckpointMismatch(
                f"{where} is not of a H5StorageCheckpointer. main_data.hdf5 of Minari is opened by the folder two above it, "
                "which has data/metadata.json; files of D4RL and others by a class of interop.datasets with from_local="
            )
        with _faults_of(where):
            shape = Fields({"shape": [int(each) for each in opened["_storage_shape"][()]]}, str(where)).wholes("shape")
    return math.prod(shape), len(shape)


def _datasets(opened: Any, path: Path) -> dict[str, Any]:
    """The datasets of an open file by name; links do not count. CheckpointCorrupt for data elsewhere or no numbers."""
    h5py = _h5py()
    datasets = dict[str, Any]()

    def visit(name: str, node: Any) -> None:
        if not isinstance(node, h5py.Dataset):
            return
        where = f"{path}: {name!r}"
        if node.is_virtual or node.external:
            raise CheckpointCorrupt(f"{where} has its data in other files")
        if node.shape is None or node.dtype.char not in _KINDS:
            raise CheckpointCorrupt(f"{where} is of {node.dtype}, no array of numbers")
        size = math.prod(node.shape) * node.dtype.itemsize
        stored = node.id.get_storage_size()
        creation = node.id.get_create_plist()
        most = stored
        if size and creation.get_nfilters():
            is_plain = {creation.get_filter(number)[0] for number in range(creation.get_nfilters())} <= _FILTERS
            most = stored * (_TIMES_SMALLER if is_plain else _OTHER_TIMES_SMALLER) + _FILLED
            size = max(size, math.prod(node.chunks) * node.dtype.itemsize)  # a chunk is decompressed as a whole
        if size > most or (size and not stored):  # HDF5 would read what is missing as zeros
            raise CheckpointCorrupt(f"{where} says {size} bytes, of which {stored} are there")
        datasets[name] = node

    opened.visititems(visit)
    return datasets


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Any]:
    """A new H5 file, open. OSError where the disk is full or fails; the caller removes the file then."""
    h5py = _h5py()
    with _Watched(path, "x+b") as file:
        try:
            with h5py.File(file, "w") as opened:
                yield opened
        finally:
            if file.failure is not None:
                raise file.failure


class _Watched(io.FileIO):
    """A file that keeps its first error and then only pretends to write: HDF5 loses errors of deferred writes, or aborts."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        with self._keeping_failure():
            while rest and self.failure is None:
                rest = rest[super().write(rest) :]
        return size

    def readinto(self, memory: Any) -> int:
        if self.failure is None:
            return super().readinto(memory)
        view = memoryview(memory).cast("B")
        view[:] = bytes(len(view))
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        with self._keeping_failure():
            if self.failure is None:
                super().truncate(size)
        return size or 0

    @contextlib.contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """An H5 file, open for reading. FileNotFoundError; CheckpointCorrupt for one that is damaged."""
    h5py = _h5py()
    with open(path, "rb"):
        pass
    with _faults_of(path):
        opened = h5py.File(path, "r", locking=False)
    with opened:
        yield opened


@contextlib.contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """Turns the errors of a damaged file into CheckpointCorrupt naming it."""
    try:
        yield
    except CheckpointError:
        raise
    except _FAULTS as error:
        raise CheckpointCorrupt(f"{path}: cannot be read as an H5 file ({error})") from error


def _h5py() -> Any:
    """h5py. ImportError saying what to install."""
    try:
        return importlib.import_module("h5py")
    except ImportError as error:
        raise ImportError("H5 files need h5py: install it with `pip install h5py`, or `fbuf[interop]`") from error
