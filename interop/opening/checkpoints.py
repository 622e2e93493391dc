"""The buffer that a checkpoint is: built of the classes and arguments in its manifest, over rows that stay in its files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from fbuf.checkpoint import CheckpointMismatch, Fields, Reading, StoredArray, StoredColumns, load
from interop.buffers import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.buffers.checkpoints import fields_of
from interop.buffers.recipes import built, called
from interop.buffers.sampled import Sampled
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.checkpoint.state import LoadOptions
from interop.data.packed import PackedParts
from interop.engine.saved_files import SavedFiles, SavedRows
from interop.engine.saved_rows import SavedRing, parsed
from interop.formats import FlatStorageCheckpointer, H5StorageCheckpointer, NestedStorageCheckpointer
from interop.formats.h5 import shape_of
from interop.samplers import Sampler
from interop.shared.journal import ReadOnly
from interop.storages import LazyTensorStorage, ListStorage, Storage, TensorStorage
from interop.storages.checkpointers import (
    CompressedListStorageCheckpointer,
    ListStorageCheckpointer,
    TensorStorageCheckpointer,
)
from interop.transforms import Compose
from interop.writers import Writer

Mode = Literal["r", "r+"]
Components = Mapping[str, object]
_COMPONENTS = ("storage", "sampler", "writer", "transform", "collate_fn", "buffer", "members")
_PRIORITIZED = {"alpha": 0.6, "beta": 0.4}  # of a sampler that is exchanged at once
_BUFFERS: dict[str, Callable[..., ReplayBuffer]] = {
    "ReplayBuffer": ReplayBuffer,
    "TensorDictReplayBuffer": TensorDictReplayBuffer,
    "PrioritizedReplayBuffer": PrioritizedReplayBuffer,
    "TensorDictPrioritizedReplayBuffer": TensorDictPrioritizedReplayBuffer,
}

_CHECKPOINTERS: dict[str, Callable[[], StorageCheckpointerBase]] = {
    each.__name__: each
    for each in (
        TensorStorageCheckpointer,
        FlatStorageCheckpointer,
        NestedStorageCheckpointer,
        H5StorageCheckpointer,
        ListStorageCheckpointer,
        CompressedListStorageCheckpointer,
    )
}


def opened_checkpoint(path: Path, mode: Mode, components: Components, allow_pickle: bool) -> Sampled:
    """The buffer of a checkpoint. See `open`."""

    def use(source: Reading) -> Sampled:
        return _buffer(source, source.tree, str(source.path), mode, components, allow_pickle)

    # The rows are not read, so their checksums are not compared: `verify` does that. With "r+" they are read, and checked.
    return load(path, use, "size" if mode == "r" else "full")


def check_components(components: Components) -> None:
    """ValueError for a component that there is none of."""
    for name in components:
        if name not in _COMPONENTS:
            raise ValueError(f"components has {name!r}: known are {', '.join(_COMPONENTS)}")


def _buffer(
    source: Reading, saved: object, where: str, mode: Mode, components: Components, allow_pickle: bool
) -> Sampled:
    check_components(components)
    tree: dict[str, Any] = dict(saved) if isinstance(saved, Mapping) else {}
    if "kind" not in tree and "checkpointer" in tree:
        return _storage_by_itself(source, tree, where, mode, components, allow_pickle)
    _refuse_other(tree, where)
    fields = fields_of(saved, where)
    if "members" in fields:
        return _ensemble(source, tree, fields, mode, components, allow_pickle)
    transform = _transform(fields, components)
    if "transform" in components and components["transform"] is None:
        tree["transforms"] = Compose().state()
    storage, rows_are_there = _storage(fields, mode, components.get("storage"), source)
    sampler = built(Sampler, fields.fields("sampler"), components.get("sampler"))
    writer: Writer = built(Writer, fields.fields("writer"), components.get("writer"))  # type: ignore[type-abstract]
    buffer = _assembled(fields, components, sampler, storage=storage, writer=writer, transform=transform)
    options = LoadOptions(allow_pickle=allow_pickle, source=source, where=where)
    if rows_are_there:
        _adopt(storage, fields)
        options = LoadOptions(
            allow_pickle=allow_pickle, source=source, where=where, beside=(SimpleNamespace(storage=storage),)
        )
    buffer.with_state(tree, options)()
    if mode == "r":
        storage.guard.journal = ReadOnly(str(source.path))
    return buffer


def _refuse_other(tree: Mapping[str, Any], where: str) -> None:
    """CheckpointMismatch, which says what to call, for a checkpoint of something else than a buffer or a storage."""
    if tree.get("kind") == "pytree":
        raise CheckpointMismatch(
            f"{where}: it was saved by fbuf.save_state, and has arrays without the buffer that they belong to: call "
            f"fbuf.load_state({where!r}, like)"
        )
    if "kind" not in tree and "class" in tree:
        raise CheckpointMismatch(
            f"{where}: it is the state of a {tree['class']}, not of a buffer: build one, and call its loads({where!r})"
        )


def _storage_by_itself(
    source: Reading, saved: Mapping[str, Any], where: str, mode: Mode, components: Components, allow_pickle: bool
) -> ReplayBuffer:
    """A buffer over a storage that was saved without one, with the components that were given."""
    fields = Fields({"storage": saved}, where)
    storage, rows_are_there = _storage(fields, mode, components.get("storage"), source)
    if rows_are_there:
        _adopt(storage, fields)
    else:
        storage.checkpointer.read(storage, saved, source, LoadOptions(allow_pickle=allow_pickle))()
    buffer = over(storage, {**components, "storage": None})
    if mode == "r":
        storage.guard.journal = ReadOnly(str(source.path))
    return buffer


def over(storage: Storage, components: Components, batch_size: int | None = None) -> ReplayBuffer:
    """A buffer over a storage with rows, with the components that were given. TypeError for a buffer of another kind."""
    layout = storage.contents.layout
    is_plain = layout is not None and not layout.is_tensordict
    make = components.get("buffer") or (ReplayBuffer if is_plain else TensorDictReplayBuffer)
    names = ("sampler", "writer", "transform", "collate_fn")
    parts = {name: components[name] for name in names if components.get(name) is not None}
    buffer = make(storage=storage, batch_size=batch_size, **parts)  # type: ignore[operator]  # a class, or function
    if not isinstance(buffer, ReplayBuffer):
        raise TypeError(f"components['buffer'] must make a ReplayBuffer, got {type(buffer).__name__}")
    return buffer


def _ensemble(
    source: Reading, tree: dict[str, Any], fields: Fields, mode: Mode, components: Components, allow_pickle: bool
) -> ReplayBufferEnsemble:
    saved = fields.items("members")
    given = components.get("members", [{}] * len(saved))
    if not isinstance(given, list | tuple) or len(given) != len(saved):
        raise CheckpointMismatch(
            f"{fields.where}: it has {len(saved)} members: pass components={{'members': [...]}} with one dict for each"
        )
    members = [
        _buffer(source, each, f"{fields.where}, member {place}", mode, own or {}, allow_pickle)
        for place, (each, own) in enumerate(zip(saved, given, strict=True))
    ]
    choice = Fields(fields.fields("sampler").any("state"), fields.where).fields("choice")
    arguments = {name: choice.any(name) for name in ("p", "sample_from_all", "num_buffer_sampled")}
    arguments["batch_size"] = fields.any("batch_size")
    transform = _transform(fields, components)
    if components.get("transform", transform) is None:
        tree["transforms"] = Compose().state()

    def make(**own: object) -> ReplayBufferEnsemble:
        return ReplayBufferEnsemble(*members, transform=transform, collate_fn=components.get("collate_fn"), **own)  # type: ignore[arg-type]

    ensemble: ReplayBufferEnsemble = called(make, arguments, fields.where)
    there = tuple(SimpleNamespace(storage=member.storage) for member in ensemble.members)
    ensemble.with_state(tree, LoadOptions(allow_pickle=allow_pickle, source=source, where=fields.where, beside=there))()
    return ensemble


def _transform(fields: Fields, components: Components) -> object:
    """The transform that was passed; None for a buffer without. CheckpointMismatch where one is needed."""
    if "transform" in components:
        return components["transform"]
    names = fields.items("transform_classes") if "transform_classes" in fields else []
    if names:
        raise CheckpointMismatch(
            f"{fields.where}: the buffer has the transforms {', '.join(map(str, names))}, whose arguments a checkpoint does "
            "not have. Pass them, built as they were: interop.open(path, components={'transform': Compose(...)}), or "
            "{'transform': None} for the rows as they are stored"
        )
    return None


def _assembled(fields: Fields, components: Components, sampler: Sampler, **parts: object) -> ReplayBuffer:
    """A buffer of its class, without state."""
    arguments = dict(fields.any("arguments")) if "arguments" in fields and "buffer" not in components else {}
    arguments["batch_size"] = fields.any("batch_size")
    if components.get("collate_fn") is not None:
        arguments["collate_fn"] = components["collate_fn"]
    name, given = fields.text("class"), components.get("buffer")
    if given is not None and not callable(given):
        raise TypeError(
            "components['buffer'] must be a class of buffers, or a function that makes one of its components"
        )
    kind = given or _BUFFERS.get(name)
    if kind is None:
        raise CheckpointMismatch(
            f"{fields.where}: it was saved from a {name}, which is built with more than a checkpoint has. Pass how: "
            "interop.open(path, components={'buffer': function}), which is called with storage, sampler, writer, transform "
            "and batch_size; or {'buffer': interop.TensorDictReplayBuffer} for its rows"
        )
    if given is None and name in ("PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer"):
        arguments |= _PRIORITIZED
    makes_its_own = given is None and name == "TensorDictPrioritizedReplayBuffer"
    if not makes_its_own:
        parts["sampler"] = sampler
    buffer = called(lambda **own: kind(**parts, **own), arguments, fields.where)
    if not isinstance(buffer, ReplayBuffer):
        raise TypeError(f"components['buffer'] must make a ReplayBuffer, got {type(buffer).__name__}")
    if makes_its_own:
        buffer.set_sampler(sampler)
    return buffer


# ------------------------------------------------------------------ storages


def _storage(fields: Fields, mode: Mode, given: object, source: Reading) -> tuple[Storage, bool]:
    """The storage, and whether its rows are mapped in the files of the checkpoint."""
    saved = fields.fields("storage")
    content, name = saved.fields("content"), saved.text("checkpointer")
    if given is not None:
        return built(Storage, _named(saved), given), False
    if name not in _CHECKPOINTERS:
        raise CheckpointMismatch(
            f"{saved.where}: a {name} has written the items: pass the storage, built as it was, with its checkpointer: "
            "interop.open(path, components={'storage': storage})"
        )
    rows = content.any("rows") if "rows" in content else None
    if isinstance(rows, Mapping) and "scheme" not in rows:
        ring = SavedRing.parsed(content.fields("rows").fields("ring")) if "ring" in rows else None
        max_size, ndim = (1, 1) if ring is None else (ring.items, ring.ndim)
        own = saved.any("arguments") if "arguments" in saved else {}
        own = own if isinstance(own, Mapping) else {}
        max_size = own.get("max_size", max_size)
        if mode == "r" and ring is not None and rows.get("layout") is not None:
            return TensorStorage.over(SavedFiles(str(source.path), ring.filled), max_size, ndim=ndim), True
        any_length = {name: own[name] for name in ("ragged", "shared_prefixes") if name in own}
        return called(LazyTensorStorage, {"max_size": max_size, "ndim": ndim, **any_length}, saved.where), False
    if "arguments" in saved:
        storage = built(Storage, _named(saved))
    elif "capacity" in content and content.any("storage") == "list":
        capacity = content.whole("capacity", 1)
        storage = ListStorage(None if capacity == ListStorage().max_size else capacity)
    elif "ring" in content or "file" in content:  # of TED data
        if "ring" in content:
            ring = SavedRing.parsed(content.fields("ring"))
            max_size, ndim = ring.items, ring.ndim
        else:
            max_size, ndim = shape_of(source.file(content.text("file")))
        storage = LazyTensorStorage(max_size, ndim=ndim)
    else:
        storage = built(Storage, _named(saved))
    if type(storage.checkpointer).__name__ != name:
        storage.checkpointer = _CHECKPOINTERS[name]()
    return storage, False


def _named(saved: Fields) -> Fields:
    """The fields of a storage; its class may be told by the checkpointer alone."""
    if "hooked" in saved.fields("content"):
        raise CheckpointMismatch(
            f"{saved.where}: the rows went through save hooks: build the buffer with the load hooks that undo them, and "
            "call its loads()"
        )
    return saved


def _adopt(storage: Storage, fields: Fields) -> None:
    """Map the rows of a checkpoint into a storage."""
    assert isinstance(storage, TensorStorage)
    where = f"{fields.where}, storage"
    saved = parsed(fields.fields("storage").fields("content").any("rows"), where)
    assert saved is not None  # a storage that was never written is not mapped
    layout, ring, columns, values = saved
    assert isinstance(columns, StoredColumns)
    with storage.lock.held():
        if layout.varied and values is not None:
            text: object = values
            parts = text.maps() if isinstance(text, StoredArray) else [values]
            layout = layout.keeping(PackedParts(parts))
        storage.table.layout = layout
        storage.table.adopt(layout, SavedRows(layout, ring, columns))
        ring.restore(storage.ring)
