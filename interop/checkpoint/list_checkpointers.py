"""How list storages are written in a checkpoint, and read."""

import dataclasses
from collections.abc import Callable
from typing import Any

from fbuf.checkpoint import CheckpointMismatch, Fields, Source, Writing
from interop.checkpoint.checkpointers import StorageCheckpointerBase
from interop.checkpoint.rule import Rule
from interop.checkpoint.values import decode, encode


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

    def _save(self, storage: Any, out: Writing) -> dict[str, Any]:
        saved = storage.saved_items(self.allow_pickle)
        if not self._save_hooks:
            return saved
        self._tell_hooks(storage)
        items: Any = list(storage)
        for hook in self._save_hooks:
            items = hook(items, path=None)
        return {**saved, "items": None, "hooked": encode(items, "the data of the save hooks", self.allow_pickle)}

    def _load(self, storage: Any, saved: Any, source: Source, rule: Rule) -> Callable[[], None]:
        rule = dataclasses.replace(rule, allow_pickle=rule.allow_pickle or self.allow_pickle)
        fields = Fields(saved, f"{source.path}, storage")
        if not self._load_hooks and "hooked" not in fields:
            return storage.restoring_items(saved, rule)
        if not self._load_hooks or "hooked" not in fields:
            raise CheckpointMismatch(
                f"{source.path}: items that went through save hooks are loaded by load hooks, and by nothing else"
            )
        items = decode(fields.any("hooked"), rule, f"{source.path}, storage", storage.device)
        for hook in self._load_hooks:
            items = hook(items, out=None)
        return storage.restoring_items(saved, rule, items)


class CompressedListStorageCheckpointer(ListStorageCheckpointer):
    """The same for a `CompressedListStorage`: what is compressed is written as it is."""
