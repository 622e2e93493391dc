"""Folders that torchrl's `dumps` wrote: the rows of tensor storages, and the other components as their state dicts."""

import contextlib
import functools
import io
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, CheckpointMismatch, Fields, manifest
from interop.checkpoint.state import LoadOptions
from interop.checkpoint.tensor_states import SavedRing, loading
from interop.data.layout import Branch, Layout, Leaf, LeafSpec
from interop.formats.foreign_files import Folder, TensorFile
from interop.samplers import (
    ConsumingSampler,
    PromptGroupSampler,
    Sampler,
    SamplerWithoutReplacement,
    StalenessAwareSampler,
)
from interop.storages import LazyFrameStorage, Storage, TensorStorage
from interop.writers import Writer

_BUFFER, _META, _ROWS, _PRIORITIES = (
    "buffer_metadata.json",
    "meta.json",
    "storage_metadata.json",
    "sampler_metadata.json",
)
_SINGLE = "_-single-tensor-_"  # the name of a storage's only tensor
_LARGEST_STATE = 1 << 30  # bytes
_CLASS = re.compile(r"<class '([^']{1,500})'>")
_TENSORDICT = re.compile(r"tensordict\.(_td|tensordict|_tensordict)\.TensorDict")
_UNSAFE = frozenset('/<>:"|?*\\ %\x7f') | frozenset(map(chr, range(32)))
_DESCRIPTION = ("shape", "device", "_type")  # entries of meta.json that are no entries of the tensordict
_MOST_DEEP = 64
_NOT_READ = (SamplerWithoutReplacement, ConsumingSampler, PromptGroupSampler, StalenessAwareSampler)
_STATES = {"_sum_tree": "priorities", "_current_top_values": "ranks", "_cursor": "a cursor"}


def is_torchrl_dump(path: str | os.PathLike[str]) -> bool:
    """Whether torchrl wrote the folder: it has no manifest, and has files of torchrl's buffers."""
    top = os.fspath(path)
    if not os.path.isdir(top) or os.path.lexists(os.path.join(top, manifest.NAME)):
        return False
    return os.path.isdir(os.path.join(top, "storage")) or os.path.isfile(os.path.join(top, _BUFFER))


class TorchrlDump:
    """A folder that torchrl's `dumps` wrote. Nothing in it is executed or changed, and no link is followed.

    Such a folder has no checksums: sizes of files are compared with their descriptions. Prefetched batches are pickled
    there, and not read. CheckpointCorrupt for a missing or damaged file, CheckpointMismatch for content of something else.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Folder(os.path.abspath(os.fspath(path)))
        self.where = self._folder.where()

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """A context whose errors of checkpoints name the folder."""
        try:
            yield
        except CheckpointError as error:
            raise error if self.where in str(error) else type(error)(f"{self.where}: {error}") from error

    def state(self, storage: Storage, sampler: Sampler, writer: Writer) -> dict[str, Any]:
        """The `state_dict` of a buffer of these components, without rows; what torchrl does not save is theirs."""
        if not isinstance(storage, TensorStorage) or isinstance(storage, LazyFrameStorage):
            raise CheckpointMismatch(
                f"{self.where}: folders of torchrl are read into storages of tensors, not into a "
                f"{type(storage).__name__}. There, dump each buffer of an ensemble by itself, and extend a buffer that has "
                "a LazyTensorStorage with the items of a list"
            )
        if not self._folder.folder("storage").kind(_ROWS):
            _refuse_others(self._folder.folder("storage"))
        buffer = Fields(self._folder.json(_BUFFER), self._folder.where(_BUFFER))
        return {
            "_batch_size": buffer.any("batch_size"),
            "_sampler": self._component_state(sampler, "sampler", self._sampler_state),
            "_writer": self._component_state(writer, "writer", self._writer_state),
            "_transforms": self._transforms(),
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
        folder = self._folder.folder("storage")
        where = folder.where(_ROWS)
        fields = Fields(folder.json(_ROWS), where)
        files: dict[tuple[Any, ...], TensorFile] = {}
        like = storage.fixed_layout
        if fields.flag("is_pytree"):
            root = _pytree(folder, fields.fields("metadata"), fields.any("metadata"), like, files)
        else:
            root = _branch(folder, storage.ndim, like and like.root, (), files)
        if not files:
            raise CheckpointMismatch(f"{folder.where()}: there is no tensor in the items")
        shape = next(iter(files.values())).shape[: storage.ndim]
        if len(shape) < storage.ndim or any(file.shape[: storage.ndim] != shape for file in files.values()):
            raise CheckpointMismatch(
                f"{folder.where()}: the tensors do not have the same ndim={storage.ndim} leading dims, which the storage "
                "counts as items"
            )
        filled = _filled(fields, shape, max(math.prod(file.shape) for file in files.values()), where)
        capacity = shape[0]
        if cursor is not None and cursor > min(filled, capacity - 1):
            raise CheckpointCorrupt(
                f"{self.where}: the cursor of the writer, {cursor}, is not in the {filled} rows of {capacity}"
            )
        ring = {
            "ndim": storage.ndim,
            "lanes": shape[1:],
            "capacity": capacity,
            "filled": filled,
            "written": max(written or 0, filled),
            "end": filled % capacity if cursor is None else cursor,
        }
        specs = tuple(LeafSpec(path, file.shape[storage.ndim :], file.dtype) for path, file in files.items())

        def fill(arrays: Sequence[np.ndarray | None]) -> None:
            for file, array in zip(files.values(), arrays, strict=True):
                if array is not None:
                    file.read_into(array)

        parsed = SavedRing.parsed(Fields(ring, where))
        return loading(storage, Layout(root, specs), parsed, fill, options, self.where)

    # ------------------------------------------------------------------ state dicts

    def _component_state(
        self, component: Sampler | Writer, name: str, read: Callable[[Folder], dict[str, Any]]
    ) -> Mapping[str, Any]:
        """The state of a component: the saved one, or its own where torchrl saves none for its kind."""
        folder = self._folder.folder(name)
        if isinstance(component, _NOT_READ):
            raise CheckpointMismatch(
                f"{folder.where()}: the state of a {type(component).__name__} is not read from folders of torchrl; load "
                "the folder into a buffer with a RandomSampler, then call its set_sampler()"
            )
        saved = read(folder) if self._folder.kind(name) else {}
        mine = component.state_dict()
        kinds = [next((what for key, what in _STATES.items() if key in each), "") for each in (saved, mine)]
        if kinds[0] != kinds[1]:
            raise CheckpointMismatch(
                f"{folder.where()}: has {kinds[0] or 'no state'}, the {type(component).__name__} of the buffer needs "
                f"{kinds[1] or 'no state'}: build the buffer with a {name} like that of the saved one"
            )
        return saved if kinds[1] else mine

    def _sampler_state(self, folder: Folder) -> dict[str, Any]:
        if not folder.kind(_PRIORITIES):
            return {}  # of a sampler without priorities
        fields = Fields(folder.json(_PRIORITIES), folder.where(_PRIORITIES))
        size = fields.number("_max_capacity", 1)  # integers may be written as floats
        if size != int(size) or size >= 2**31:
            raise fields.wrong("_max_capacity", "an integer below 2**31", size)
        capacity = int(size)
        trees = {
            key: folder.tensor(f"{key[1:].replace('_', '')}.memmap", "torch.float64", [capacity]).read()
            for key in ("_sum_tree", "_min_tree")
        }
        sums, least = trees.values()
        held = least < np.finfo(np.float32).max  # of single precision: that of slots without an item
        if np.isnan(least).any() or (sums[held] != least[held]).any() or sums[~held].any():
            raise CheckpointCorrupt(f"{folder.where('mintree.memmap')}: damaged, it differs from sumtree.memmap")
        parameters = {name: fields.number(name, 0) for name in ("_alpha", "_beta", "_eps")}
        # Early versions wrote the highest priority as a weight.
        highest, slot = fields.items("_max_priority", 2) if "_schema_version" in fields else (None, None)
        if slot is not None:  # written as a float
            slot = int(Fields({"slot": slot}, folder.where(_PRIORITIES)).number("slot", 0))
        with np.errstate(over="ignore"):
            dtype = np.float32 if (sums == sums.astype(np.float32)).all() else np.float64
            weights = {key: tree.astype(dtype) for key, tree in trees.items()}
        top = {"_schema_version": 1, "_max_capacity": capacity, "_max_priority": [highest, slot]}
        return {**top, **parameters, **weights}

    def _writer_state(self, folder: Folder) -> dict[str, Any]:
        if not folder.kind("metadata.json"):
            return {}
        where = folder.where("metadata.json")
        fields = Fields(folder.json("metadata.json"), where)
        count = {"_write_count": (fields.any("write_count") if "write_count" in fields else None) or 0}  # early: none
        if "rank_key" in fields:
            file = folder.tensor("current_top_values.memmap", fields.any("dtype"), fields.any("shape"))
            if file.dtype.is_complex or (file.shape[1:] != (2,) and file.shape != (0,)):  # of no items
                raise CheckpointCorrupt(f"{file.where}: ranks and slots are two columns of numbers")
            table = file.read().reshape(-1, 2).astype(np.float64)
            return {**count, "_rank_key": fields.any("rank_key"), "_current_top_values": table}
        state = {**count, "_cursor": fields.any("cursor")}
        if "generation_shape" in fields:
            file = folder.tensor("generation.memmap", fields.any("generation_dtype"), fields.any("generation_shape"))
            generations = file.read()
            state["_generation"] = generations + generations.dtype.type(1)  # a count of writes here
        return state

    def _transforms(self) -> dict[str, Any]:
        """The `state_dict` of the transforms; {} where none has a state."""
        name = "transform.t"
        if not self._folder.kind(name):
            return {}
        content = io.BytesIO(self._folder.read(name, _LARGEST_STATE))
        try:
            found = torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # damage raises errors of many kinds
            first = str(error).partition("\n")[0][:200]
            raise CheckpointCorrupt(
                f"{self._folder.where(name)}: damaged, or it holds more than tensors and plain values ({first})"
            ) from error
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise CheckpointCorrupt(f"{self._folder.where(name)}: no state_dict")
        return dict(found)


# ---------------------------------------------------------------------- rows


def _refuse_others(folder: Folder) -> None:
    """CheckpointMismatch for the files of storages that are not read."""
    names = {*folder.entries()}
    if any(name.endswith(".h5") for name in names):
        what, cure = "H5 files of torchrl are not read here", "save without a checkpointer"
    elif {"compressed_data", "data_indices.json"} & names:
        what, cure = "compressed items are not read here", "extend a buffer that has a LazyTensorStorage with them"
    elif "0" in names:
        what, cure = "ensembles are not read here", "dump each buffer of the ensemble by itself"
    else:
        return
    raise CheckpointMismatch(f"{folder.where()}: {what}; there, {cure}")


def _filled(fields: Fields, shape: tuple[int, ...], most: int, where: str) -> int:
    """How many rows of a storage of this shape were written; its tensors have at most so many values."""
    length, per_row = fields.whole("len", most=most), math.prod(shape[1:])
    if per_row == 0 or length % per_row or length > math.prod(shape):
        raise CheckpointMismatch(
            f"{where}: {length} items are no rows of {list(shape)}: the storage was saved with another ndim"
        )
    return length // per_row


def _branch(
    folder: Folder, ndim: int, like: Any, path: tuple[Any, ...], files: dict[tuple[Any, ...], TensorFile]
) -> Any:
    """The structure of a saved tensordict, whose files are collected; None for an attribute without a value.

    A tensorclass is of the class that the target has there, if its name is the same; otherwise it is a tensordict.
    """
    if len(folder.names) > _MOST_DEEP:
        raise CheckpointCorrupt(f"{folder.where()}: nested more than {_MOST_DEEP} deep")
    where = folder.where(_META)
    described = folder.json(_META)
    meta = Fields(described, where)
    kind = _CLASS.fullmatch(meta.text("_type"))
    if kind is None:
        raise CheckpointCorrupt(f"{where}: '_type' is no class")
    for name in ("other.pickle", "pickle.pkl"):
        if folder.kind(name):
            raise CheckpointMismatch(
                f"{folder.where(name)}: objects were saved by pickle, which runs what it reads: it is never opened. Save "
                "without these entries"
            )
    if kind[1].startswith("tensordict.tensorclass.NonTensor") and meta.any("data") is None:
        return None
    if not kind[1].startswith("tensordict.") and folder.kind("_tensordict") == "folder":
        inner = _branch(folder.folder("_tensordict"), ndim, like, path, files)
        if not isinstance(inner, Branch) or any(
            value is not None for key, value in described.items() if key != "_type"
        ):
            raise CheckpointMismatch(f"{where}: a tensorclass with other values than tensors cannot be stored")
        named = isinstance(like, Branch) and like.kind.__name__ == kind[1].rpartition(".")[2]
        return replace(inner, kind=like.kind) if named else inner
    if not _TENSORDICT.fullmatch(kind[1]):
        shown = repr(path[0] if len(path) == 1 else path)
        raise CheckpointMismatch(
            f"{where}: {shown} is a {kind[1][:100]}: a storage of tensors cannot hold it. Save without it"
        )
    if "_storage_shape" in described:
        raise CheckpointMismatch(
            f"{where}: a checkpointer of torchrl flattened these rows, which is not read here; there, set "
            "storage.checkpointer = TensorStorageCheckpointer() and save again"
        )
    lost = [key for key in _DESCRIPTION if folder.kind(f"{key}.memmap")]
    if lost:
        raise CheckpointCorrupt(f"{where}: the descriptions of the entries {lost} were lost when they were written")
    batch = meta.wholes("shape")
    known = dict(zip(like.keys, like.children, strict=True)) if isinstance(like, Branch) else {}
    children: dict[str, Branch | Leaf] = {}
    for key in described:
        if key in _DESCRIPTION and not isinstance(described[key], dict):
            continue
        entry, below = meta.fields(key), (*path, key)
        if "type" in entry:
            inner = _branch(folder.folder(_name(folder, key, "")), ndim, known.get(key), below, files)
            shape = batch if inner is None else (*batch[:ndim], *inner.batch)
        elif "is_nested" in entry and entry.flag("is_nested"):
            raise CheckpointMismatch(f"{folder.where(key)}: a storage of tensors cannot hold nested tensors")
        else:
            file = folder.tensor(_name(folder, key, ".memmap"), entry.any("dtype"), entry.any("shape"))
            files[below], inner, shape = file, Leaf(), file.shape
        if shape[: len(batch)] != batch:
            raise CheckpointCorrupt(
                f"{where}: {key[:60]!r} has the shape {list(shape)}, not the batch dims {list(batch)}"
            )
        if inner is not None:
            children[key] = inner
    return Branch(TensorDict, tuple(children), tuple(children.values()), batch[ndim:])


def _name(folder: Folder, key: str, ending: str) -> str:
    """The name of an entry's file: later versions encode keys, early ones did not."""
    if key in (".", ".."):
        return "%2E" * len(key) + ending
    name, plain = "".join(f"%{ord(each):02X}" if each in _UNSAFE else each for each in key) or "%", key + ending
    early = name != plain.removesuffix(ending) and key and "/" not in key and not folder.kind(name + ending)
    return plain if early and folder.kind(plain) else name + ending


def _pytree(
    folder: Folder,
    fields: Fields,
    described: Mapping[str, Any],
    like: Layout | None,
    files: dict[tuple[Any, ...], TensorFile],
) -> Branch | Leaf:
    """The structure of other items, which is that of the target: it was not saved. So described names lead nowhere."""
    where = folder.where(_ROWS)
    if like is None and [*described] == [_SINGLE]:
        like = Layout(Leaf(), (LeafSpec((), (), torch.float32),))
    if like is None:
        raise CheckpointMismatch(
            f"{where}: what lists, tuples and dicts the tensors {[*described][:8]} were in was not saved: write one item "
            "into the storage first, its structure will be used"
        )
    names = {_SINGLE if not spec.path else "/".join(map(str, spec.path)): spec.path for spec in like.leaves}
    known = {name.replace("/", ".") for name in names}
    if known != described.keys():
        raise CheckpointMismatch(
            f"{where}: the tensors differ from those of the storage; missing: {sorted(known - described.keys())}, unknown: "
            f"{sorted(described.keys() - known)}"
        )
    for name, path in names.items():
        entry = fields.fields(name.replace("/", "."))
        *above, last = f"{name}.memmap".split("/")
        files[path] = functools.reduce(Folder.folder, above, folder).tensor(
            last, entry.any("dtype"), entry.any("shape")
        )
    return like.root
