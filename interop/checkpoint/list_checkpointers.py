"""How list storages are written in a checkpoint, and read."""

import dataclasses
from typing import TYPE_CHECKING, Any

from fbuf.checkpoint import Fields, Source, Writing
from interop.checkpoint.checkpointers import StorageCheckpointerBase
from interop.checkpoint.state import Apply, LoadOptions
from interop.checkpoint.values import encode

if TYPE_CHECKING:
    from interop.storages import ListStorage


class ListStorageCheckpointer(StorageCheckpointerBase):
    """Items of the kinds that can be saved without running code: tensors, tensordicts, plain values and what holds them.

    Items that are alike are written as one array a tensor. An object that is there twice is loaded as two; tensors come back
    on the device of the storage, or where they were. Save hooks get the list of all items; load hooks
    get what they made of it, and give a list.

    Args:
        allow_pickle: have objects of other kinds pickled, and read them again. Reading a pickle runs whatever code it
            names: for files of your own. Who loads allows it too, here or in `loads(..., allow_pickle=True)`.
    """

    def __init__(self, allow_pickle: bool = False) -> None:
        super().__init__()
        self.allow_pickle = bool(allow_pickle)

    def _save(self, storage: "ListStorage", out: Writing) -> dict[str, Any]:  # type: ignore[override]
        saved = storage.saved_items(self.allow_pickle)
        if not self._save_hooks:
            return saved
        items = self._through_save_hooks(storage, list(storage))
        return {**saved, "items": None, "hooked": encode(items, "the data of the save hooks", self.allow_pickle)}

    def _load(self, storage: "ListStorage", saved: Any, source: Source, options: LoadOptions) -> Apply:  # type: ignore[override]
        options = dataclasses.replace(options, allow_pickle=options.allow_pickle or self.allow_pickle)
        fields = Fields(saved, f"{source.path}, storage")
        if not self._load_hooks and "hooked" not in fields:
            return storage.restoring_items(saved, options)
        return storage.restoring_items(saved, options, self._through_load_hooks(fields, options, storage.device))


class CompressedListStorageCheckpointer(ListStorageCheckpointer):
    """The same for a `CompressedListStorage`: what is compressed is written as it is."""
