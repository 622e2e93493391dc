"""TED data in an H5 file, with a group for each trajectory."""

import contextlib
import importlib
import io
import itertools
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as File
from typing import Any

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, Fields, Source, Verify, Writing
from fbuf.checkpoint.writing import flush
from interop.checkpoint.state import LoadOptions
from interop.checkpoint.tensor_states import SavedRing, as_array, saved_ring
from interop.data.keys import as_path
from interop.formats.ted_formats import Content, NestedStorageCheckpointer, given, loadable, unfit
from interop.storages import Storage, TensorStorage
from interop.ted.entries import Path, shown
from interop.ted.flattening import Flattened, Rebuilt
from interop.ted.hooks import trajectory_names

_GROUP = re.compile(r"traj_\d+")
_MOST_DEEP = 64
_TIMES_SMALLER = 1 << 17  # a filter makes nothing smaller than that
_FAULTS = (OSError, RuntimeError, KeyError, ValueError, TypeError, IndexError, RecursionError, OverflowError)
_KINDS = "?bhilqBHILQefdFD"  # of plain numbers, by NumPy's letters


class H5StorageCheckpointer(NestedStorageCheckpointer):
    """TED data of a tensor storage in an H5 file, which can be compressed and which other programs read.

    The file has a group `traj_<i>` for each trajectory, with the arrays of `TED2Nested`, and the numbers `_len`, `shift`,
    `is_full` and `_storage_shape`. Rows that were never written are groups without data. In a checkpoint it is a file of
    the folder. `dumps` and `loads` also take a path that ends with `.h5`, for a file by itself: it replaces another one when
    it is complete, and has no checksums; such files of other programs are read too.

    Links, virtual datasets and data in other files are not followed: CheckpointCorrupt. Needs h5py. Takes no hooks.

    Args:
        checkpoint_file: the name of the file.
        done_keys: as of `FlatStorageCheckpointer`.
        reward_keys: the same.
        h5_kwargs: how datasets are made, such as `{"compression": "gzip"}`; not used for single numbers.
        kwargs: other arguments of `TED2Nested`.
    """

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Any = None,
        reward_keys: Any = None,
        h5_kwargs: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if not checkpoint_file or os.path.basename(checkpoint_file) != checkpoint_file:
            raise ValueError(f"checkpoint_file must be the name of a file, got {checkpoint_file!r}")
        self.checkpoint_file = checkpoint_file
        self._options = dict(h5_kwargs or {})
        names = {**kwargs, **given(done_keys=done_keys, reward_keys=reward_keys)}
        if "done_key" in names:
            names["done_key"] = as_path(names["done_key"])
        self._set_hooks(names, verify=names.pop("verify", True))

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """ValueError: an H5 file has the trajectories as they are."""
        raise ValueError(
            f"a {type(self).__name__} takes no hooks: use a TensorStorageCheckpointer, register TED2Flat() to save and "
            "Flat2TED() to load, and your hooks with them"
        )

    register_load_hook = register_save_hook

    def dumps(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Save the content in a folder, or in a file that ends with `.h5`: complete and flushed, or not at all."""
        if File(path).suffix != ".h5":
            super().dumps(storage, path)
            return
        place = File(os.path.realpath(path))  # a link is resolved once
        beside = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
        try:
            with storage.locked():
                self._save_alone(self._saveable(storage), beside)
            flush(beside)
            flush(beside.parent)
            os.replace(beside, place)
            flush(place.parent)
        finally:
            beside.unlink(missing_ok=True)

    def _load_from(self, storage: Storage, path: str | os.PathLike[str], verify: Verify, options: LoadOptions) -> None:
        place = File(path)
        if place.suffix != ".h5":
            super()._load_from(storage, path, verify, options)
            return
        with _reading(place) as opened:
            self._apply(storage, self._load_alone(storage, opened, place, options))

    # ------------------------------------------------------------------ in a checkpoint

    def _written(self, flat: Flattened, storage: TensorStorage, out: Writing) -> dict[str, Any]:
        names = (f"{number}-{self.checkpoint_file}" for number in itertools.count(1))
        name = next(  # each storage of an ensemble has its own file
            name for name in itertools.chain([self.checkpoint_file], names) if name not in out.files
        )
        with _writing(out.file(name)) as opened:
            self._write(opened, flat, storage)
        return {"file": name}

    def _write(self, opened: Any, flat: Flattened, storage: TensorStorage) -> None:
        """Write the groups, one array at a time, and the numbers beside them."""
        ring, hook = saved_ring(storage), self._flattening
        lengths, ended = (each.numpy() for each in flat.order.trajectories())
        filled, spare = ring["filled"], ring["capacity"] - ring["filled"]
        groups: list[int | None] = []  # trajectories by number, and None for the rest of a lane
        for place, is_last in enumerate((np.cumsum(lengths) % filled == 0).tolist()):
            groups += [place, None] if is_last and spare else [place]
        names = trajectory_names(len(groups))
        for path, (shape, _) in flat.specs().items():
            if any(step in ("", ".", "..") or "/" in step or "\0" in step for step in path):
                raise ValueError(f"the key {shown(path)} cannot be a name in an H5 file: rename it")
            array = as_array(flat.array(path))
            sizes = lengths + ended if path in flat.entries.followed else lengths
            stops = np.cumsum(sizes)
            options = self._options if array.size else {}
            for name, number in zip(names, groups, strict=True):
                key = "/".join((name, *path))
                if number is None:  # without data it takes no room
                    opened.create_dataset(key, shape=(spare, *shape[1:]), dtype=array.dtype, **options)
                else:
                    rows = array[stops[number] - sizes[number] : stops[number]]
                    opened.create_dataset(key, data=rows, **options)
        numbers = {
            ("_storage_shape",): [ring["capacity"], *ring["lanes"]],
            ("_len",): len(storage),
            hook.shift_key: hook.shift,
            hook.is_full_key: hook.is_full,
        }
        for path, value in numbers.items():
            opened.create_dataset("/".join(path), data=np.asarray(value))

    @contextlib.contextmanager
    def _arrays(self, fields: Fields, keys: Fields, ring: SavedRing, source: Source) -> Iterator[Mapping[Path, Any]]:
        path = source.file(fields.text("file"))
        with _reading(path) as opened:
            yield _Groups(opened, path).arrays(tuple(keys.items("episodes")), ring)

    def _check(self, rebuilt: Rebuilt, fields: Fields) -> None:
        """The lengths of trajectories are those of the groups."""

    # ------------------------------------------------------------------ a file by itself

    def _save_alone(self, storage: TensorStorage, path: File) -> None:
        if not len(storage):
            raise RuntimeError(
                "Cannot save an empty storage in a file by itself: give a path that does not end with .h5"
            )
        flat = self._flattened(storage)
        unnamed = [*flat.entries.root_only, *flat.entries.next_only]
        unnamed += [path for path, (_, dtype) in flat.specs().items() if dtype == torch.bfloat16]
        if unnamed:
            raise ValueError(
                f"a file by itself does not describe {shown(unnamed[0])}: done flags and rewards must be below 'next', "
                "done flags in the root too, and no dtype bfloat16. Give a path that does not end with .h5"
            )
        with _writing(path) as opened:
            self._write(opened, flat, storage)

    def _load_alone(self, storage: Storage, opened: Any, path: File, options: LoadOptions) -> Callable[[], None]:
        groups, where = _Groups(opened, path), str(path)
        shape, length = groups.number(("_storage_shape",)), groups.number(("_len",))
        capacity, *lanes = shape if isinstance(shape, list) and shape else [None]
        filled = length // max(1, math.prod(lanes)) if type(length) is int else None
        end = groups.number(self._flattening.shift_key)
        rest = {"ndim": 1 + len(lanes), "lanes": lanes, "capacity": capacity, "end": end}
        ring = SavedRing.parsed(Fields({**rest, "filled": filled, "written": filled}, where))
        if not ring.filled:
            raise CheckpointCorrupt(f"{where}: has no rows")
        keys = Fields(self._keys(), where)
        with unfit(where):
            content = Content(None, ring, keys, groups.arrays(tuple(keys.items("episodes")), ring))
        return self._restoring_content(loadable(storage, where), content, options, where)


class _Groups:
    """The groups of an open file, and the numbers beside them. CheckpointCorrupt naming the file where it is damaged."""

    def __init__(self, opened: Any, path: File) -> None:
        self._path = path
        self._parts: dict[str, dict[Path, _Dataset]] = {}
        self._numbers: dict[Path, _Dataset] = {}
        with _faults_of(path):
            for (first, *rest), held in _datasets(opened, path).items():
                if rest and _GROUP.fullmatch(first):
                    self._parts.setdefault(first, {})[tuple(rest)] = held
                else:
                    self._numbers[first, *rest] = held
            self._names = trajectory_names(len(self._parts))
            if set(self._names) != set(self._parts):
                raise ValueError(f"{len(self._parts)} groups should be {self._names[:1]} to {self._names[-1:]}")

    def number(self, path: Path) -> Any:
        """A number, or a list of them; None where there is none."""
        held = self._numbers.get(path)
        with _faults_of(self._path):
            if held is not None and math.prod(held.shape) > 64:
                raise ValueError(f"{path[-1]!r} should be a number")
            return None if held is None else held.read(np.empty(held.shape, held.dtype)).tolist()

    def arrays(self, episodes: Path, ring: SavedRing) -> dict[Path, "_Array"]:
        """The flat arrays of the written rows: the first ones of each lane, whose groups together have all its rows."""
        kept, row, lanes = [], 0, 0
        with _faults_of(self._path):
            for name in self._names:
                part = self._parts[name]
                if episodes not in part or not part[episodes].shape:
                    raise ValueError(f"{name} has no {shown(episodes)}")
                stop = row + part[episodes].shape[0]
                if stop > (ring.filled if row < ring.filled else ring.capacity):
                    raise ValueError(f"{name} has more rows than there are in its lane")
                if row < ring.filled:
                    kept.append(part)
                    if part.keys() != kept[0].keys():
                        raise ValueError(f"{name} has other datasets than {self._names[0]}")
                row, lanes = (0, lanes + 1) if stop == ring.capacity else (stop, lanes)
            if row or lanes != math.prod(ring.lanes):
                raise ValueError(
                    f"there are {lanes} lanes of {ring.capacity} rows, and {row} more rows, instead of "
                    f"{math.prod(ring.lanes)} lanes"
                )
            return {path: _Array([part[path] for part in kept], self._path) for path in kept[0]}


class _Array:
    """A flat array in the datasets of trajectories; `np.asarray` reads it."""

    def __init__(self, parts: "list[_Dataset]", path: File) -> None:
        self._parts, self._path, self.dtype = parts, path, parts[0].dtype
        item = parts[0].shape[1:]
        if any((each.shape[1:], each.dtype) != (item, self.dtype) for each in parts):
            raise ValueError(f"{parts[0].held.name} has another shape or dtype in some groups")
        self.shape = (sum(each.shape[0] for each in parts), *item)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        memory, start = np.empty(self.shape, self.dtype), 0
        with _faults_of(self._path):
            for each in self._parts:
                each.read(memory[start : start + each.shape[0]])
                start += each.shape[0]
        return memory


# ---------------------------------------------------------------------- files


class _Dataset:
    """A dataset of plain numbers whose data is in the file. CheckpointCorrupt for any other."""

    def __init__(self, held: Any, where: str) -> None:
        made, self.held, self.dtype, self.shape = held.id.get_create_plist(), held, held.dtype, held.shape
        if made.get_layout() == _h5py().h5d.VIRTUAL or made.get_external_count():
            raise CheckpointCorrupt(f"{where} has its data in other files")
        if self.shape is None or self.dtype.char not in _KINDS:
            raise CheckpointCorrupt(f"{where} is of {self.dtype}, no array of numbers")
        size, self._stored = math.prod(self.shape) * self.dtype.itemsize, held.id.get_storage_size()
        if self._stored and size > self._stored * (_TIMES_SMALLER if made.get_nfilters() else 1):
            raise CheckpointCorrupt(f"{where} says {size} bytes, of which {self._stored} are there")

    def read(self, memory: np.ndarray) -> np.ndarray:
        """The values, in memory of this shape and dtype. ValueError where there are none, which HDF5 reads as zeros."""
        if memory.size and not self._stored:
            raise ValueError(f"{self.held.name} is without data")
        if memory.ndim == 0 or not memory.size:
            memory[...] = self.held[()]
        else:
            self.held.read_direct(memory)
        return memory


def _datasets(opened: Any, path: File) -> dict[Path, _Dataset]:
    """Every dataset of an open file. CheckpointCorrupt for links other than hard ones, and objects with two names."""
    h5py = _h5py()
    found: dict[Path, _Dataset] = {}
    seen = {h5py.h5o.get_info(opened.id).addr}
    rest: list[tuple[Path, Any]] = [((), opened)]
    while rest:
        above, group = rest.pop()
        for name in group:
            here = (*above, name)
            where = f"{path}: {'/'.join(here)!r}"
            link = group.get(name, getlink=True)
            if type(link) is not h5py.HardLink:
                raise CheckpointCorrupt(f"{where} leads elsewhere, by a {type(link).__name__}")
            held = group[name]
            address = h5py.h5o.get_info(held.id).addr
            if address in seen:
                raise CheckpointCorrupt(f"{where} is there under another name too")
            seen.add(address)
            if len(here) > _MOST_DEEP:
                raise CheckpointCorrupt(f"{where} is nested too deeply")
            if isinstance(held, h5py.Group):
                rest.append((here, held))
            elif isinstance(held, h5py.Dataset):
                found[here] = _Dataset(held, where)
            else:
                raise CheckpointCorrupt(f"{where} is a {type(held).__name__}, no dataset")
    return found


@contextlib.contextmanager
def _writing(path: File) -> Iterator[Any]:
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
    """A file that keeps its first failed write, and seems to go on: HDF5 loses errors of deferred writes, or aborts."""

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        with self._kept():
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
        with self._kept():
            if self.failure is None:
                super().truncate(size)
        return size or 0

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error


@contextlib.contextmanager
def _reading(path: File) -> Iterator[Any]:
    """An H5 file, open for reading. FileNotFoundError; CheckpointCorrupt for one that is damaged."""
    h5py = _h5py()
    with open(path, "rb"):
        pass
    with _faults_of(path):
        opened = h5py.File(path, "r", locking=False)
    with opened:
        yield opened


@contextlib.contextmanager
def _faults_of(path: File) -> Iterator[None]:
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
