"""Checkpointers: how the content of a storage is written to a checkpoint and read."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fbuf.checkpoint import CheckpointError, CheckpointMismatch, Fields, Source, Verify, Writing, load
from interop.checkpoint.state import Apply, LoadOptions, Together, together
from interop.checkpoint.tensor_states import refuse_frames, restoring_data, saved_ring
from interop.checkpoint.values import NO_PICKLE, decode, encode

if TYPE_CHECKING:
    from interop.storages import ListStorage, Storage, StorageEnsemble, TensorStorage


class StorageCheckpointerBase:
    """Saves and loads the content of storages. It is set by `storage.checkpointer = ...`, or given to a buffer.

    A checkpointer of your own defines `dumps(storage, path)`, which makes that folder and writes what files it likes in
    it, and `loads(storage, path)`. In `ReplayBuffer.dumps` these files are flushed, get checksums and are committed
    with the rest; `loads` is called last, on checked files, and must leave the storage unchanged if it raises.
    """

    SAVES = "any storage"  # what it saves, for messages
    changes_rows = True  # whether `loads` writes rows; where it does not, a buffer loads though its rows are read-only

    def __init__(self) -> None:
        self._save_hooks: list[Callable[..., Any]] = []
        self._load_hooks: list[Callable[..., Any]] = []

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Save the result of `hook(data, path=None)`. Hooks run in the order of registration, and are not saved.

        The data may be views of the stored rows: a hook changes no tensor in place. Attributes `shift` and `is_full` of a
        hook are set before: the row behind the newest one, and whether all rows were written.
        """
        self._save_hooks.append(_callable(hook))

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Store the result of `hook(data, out=None)` for loaded data. Hooks run in the order of registration."""
        self._load_hooks.append(_callable(hook))

    def dumps(self, storage: "Storage", path: str | os.PathLike[str]) -> None:
        """Save the content in a folder, which is made if it is missing: whole and flushed, or not at all."""
        with Writing(path) as out, storage.locked():
            out.write(self.saved(storage, out))

    def loads(
        self,
        storage: "Storage",
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Load what `dumps` saved, for the options see `ReplayBuffer.loads`. After an error nothing has changed."""
        with storage.locked():
            self._load_from(storage, path, verify, LoadOptions(strict, cast, allow_pickle))

    def _load_from(
        self, storage: "Storage", path: str | os.PathLike[str], verify: Verify, options: LoadOptions
    ) -> None:
        def use(source: Source) -> Apply:
            return self.restoring(storage, _of_storage(source.tree), source, options)

        self._apply(storage, load(path, use, verify))

    @staticmethod
    def _apply(storage: "Storage", apply: Apply) -> None:
        storage.replace(apply)

    @classmethod
    def refuse_other(cls, storage: "Storage") -> None:
        """ValueError, with the way out, for a storage whose content checkpointers of this kind do not save.

        These are the storages that have another kind of checkpointer by default.
        """
        default = type(storage).default_checkpointer
        if not (isinstance(default, type) and issubclass(default, cls)):
            raise ValueError(
                f"a {cls.__name__} saves {cls.SAVES}, got a {type(storage).__name__}: use its default checkpointer, "
                "storage.checkpointer = None"
            )

    # ------------------------------------------------------------------ as a part of a checkpoint

    def saved(self, storage: "Storage", out: Writing) -> dict[str, Any]:
        """A tree of the content, and of what is needed to read it. The storage is locked until it has been written."""
        return {"checkpointer": type(self).__name__, "content": self._save(storage, out)}

    def restoring(self, storage: "Storage", saved: Any, source: Source, options: LoadOptions) -> Apply:
        """Check a tree of `saved`; the returned function stores its content."""
        fields = Fields(saved, f"{source.path}, storage")
        name = fields.text("checkpointer")
        if name != type(self).__name__:
            raise CheckpointMismatch(
                f"{source.path}: the storage was saved by a {name} and is to be loaded by a {type(self).__name__}: set "
                f"storage.checkpointer = {name}()"
            )
        return self._load(storage, fields.any("content"), source, options)

    def _save(self, storage: "Storage", out: Writing) -> dict[str, Any]:
        """A tree of the content; here files of the user's."""
        if type(self).dumps is StorageCheckpointerBase.dumps:
            raise CheckpointError(f"a {type(storage).__name__} has no checkpointer: set storage.checkpointer")
        name = f"files-{len(out.folders)}"
        self.dumps(storage, out.folder(name))
        return {"folder": name}

    def _load(self, storage: "Storage", saved: Any, source: Source, options: LoadOptions) -> Apply:
        """Check a tree of `_save`; the returned function stores its content."""
        folder = source.folder(Fields(saved, str(source.path)).text("folder"))
        return partial(self.loads, storage, folder)

    def _through_save_hooks(self, storage: "Storage", data: Any) -> Any:
        """The result of the save hooks."""
        for hook in self._save_hooks:
            self._set_ring(hook, storage)
            data = hook(data, path=None)
        return data

    def _set_ring(self, hook: Any, storage: "Storage") -> None:
        if hasattr(hook, "is_full"):
            hook.is_full = storage.is_full
        if hasattr(hook, "shift"):
            ring = storage.ring
            if not ring.written and not ring.version and len(storage):
                warnings.warn(
                    "where the storage was written last is not known: its first row is taken to be the oldest",
                    UserWarning,
                    stacklevel=2,
                )
            hook.shift = ring.cursor

    def _through_load_hooks(self, fields: Fields, options: LoadOptions, device: Any = None) -> Any:
        """The data that the load hooks make of the saved one. CheckpointMismatch where only one side has hooks."""
        if "hooked" not in fields or not self._load_hooks:
            way = (
                "it went through save hooks: register load hooks that undo them"
                if "hooked" in fields
                else "it went through none: load it into a storage without load hooks"
            )
            raise CheckpointMismatch(
                f"{fields.where}: data that went through save hooks is loaded by load hooks, and by nothing else; {way}"
            )
        data = decode(fields.any("hooked"), options.allow_pickle, fields.where, device)
        for hook in self._load_hooks:
            data = hook(data, out=None)
        return data


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """The rows that are stored, as they are in memory. Parts that did not change since the last checkpoint are linked.

    With hooks it saves what the save hooks make of the stored tensordict, and stores what the load hooks make of that.
    """

    SAVES = "the rows of a storage of tensors"

    def _save(self, storage: "TensorStorage", out: Writing) -> dict[str, Any]:  # type: ignore[override]
        TensorStorageCheckpointer.refuse_other(storage)
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")
        if not self._save_hooks:
            return {"rows": storage.saved()}
        refuse_frames(storage)
        data = self._through_save_hooks(storage, storage[:])
        return {"hooked": encode(data, "the data of the save hooks", remedy=NO_PICKLE), "ring": saved_ring(storage)}

    def _load(self, storage: "TensorStorage", saved: Any, source: Source, options: LoadOptions) -> Apply:  # type: ignore[override]
        TensorStorageCheckpointer.refuse_other(storage)
        fields = Fields(saved, f"{source.path}, storage")
        if not self._load_hooks and "hooked" not in fields:
            return storage.restoring(fields.any("rows"), options)
        return restoring_data(storage, self._through_load_hooks(fields, options), fields.any("ring"), options)


class ListStorageCheckpointer(StorageCheckpointerBase):
    """Items of the kinds that can be saved without running code: tensors, tensordicts, plain values and what holds them.

    Items that are alike are written as one array a tensor. An object that is there twice is loaded as two; tensors come back
    on the device of the storage, or where they were. Save hooks get the list of all items; load hooks
    get what they made of it, and give a list.

    Args:
        allow_pickle: pickle objects of other kinds, and read pickles. Reading a pickle runs the code that it names: for
            files of your own. A load needs it too, here or in `loads(..., allow_pickle=True)`.
    """

    SAVES = "the items of a list storage"
    REMEDY = (
        "save tensors and plain values instead, or have it pickled: storage.checkpointer = "
        "ListStorageCheckpointer(allow_pickle=True), where it is saved and where it is loaded"
    )

    def __init__(self, allow_pickle: bool = False) -> None:
        super().__init__()
        self.allow_pickle = bool(allow_pickle)

    def _save(self, storage: "ListStorage", out: Writing) -> dict[str, Any]:  # type: ignore[override]
        ListStorageCheckpointer.refuse_other(storage)
        saved = storage.saved_items(self.allow_pickle)
        if not self._save_hooks:
            return saved
        items = self._through_save_hooks(storage, list(storage))
        return {
            **saved,
            "items": None,
            "hooked": encode(items, "the data of the save hooks", self.allow_pickle, self.REMEDY),
        }

    def _load(self, storage: "ListStorage", saved: Any, source: Source, options: LoadOptions) -> Apply:  # type: ignore[override]
        ListStorageCheckpointer.refuse_other(storage)
        options = dataclasses.replace(options, allow_pickle=options.allow_pickle or self.allow_pickle)
        fields = Fields(saved, f"{source.path}, storage")
        if not self._load_hooks and "hooked" not in fields:
            return storage.restoring_items(saved, options)
        return storage.restoring_items(saved, options, self._through_load_hooks(fields, options, storage.device))


class CompressedListStorageCheckpointer(ListStorageCheckpointer):
    """The same for a `CompressedListStorage`: compressed tensors are written as they are."""


class StorageEnsembleCheckpointer(StorageCheckpointerBase):
    """Each member of a `StorageEnsemble` by its own checkpointer, and the state of the transforms of the members."""

    SAVES = "the members of a StorageEnsemble"

    def _save(self, storage: "StorageEnsemble", out: Writing) -> dict[str, Any]:  # type: ignore[override]
        StorageEnsembleCheckpointer.refuse_other(storage)
        members = [member.checkpointer.saved(member, out) for member in storage.members]
        chains = [None if each is None else each.saved() for each in storage.transforms or ()]
        return {"members": members, "transforms": chains}

    def _load(self, storage: "StorageEnsemble", saved: Any, source: Source, options: LoadOptions) -> Together:  # type: ignore[override]
        StorageEnsembleCheckpointer.refuse_other(storage)
        where = f"{source.path}, storage"
        fields = Fields(saved, where)
        members, chains = fields.items("members"), fields.items("transforms")
        if len(members) != len(storage.members) or len(chains) != len(storage.transforms or ()):
            raise CheckpointMismatch(f"{where}: {len(members)} storages were saved, {len(storage.members)} are here")
        pairs = zip(storage.members, members, strict=True)
        checks: list[Callable[[], Apply]] = [
            partial(member.checkpointer.restoring, member, each, source, options) for member, each in pairs
        ]
        for chain, each in zip(storage.transforms or (), chains, strict=True):
            if chain is not None:
                checks.append(partial(chain.restoring, each, options))
        return together(checks)


def _callable(hook: Any) -> Callable[..., Any]:
    if not callable(hook):
        raise TypeError(f"a hook must be callable, got {type(hook).__name__}")
    return hook


def _of_storage(tree: Any) -> Any:
    """The tree of a storage, which is a part of the tree of a buffer."""
    within = isinstance(tree, Mapping) and "checkpointer" not in tree and "storage" in tree
    return tree["storage"] if within else tree
