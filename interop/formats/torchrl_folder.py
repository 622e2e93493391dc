"""Folders that torchrl's `dumps` wrote: rows of tensor storages, the cursor and priorities."""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch, Fields, manifest
from fbuf.checkpoint.arrays import as_bytes, row_bytes
from fbuf.checkpoint.manifest import parse_json
from interop.checkpoint.layouts import dtype_stored
from interop.checkpoint.state import LoadOptions
from interop.checkpoint.tensor_states import SavedRing, loading
from interop.data.bridge import DTYPES
from interop.data.layout import Layout, Leaf, LeafSpec
from interop.samplers import Sampler
from interop.storages import Storage, TensorStorage
from interop.writers import Writer

_SINGLE = "_-single-tensor-_"  # the name of a storage's only tensor
_LARGEST_JSON = 1 << 26  # bytes
_CLASS = re.compile(r"<class '([^']{1,500})'>")
_TENSORDICT = re.compile(r"tensordict\.(_td|tensordict|_tensordict)\.TensorDict")
_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | frozenset(map(chr, range(32)))  # are escaped in the names of files
_DESCRIPTION = ("shape", "device", "_type")  # entries of meta.json that are no entries of the tensordict
_MOST_DEEP = 64


def is_torchrl_dump(path: str | os.PathLike[str]) -> bool:
    """Whether torchrl wrote the folder: it has no manifest, and has files of torchrl's buffers."""
    top = os.fspath(path)
    if not os.path.isdir(top) or os.path.lexists(os.path.join(top, manifest.NAME)):
        return False
    return os.path.isdir(os.path.join(top, "storage")) or os.path.isfile(os.path.join(top, "buffer_metadata.json"))


@dataclass(frozen=True)
class _TensorFile:
    """A file of nothing but the values of a tensor."""

    path: File
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        """The values, in new memory."""
        values = np.empty(self.shape, DTYPES[self.dtype])
        self.read_into(values)
        return values

    def read_into(self, values: np.ndarray) -> None:
        """Fill a contiguous array with the first values."""
        if not values.size:
            return
        with _errors(self.path), open(self.path, "rb") as file:
            if file.readinto(as_bytes(values).data) != values.nbytes:
                raise CheckpointCorrupt(f"{self.path}: ends too soon")
        if self.dtype == torch.bool and values.view(np.uint8).max() > 1:
            raise CheckpointCorrupt(f"{self.path}: damaged, it holds bytes that are neither True nor False")


class TorchrlDump:
    """A folder that torchrl's `dumps` wrote. Nothing in it is executed or changed, and no link is followed.

    Such a folder has no checksums: sizes of files are compared with their descriptions. Prefetched batches are pickled
    there, and not read. CheckpointCorrupt for a missing or damaged file, CheckpointMismatch for content of something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._top = File(os.path.realpath(path))
        self.where = str(self._top)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """A context whose errors of checkpoints name the folder."""
        try:
            yield
        except CheckpointError as error:
            raise error if self.where in str(error) else type(error)(f"{self.where}: {error}") from error

    def state(self, storage: Storage, sampler: Sampler, writer: Writer) -> dict[str, Any]:
        """The `state_dict` of a buffer of these components, without rows; what torchrl does not save is theirs."""
        if not isinstance(storage, TensorStorage) or storage.of_frames:
            raise CheckpointMismatch(
                f"{self.where}: folders of torchrl are read into storages of tensors, not into a "
                f"{type(storage).__name__}. There, dump each buffer of an ensemble by itself, and extend a buffer that has "
                "a LazyTensorStorage with the items of a list"
            )
        if self._file("storage", "storage_metadata.json") is None:
            raise CheckpointMismatch(
                f"{self._top / 'storage'}: has no rows of a tensor storage. H5 files, compressed items and ensembles are "
                "not read here: save without a checkpointer, dump each buffer of an ensemble by itself, or extend a buffer "
                "that has a LazyTensorStorage with the items"
            )
        if self._file("transform.t") is not None:
            raise CheckpointMismatch(
                f"{self._top / 'transform.t'}: the state of transforms is not read: move the file away, load the rest, and "
                "give torch.load(file, weights_only=True) to the load_state_dict() of the transforms"
            )
        return {
            "_batch_size": self._fields("buffer_metadata.json").any("batch_size"),
            "_sampler": self._sampler_state(sampler),
            "_writer": self._writer_state(writer),
            "_transforms": {},
            "_rng": None,  # other numbers are drawn here
        }

    def restoring_rows(
        self, storage: TensorStorage, cursor: int | None, written: int | None, options: LoadOptions
    ) -> Callable[[], None]:
        """Check the rows against a storage, and read them; the returned function stores them.

        Args:
            storage: a storage of tensors.
            cursor: the row that is written next; None for the one behind the last row.
            written: how many rows were ever written, if known.
            options: the options of the load.
        """
        fields = self._fields("storage", "storage_metadata.json")
        like = storage.fixed_layout
        ndim = storage.ndim
        if fields.flag("is_pytree"):
            files = self._pytree(fields.fields("metadata"), fields.any("metadata"), like)
        else:
            files = dict(self._entries(("storage",), ()))
        shape = next(iter(files.values())).shape[:ndim] if files else ()
        if len(shape) < ndim or any(file.shape[:ndim] != shape for file in files.values()):
            raise CheckpointMismatch(
                f"{fields.where}: the items should be tensors with the same {ndim} leading dims, those of a storage with "
                f"ndim={ndim}"
            )
        capacity = shape[0]
        per_row = math.prod(shape[1:])
        length = fields.whole("len", most=max(math.prod(file.shape) for file in files.values()))
        if per_row == 0 or length % per_row or length > math.prod(shape):
            raise CheckpointMismatch(
                f"{fields.where}: {length} items are no rows of {list(shape)}: the storage was saved with another ndim"
            )
        filled = length // per_row
        if cursor is not None and cursor > min(filled, capacity - 1):
            raise CheckpointCorrupt(
                f"{self.where}: the cursor of the writer, {cursor}, is not in the {filled} rows of {capacity}"
            )
        layout = _layout({path: LeafSpec(path, file.shape[ndim:], file.dtype) for path, file in files.items()}, like)
        end = filled % capacity if cursor is None else cursor
        ring = SavedRing(ndim, shape[1:], capacity, filled, max(written or 0, filled), end)

        def fill(arrays: Sequence[np.ndarray | None]) -> None:
            for leaf, array in zip(layout.leaves, arrays, strict=True):
                if array is not None:
                    files[leaf.path].read_into(array)

        return loading(storage, layout, ring, fill, options, self.where)

    # ------------------------------------------------------------------ files

    def _file(self, *names: str) -> File | None:
        """The path of a plain file; None where there is none. CheckpointCorrupt for links and pipes."""
        path = self._top.joinpath(*names)
        try:
            plain = os.path.realpath(path) == str(path) and self._top in path.parents
            if plain and not os.path.lexists(path):
                return None
            plain = plain and path.is_file()
        except (OSError, ValueError):  # no name of a file
            plain = False
        if not plain:
            raise CheckpointCorrupt(f"{str(path)!r:.500}: is no plain file; links are not followed")
        return path

    def _json(self, *names: str) -> Any:
        path = self._file(*names)
        if path is None:
            raise CheckpointCorrupt(f"{self._top.joinpath(*names)}: is missing")
        with _errors(path):
            if path.stat().st_size > _LARGEST_JSON:
                raise CheckpointCorrupt(f"{path}: has {path.stat().st_size} bytes, {_LARGEST_JSON} at most are read")
            return parse_json(path.read_bytes(), str(path))

    def _fields(self, *names: str) -> Fields:
        """The entries of a JSON file."""
        return Fields(self._json(*names), str(self._top.joinpath(*names)))

    def _tensor(self, *names: str, dtype: Any, shape: Any) -> _TensorFile:
        """A file of values, whose size is compared with this dtype and shape, as described. Without values it is missing."""
        path = self._file(*names)
        where = str(self._top.joinpath(*names))
        dtype = dtype_stored(str(dtype).removeprefix("torch."), where)
        shape = Fields({"shape": shape}, where).wholes("shape")
        size = row_bytes(DTYPES[dtype], shape)
        stored_bytes = 0 if path is None else path.stat().st_size
        if stored_bytes != size or len(shape) > 64 or math.prod(max(size_of_dim, 1) for size_of_dim in shape) >= 2**48:
            raise CheckpointCorrupt(f"{where}: has {stored_bytes} bytes, a tensor of {dtype} {list(shape)} has {size}")
        return _TensorFile(self._top.joinpath(*names), dtype, shape)

    # ------------------------------------------------------------------ rows

    def _entries(
        self, names: tuple[str, ...], path: tuple[str, ...], named: str | None = None
    ) -> Iterator[tuple[tuple[Any, ...], _TensorFile]]:
        """The files of a saved tensordict or tensorclass, by path. `named`: its class in the description above it."""
        where = str(self._top.joinpath(*names, "meta.json"))
        described = self._json(*names, "meta.json")
        meta = Fields(described, where)
        kind = _CLASS.fullmatch(meta.text("_type"))
        if kind is None or len(names) > _MOST_DEEP:
            raise CheckpointCorrupt(f"{where}: '_type' is no class, or it is nested more than {_MOST_DEEP} deep")
        own = kind[1].rpartition(".")[2]
        if named not in (None, own) and (named, own) != ("TensorDictParams", "TensorDict"):  # as tensordict saves them
            raise CheckpointCorrupt(f"{where}: is a {kind[1][:100]}, the description above it says {named[:100]}")
        for name in ("other.pickle", "pickle.pkl"):
            if self._file(*names, name) is not None:
                raise CheckpointMismatch(
                    f"{where}: objects were saved by pickle, which runs what it reads: it is never opened. Save without "
                    "these entries"
                )
        if self._top.joinpath(*names, "_tensordict").is_dir():
            if any(value is not None for key, value in described.items() if key != "_type"):
                raise CheckpointMismatch(f"{where}: a tensorclass with other values than tensors cannot be stored")
            yield from self._entries((*names, "_tensordict"), path)
            return
        if not _TENSORDICT.fullmatch(kind[1]):
            key = repr(path[0] if len(path) == 1 else path)
            raise CheckpointMismatch(f"{where}: {key} is a {kind[1][:100]}, no tensor: save without it")
        if "_storage_shape" in described:
            raise CheckpointMismatch(
                f"{where}: a checkpointer of torchrl flattened these rows, which is not read here; there, set "
                "storage.checkpointer = TensorStorageCheckpointer() and save again"
            )
        lost = [key for key in _DESCRIPTION if self._file(*names, f"{key}.memmap") is not None]
        if lost:
            raise CheckpointCorrupt(f"{where}: the descriptions of the entries {lost} were lost when they were written")
        for key, value in described.items():
            if key in _DESCRIPTION and not isinstance(value, dict):
                continue
            name = "".join(f"%{ord(letter):02X}" if letter in _UNSAFE else letter for letter in key) or "%"
            name = name.replace(".", "%2E") if key in (".", "..") else name
            entry = meta.fields(key)
            below = (*path, key)
            if "type" in entry:
                yield from self._entries((*names, name), below, entry.text("type"))
            elif "is_nested" in entry and entry.flag("is_nested"):
                raise CheckpointMismatch(f"{where}: {key!r} is a nested tensor, which a storage of tensors cannot hold")
            else:
                dtype = entry.any("dtype")
                shape = entry.any("shape")
                yield below, self._tensor(*names, f"{name}.memmap", dtype=dtype, shape=shape)

    def _pytree(
        self, fields: Fields, described: Mapping[str, Any], like: Layout | None
    ) -> dict[tuple[Any, ...], _TensorFile]:
        """The files of other items by path. Their structure was not saved: it is that of the target."""
        paths = [spec.path for spec in like.leaves] if like is not None else [()]
        names = {path: "/".join(map(str, path)) if path else _SINGLE for path in paths}
        saved = {name.replace("/", "."): path for path, name in names.items()}
        if saved.keys() != described.keys():
            raise CheckpointMismatch(
                f"{fields.where}: the tensors {[*described][:8]} are not those of the storage, {[*saved][:8]}. Their lists, "
                "tuples and dicts were not saved: write one item into the storage first, its structure will be used"
            )
        files = {}
        for name, path in saved.items():
            entry = fields.fields(name)
            parts = f"{names[path]}.memmap".split("/")
            files[path] = self._tensor("storage", *parts, dtype=entry.any("dtype"), shape=entry.any("shape"))
        return files

    # ------------------------------------------------------------------ state dicts

    def _sampler_state(self, sampler: Sampler) -> Mapping[str, Any]:
        """The priorities, or the state of the sampler itself where it has none."""
        mine = sampler.state_dict()
        saved = self._file("sampler", "sampler_metadata.json") is not None
        if saved != ("_sum_tree" in mine) or (mine and not saved):
            raise CheckpointMismatch(
                f"{self._top / 'sampler'}: has {'' if saved else 'no '}priorities, and the state of other samplers is not "
                f"read, so a {type(sampler).__name__} cannot go on: load into a buffer with a "
                f"{'PrioritizedSampler' if saved else 'RandomSampler'}, then call its set_sampler()"
            )
        return self._priorities() if saved else mine

    def _priorities(self) -> dict[str, Any]:
        fields = self._fields("sampler", "sampler_metadata.json")
        size = fields.number("_max_capacity", 1)  # integers may be written as floats
        if size != int(size) or size >= 2**31:
            raise fields.wrong("_max_capacity", "an integer below 2**31", size)
        sums, least = (
            self._tensor("sampler", name, dtype="float64", shape=[int(size)]).read()
            for name in ("sumtree.memmap", "mintree.memmap")
        )
        has_item = least < np.finfo(np.float32).max  # that is what slots without an item have
        if np.isnan(least).any() or (sums[has_item] != least[has_item]).any() or sums[~has_item].any():
            raise CheckpointCorrupt(f"{self._top / 'sampler'}: damaged, mintree.memmap differs from sumtree.memmap")
        # Early versions wrote the highest priority as a weight.
        highest, slot = fields.items("_max_priority", 2) if "_schema_version" in fields else (None, None)
        if slot is not None:  # written as a float
            slot = int(Fields({"slot": slot}, fields.where).number("slot", 0))
        with np.errstate(over="ignore"):
            dtype = np.float32 if (sums == sums.astype(np.float32)).all() else np.float64
            weights = {"_sum_tree": sums.astype(dtype), "_min_tree": least.astype(dtype)}
        top = {"_schema_version": 1, "_max_capacity": int(size), "_max_priority": [highest, slot]}
        return {**top, **{name: fields.number(name, 0) for name in ("_alpha", "_beta", "_eps")}, **weights}

    def _writer_state(self, writer: Writer) -> Mapping[str, Any]:
        """The cursor and the count, or the state of a writer without a cursor."""
        mine = writer.state_dict()
        if not mine:
            return mine
        fields = self._fields("writer", "metadata.json")
        if "_cursor" not in mine or "rank_key" in fields:
            raise CheckpointMismatch(
                f"{fields.where}: ranks of rows are not read: load a folder of a round-robin writer into a buffer with a "
                f"RoundRobinWriter, not with a {type(writer).__name__}"
            )
        count = fields.any("write_count") if "write_count" in fields else None  # early versions: none
        return {"_cursor": fields.any("cursor"), "_write_count": count or 0}


def _layout(specs: Mapping[tuple[Any, ...], LeafSpec], like: Layout | None) -> Layout:
    """The layout of saved leaves: of the structure of the target, if that has the same leaves, or of a tensordict."""
    if like is not None and like.places.keys() == specs.keys() and not like.varied:
        return Layout(like.root, tuple(specs[leaf.path] for leaf in like.leaves))
    if [*specs] == [()]:
        return Layout(Leaf(), tuple(specs.values()))
    empty = TensorDict({}, batch_size=[0], device="cpu")
    for path, spec in specs.items():
        empty.set(path, torch.empty((0, *spec.shape), dtype=spec.dtype, device="cpu"))
    return Layout.of(empty, 1)


@contextlib.contextmanager
def _errors(path: File) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointCorrupt(f"{path}: cannot be read ({error.strerror})") from error
