"""Converts folders that torchrl's `dumps` wrote: rows of tensor storages, the cursor and priorities."""

import contextlib
import copy
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch, Fields
from fbuf.checkpoint.arrays import row_bytes
from fbuf.checkpoint.manifest import parse_json
from interop.buffers import ReplayBuffer
from interop.checkpoint.layouts import dtype_stored
from interop.checkpoint.other_folders import is_torchrl_folder
from interop.data.arguments import class_of
from interop.data.bridge import DTYPES
from interop.data.layout import Layout, Leaf, LeafSpec
from interop.samplers import PrioritizedSampler, RandomSampler, Sampler
from interop.storages import Storage, TensorStorage
from interop.writers import ImmutableDatasetWriter, RoundRobinWriter, TensorDictRoundRobinWriter, Writer

_SINGLE = "_-single-tensor-_"  # the name of a storage's only tensor
_LARGEST_JSON = 1 << 26  # bytes
_CLASS = re.compile(r"<class '([^']{1,500})'>")
_TENSORDICT = re.compile(r"tensordict\.(_td|tensordict|_tensordict)\.TensorDict")
_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | frozenset(map(chr, range(32)))  # are escaped in the names of files
_DESCRIPTION = ("shape", "device", "_type")  # entries of meta.json that are no entries of the tensordict
_MOST_DEEP = 64


def convert_torchrl(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], like: ReplayBuffer | None = None
) -> None:
    """Make a checkpoint, which `loads` reads, of a folder that `dumps` of torchrl wrote from a tensor storage.

    It has the rows, the cursor, the batch size and the priorities. The rows go from file to file: they may be larger than
    memory. Nothing in the folder is executed or changed, and no link in it is followed. Prefetched batches and random
    numbers are not taken over.

    Torchrl saves neither classes nor structures. By default the checkpoint is one of a buffer of tensordicts or tensors
    with a PrioritizedSampler where there are priorities, else a RandomSampler. Its writer is a TensorDictRoundRobinWriter
    where items have an "index", else a RoundRobinWriter, or an ImmutableDatasetWriter where none was saved.

    Args:
        folder: was written by torchrl.
        path: a folder; made if it is missing. Other files in it stay.
        like: a buffer built as the one that will load the checkpoint: for other samplers and writers, and for items that are
            lists, tuples, dicts or tensorclasses, one of which must be in it. It is not changed.

    Raises:
        FileNotFoundError: there is no folder.
        CheckpointCorrupt: the folder is damaged; the message names the file. It has no checksums: sizes of files are
            compared with their descriptions.
        CheckpointMismatch: it was written from something else; the message says how to save it instead.
    """
    if os.path.realpath(folder) == os.path.realpath(path):
        raise ValueError(f"path must be another folder than {os.fspath(folder)!r}, which is read")
    with torch.inference_mode(False), torch.device("cpu"):
        open_torchrl(folder, like).dumps(path)


def open_torchrl(folder: str | os.PathLike[str], like: ReplayBuffer | None = None) -> ReplayBuffer:
    """The buffer that `convert_torchrl` saves; its rows are mapped in the files of the folder, which never changes.

    The arguments and errors are those of `convert_torchrl`. What is written to its rows stays in this process.
    """
    if like is not None and not isinstance(like, ReplayBuffer):
        raise TypeError(f"like must be a ReplayBuffer or None, got {class_of(like)}")
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{os.fspath(folder)}: there is no folder")
    if not is_torchrl_folder(folder):
        raise CheckpointMismatch(f"{os.fspath(folder)}: was not written by `dumps` of a buffer of torchrl")
    with torch.inference_mode(False), torch.device("cpu"):
        return _Dump(folder).buffer(like)


@dataclass(frozen=True)
class _TensorFile:
    """A file of nothing but the values of a tensor."""

    path: File
    dtype: torch.dtype
    shape: tuple[int, ...]

    def mapped(self) -> Tensor:
        """The values, read where they are used. Changes do not reach the file."""
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        with _errors(self.path):
            flat = torch.from_file(str(self.path), shared=False, size=math.prod(self.shape), dtype=self.dtype)
        return flat.view(self.shape)

    def rows(self, count: int) -> Tensor:
        """`mapped`, of which the first rows are checked."""
        values = self.mapped()
        if self.dtype == torch.bool and count and self.shape[0] and int(values[:count].view(torch.uint8).max()) > 1:
            raise CheckpointCorrupt(f"{self.path}: damaged, it holds bytes that are neither True nor False")
        return values


class _Dump:
    """A folder that torchrl's `dumps` wrote.

    CheckpointCorrupt for a missing or damaged file, CheckpointMismatch for content of something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._top = File(os.path.realpath(path))

    def buffer(self, like: ReplayBuffer | None) -> ReplayBuffer:
        """A buffer with the content, whose rows are the files. Every error of checkpoints names the folder."""
        try:
            return self._buffer(like)
        except CheckpointError as error:
            where = str(self._top)
            raise error if where in str(error) else type(error)(f"{where}: {error}") from error

    def _buffer(self, like: ReplayBuffer | None) -> ReplayBuffer:
        self._refuse_other()
        size, state, ring = self._batch_size(), self._priorities(), self._ring()
        storage = self._storage(None if like is None else _of_tensors(like.storage), ring)
        sampler, writer = self._components(storage, state, ring) if like is None else _copies(like, storage)
        self._refuse_components(sampler, writer, state, ring)
        made = ReplayBuffer(storage=storage, sampler=sampler, writer=writer, batch_size=size)
        if state is not None:
            sampler.load_state_dict(state)
        if ring is not None and "_cursor" in writer.state_dict():
            writer.load_state_dict({"_cursor": ring.cursor, "_write_count": ring.written})
        return made

    def _refuse_other(self) -> None:
        """CheckpointMismatch for a folder of something else than rows of tensors."""
        if self._file("storage", "storage_metadata.json") is None:
            raise CheckpointMismatch(
                f"{self._top / 'storage'}: has no rows of a tensor storage. H5 files, compressed items and ensembles are "
                "not read here: save without a checkpointer, dump each buffer of an ensemble by itself, or extend a buffer "
                "that has a LazyTensorStorage with the items"
            )
        if self._file("transform.t") is not None:
            raise CheckpointMismatch(
                f"{self._top / 'transform.t'}: the state of transforms is not read: move the file away, convert and load "
                "the rest, and give torch.load(file, weights_only=True) to the load_state_dict() of the transforms"
            )

    def _batch_size(self) -> int | None:
        fields = self._fields("buffer_metadata.json")
        return None if fields.any("batch_size") is None else fields.whole("batch_size", 1, 2**31)

    # ------------------------------------------------------------------ components

    def _components(
        self, storage: TensorStorage, state: Mapping[str, Any] | None, ring: "_Ring | None"
    ) -> tuple[Sampler, Writer]:
        """A sampler for the saved priorities, and the writer that has written the rows."""
        sampler: Sampler = RandomSampler()
        if state is not None:
            capacity, dtype = state["_max_capacity"], torch.from_numpy(state["_sum_tree"]).dtype
            if capacity < storage.max_size:
                raise CheckpointCorrupt(
                    f"{self._top / 'sampler'}: has {capacity} priorities for {storage.max_size} items"
                )
            sampler = PrioritizedSampler(capacity, state["_alpha"], state["_beta"], state["_eps"], dtype)
        if ring is None:
            return sampler, ImmutableDatasetWriter()
        layout = storage.contents.layout
        stamped = layout is not None and layout.is_tensordict and ("index",) in layout.places
        return sampler, TensorDictRoundRobinWriter() if stamped else RoundRobinWriter()

    def _refuse_components(
        self, sampler: Sampler, writer: Writer, state: Mapping[str, Any] | None, ring: "_Ring | None"
    ) -> None:
        """CheckpointMismatch for a sampler or a writer whose state is not in the folder."""
        mine, prioritized = sampler.state_dict(), state is not None
        if prioritized != ("_sum_tree" in mine) or (mine and not prioritized):
            kind = "PrioritizedSampler" if prioritized else "RandomSampler"
            raise CheckpointMismatch(
                f"{self._top / 'sampler'}: has {'' if prioritized else 'no '}priorities, and the state of other samplers is "
                f"not read, so a {type(sampler).__name__} cannot go on: convert it like a buffer with a {kind}, load it "
                "into one, then call its set_sampler()"
            )
        if writer.state_dict() and (ring is None or "_cursor" not in writer.state_dict()):
            raise CheckpointMismatch(
                f"{self._top / 'writer'}: has {'no ' if ring is None else ''}cursor: convert it like a buffer with "
                f"{'an ImmutableDatasetWriter' if ring is None else 'a RoundRobinWriter'}, not with a "
                f"{type(writer).__name__}"
            )

    def _ring(self) -> "_Ring | None":
        """Where the writer stands; None for one that writes nothing."""
        if not (self._top / "writer").is_dir():
            return None
        fields = self._fields("writer", "metadata.json")
        if "rank_key" in fields:
            raise CheckpointMismatch(
                f"{fields.where}: ranks of rows are not read: extend a buffer that has a TensorDictMaxValueWriter with the "
                "items"
            )
        count = fields.any("write_count") if "write_count" in fields else None  # early versions: none
        return _Ring(fields.whole("cursor"), 0 if count is None else fields.whole("write_count"))

    def _priorities(self) -> dict[str, Any] | None:
        """The state of a PrioritizedSampler; None where there is none."""
        if all(self._file("sampler", name) is None for name in ("sampler_metadata.json", "sumtree.memmap")):
            return None
        fields = self._fields("sampler", "sampler_metadata.json")
        size = fields.number("_max_capacity", 1)  # integers may be written as floats
        if size != int(size) or size >= 2**31:
            raise fields.wrong("_max_capacity", "an integer below 2**31", size)
        sums, least = (
            self._tensor("sampler", name, dtype="float64", shape=[int(size)]).mapped().numpy()
            for name in ("sumtree.memmap", "mintree.memmap")
        )
        held = least < np.finfo(np.float32).max  # that is what slots without an item have
        if np.isnan(least).any() or (sums[held] != least[held]).any() or sums[~held].any():
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
        path, where = self._file(*names), str(self._top.joinpath(*names))
        dtype, shape = (
            dtype_stored(str(dtype).removeprefix("torch."), where),
            Fields({"shape": shape}, where).wholes("shape"),
        )
        size = row_bytes(DTYPES[dtype], shape)
        found = 0 if path is None else path.stat().st_size
        if found != size or len(shape) > 64 or math.prod(max(each, 1) for each in shape) >= 2**48:
            raise CheckpointCorrupt(f"{where}: has {found} bytes, a tensor of {dtype} {list(shape)} has {size}")
        return _TensorFile(self._top.joinpath(*names), dtype, shape)

    # ------------------------------------------------------------------ rows

    def _storage(self, like: TensorStorage | None, ring: "_Ring | None") -> TensorStorage:
        """A storage whose rows are the files."""
        fields = self._fields("storage", "storage_metadata.json")
        known = None if like is None else like.table.fixed_layout
        if fields.flag("is_pytree"):
            files = self._pytree(fields.fields("metadata"), fields.any("metadata"), known)
        else:
            files = dict(self._entries(("storage",), ()))
        length = fields.whole("len", most=max((math.prod(file.shape) for file in files.values()), default=0))
        ndim = _ndim([file.shape for file in files.values()], length, ring) if like is None else like.ndim
        shape = next(iter(files.values())).shape[:ndim] if files else ()
        if len(shape) < ndim or any(file.shape[:ndim] != shape for file in files.values()):
            raise CheckpointMismatch(
                f"{fields.where}: the items should be tensors with the same {ndim} leading dims, those of a storage with "
                f"ndim={ndim}"
            )
        capacity, per_row = shape[0], math.prod(shape[1:])
        if per_row == 0 or length % per_row or length > math.prod(shape):
            raise CheckpointMismatch(
                f"{fields.where}: {length} items are no rows of {list(shape)}: the storage was saved with another ndim, "
                "pass `like`, a buffer with that ndim"
            )
        filled = length // per_row
        if ring is not None and ring.cursor > min(filled, capacity - 1):
            raise CheckpointCorrupt(
                f"{self._top}: the cursor of the writer, {ring.cursor}, is not in the {filled} rows of {capacity}"
            )
        specs = {path: LeafSpec(path, file.shape[ndim:], file.dtype) for path, file in files.items()}
        layout = _layout(specs, known)
        leaves = [files[leaf.path].rows(filled) for leaf in layout.leaves]
        storage = TensorStorage(layout.build(leaves, shape), ndim=ndim)
        storage.ring.size = filled
        end = filled % capacity if ring is None else ring.cursor
        storage.ring.restored(filled if ring is None else max(ring.written, filled), end)
        return storage

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
            name = "".join(f"%{ord(each):02X}" if each in _UNSAFE else each for each in key) or "%"
            name = name.replace(".", "%2E") if key in (".", "..") else name
            entry, below = meta.fields(key), (*path, key)
            if "type" in entry:
                yield from self._entries((*names, name), below, entry.text("type"))
            elif "is_nested" in entry and entry.flag("is_nested"):
                raise CheckpointMismatch(f"{where}: {key!r} is a nested tensor, which a storage of tensors cannot hold")
            else:
                dtype, shape = entry.any("dtype"), entry.any("shape")
                yield below, self._tensor(*names, f"{name}.memmap", dtype=dtype, shape=shape)

    def _pytree(
        self, fields: Fields, described: Mapping[str, Any], like: Layout | None
    ) -> dict[tuple[Any, ...], _TensorFile]:
        """The files of other items by path. Their structure was not saved: it is that of the target."""
        paths = [spec.path for spec in like.leaves] if like is not None else [()]
        names = {path: "/".join(map(str, path)) if path else _SINGLE for path in paths}
        known = {name.replace("/", "."): path for path, name in names.items()}
        if known.keys() != described.keys():
            raise CheckpointMismatch(
                f"{fields.where}: the tensors {[*described][:8]} are not those of the storage, {[*known][:8]}. Their lists, "
                "tuples and dicts were not saved: call interop.convert_torchrl(folder, new_folder, like), where `like` is a "
                "buffer with one item of their structure"
            )
        files = {}
        for name, path in known.items():
            entry = fields.fields(name)
            parts = f"{names[path]}.memmap".split("/")
            files[path] = self._tensor("storage", *parts, dtype=entry.any("dtype"), shape=entry.any("shape"))
        return files


@dataclass(frozen=True)
class _Ring:
    """The row that a writer writes next, and how many it has written; 0 where that was not saved."""

    cursor: int
    written: int


def _of_tensors(storage: Storage) -> TensorStorage:
    """The storage; CheckpointMismatch for one that does not hold tensors in rows."""
    if not isinstance(storage, TensorStorage) or storage.table.place.in_order:
        raise CheckpointMismatch(
            f"folders of torchrl are read into storages of tensors, not into a {type(storage).__name__}. Extend a buffer "
            "that has a LazyTensorStorage with the items of a list"
        )
    return storage


def _copies(like: ReplayBuffer, storage: TensorStorage) -> tuple[Sampler, Writer]:
    """Copies of the sampler and the writer of a buffer, for another storage."""
    known = {id(like.storage): storage}
    return copy.deepcopy(like.sampler, known), copy.deepcopy(like.writer, known)


def _ndim(shapes: Sequence[tuple[int, ...]], length: int, ring: _Ring | None) -> int:
    """How many leading dims count as items: the cursor, or a full storage, says how many rows so many items are."""
    for ndim in range(1, min(map(len, shapes), default=1) + 1):
        capacity, *lanes = shapes[0][:ndim] if shapes else (0,)
        rows = {capacity} if ring is None else {capacity, ring.cursor}
        if length in {each * math.prod(lanes) for each in rows}:
            return ndim
    return 1


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
