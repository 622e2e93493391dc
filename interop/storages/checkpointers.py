"""Checkpointers: how the content of each kind of storage is written to a checkpoint and read."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from fbuf.checkpoint import CheckpointMismatch, Fields, Reading, Writing
from interop.checkpoint.checkpointer import Content, StorageCheckpointerBase
from interop.checkpoint.state import Apply, LoadOptions, Together, together
from interop.checkpoint.values import NO_PICKLE, encode
from interop.engine.saved_rows import refuse_frames, saved_ring, with_data
from interop.engine.table import Table
from interop.shared.storage_lock import Held, each_held


class HasTable(Content, Protocol):
    """A storage of tensors."""

    table: Table

    @property
    def initialized(self) -> bool: ...

    def __getitem__(self, index: slice, /) -> object: ...

    def state(self) -> dict[str, Any]: ...

    def with_state(self, tree: object, options: LoadOptions) -> Apply: ...


@dataclasses.dataclass(frozen=True)
class Unsaved:
    """The items in the tree of a list that load hooks have made, in the place of saved ones."""

    items: object


class HasItems(Content, Protocol):
    """A storage of a list of items."""

    device: torch.device | None

    def __iter__(self) -> Iterator[object]: ...

    def state(self, allow_pickle: bool = False) -> dict[str, Any]: ...

    def with_state(self, tree: object, options: LoadOptions) -> Apply: ...


class HasMembers(Content, Protocol):
    """An ensemble of storages."""

    members: Sequence[Any]
    transforms: Sequence[Any] | None


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """The rows that are stored, as they are in memory. Parts that did not change since the last checkpoint are linked.

    With hooks it saves what the save hooks make of the stored tensordict, and stores what the load hooks make of that.
    """

    SAVES = "the rows of a storage of tensors"

    def _save(self, storage: HasTable, out: Writing) -> dict[str, Any]:  # type: ignore[override]
        TensorStorageCheckpointer.refuse_other(storage)
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")
        if not self._save_hooks:
            return {"rows": type(storage).state(storage)}
        refuse_frames(storage.table)
        data = self._through_save_hooks(storage, storage[:])
        return {
            "hooked": encode(data, "the data of the save hooks", remedy=NO_PICKLE),
            "ring": saved_ring(storage.table),
        }

    def _load(self, storage: HasTable, saved: Any, source: Reading, options: LoadOptions) -> Apply:  # type: ignore[override]
        TensorStorageCheckpointer.refuse_other(storage)
        fields = Fields(saved, f"{source.path}, storage")
        if not self._load_hooks and "hooked" not in fields:
            return type(storage).with_state(storage, fields.any("rows"), options)
        return with_data(storage.table, self._through_load_hooks(fields, options), fields.any("ring"), options)


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

    def _save(self, storage: HasItems, out: Writing) -> dict[str, Any]:  # type: ignore[override]
        ListStorageCheckpointer.refuse_other(storage)
        saved = storage.state(allow_pickle=True) if self.allow_pickle else storage.state()
        if not self._save_hooks:
            return saved
        items = self._through_save_hooks(storage, list(storage))
        return {
            **saved,
            "items": None,
            "hooked": encode(items, "the data of the save hooks", self.allow_pickle, self.REMEDY),
        }

    def _load(self, storage: HasItems, saved: Any, source: Reading, options: LoadOptions) -> Apply:  # type: ignore[override]
        ListStorageCheckpointer.refuse_other(storage)
        options = dataclasses.replace(options, allow_pickle=options.allow_pickle or self.allow_pickle)
        fields = Fields(saved, f"{source.path}, storage")
        if not self._load_hooks and "hooked" not in fields:
            return storage.with_state(saved, options)
        items = Unsaved(self._through_load_hooks(fields, options, storage.device))
        return storage.with_state({**saved, "items": items}, options)


class CompressedListStorageCheckpointer(ListStorageCheckpointer):
    """The same for a `CompressedListStorage`: compressed tensors are written as they are."""


class StorageEnsembleCheckpointer(StorageCheckpointerBase):
    """Each member of a `StorageEnsemble` by its own checkpointer, and the state of the transforms of the members."""

    SAVES = "the members of a StorageEnsemble"

    def _held(self, storage: HasMembers) -> Held:  # type: ignore[override]
        return each_held(sorted({member.lock for member in storage.members}, key=id))  # in one order in all threads

    def _save(self, storage: HasMembers, out: Writing) -> dict[str, Any]:  # type: ignore[override]
        StorageEnsembleCheckpointer.refuse_other(storage)
        members = [member.checkpointer.write(member, out) for member in storage.members]
        chains = [None if each is None else each.state() for each in storage.transforms or ()]
        return {"members": members, "transforms": chains}

    def _load(self, storage: HasMembers, saved: Any, source: Reading, options: LoadOptions) -> Together:  # type: ignore[override]
        StorageEnsembleCheckpointer.refuse_other(storage)
        where = f"{source.path}, storage"
        fields = Fields(saved, where)
        members = fields.items("members")
        chains = fields.items("transforms")
        if len(members) != len(storage.members) or len(chains) != len(storage.transforms or ()):
            raise CheckpointMismatch(f"{where}: {len(members)} storages were saved, {len(storage.members)} are here")
        pairs = zip(storage.members, members, strict=True)
        checks: list[Callable[[], Apply]] = [
            partial(member.checkpointer.read, member, each, source, options) for member, each in pairs
        ]
        for chain, each in zip(storage.transforms or (), chains, strict=True):
            if chain is not None:
                checks.append(partial(chain.with_state, each, options))
        return together(checks)
