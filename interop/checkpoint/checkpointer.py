"""The base class of checkpointers, which write the content of a storage to a checkpoint and read it."""

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from fbuf.checkpoint import CheckpointError, CheckpointMismatch, Fields, Reading, Verify, Writing, load
from interop.checkpoint.other_folders import refuse_other_folder
from interop.checkpoint.state import Apply, LoadOptions
from interop.checkpoint.values import decode
from interop.host.ring import Ring
from interop.shared.storage_lock import StorageLock


class Transacts(Protocol):
    """The guard of a storage."""

    def replace(self, change: Callable[[], None]) -> None:
        """Make a checked change in a transaction."""


class Content(Protocol):
    """What has content to save: a storage."""

    ring: Ring

    @property
    def default_checkpointer(self) -> Callable[[], object]: ...

    @property
    def is_full(self) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def lock(self) -> StorageLock: ...

    @property
    def guard(self) -> Transacts: ...


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

    def dumps(self, storage: Content, path: str | os.PathLike[str]) -> None:
        """Save the content in a folder, which is made if it is missing: whole and flushed, or not at all."""
        with Writing(path) as out, self._held(storage):
            out.write(self.write(storage, out))

    def loads(
        self,
        storage: Content,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Load what `dumps` saved, for the options see `ReplayBuffer.loads`. After an error nothing has changed."""
        with self._held(storage):
            self._load_from(storage, path, verify, LoadOptions(strict, cast, allow_pickle))

    def _held(self, storage: Content) -> contextlib.AbstractContextManager[object]:
        """Hold the lock of what is saved or loaded."""
        return storage.lock.held()

    def _load_from(self, storage: Content, path: str | os.PathLike[str], verify: Verify, options: LoadOptions) -> None:
        def use(source: Reading) -> Apply:
            return self.read(storage, _of_storage(source.tree), source, options)

        refuse_other_folder(path)
        self._apply(storage, load(path, use, verify))

    @staticmethod
    def _apply(storage: Content, apply: Apply) -> None:
        storage.guard.replace(apply)

    @classmethod
    def refuse_other(cls, storage: Content) -> None:
        """ValueError, with the way out, for a storage whose content checkpointers of this kind do not save.

        These are the storages that have another kind of checkpointer by default.
        """
        default: object = type(storage).default_checkpointer
        if not (isinstance(default, type) and issubclass(default, cls)):
            raise ValueError(
                f"a {cls.__name__} saves {cls.SAVES}, got a {type(storage).__name__}: use its default checkpointer, "
                "storage.checkpointer = None"
            )

    # ------------------------------------------------------------------ as a part of a checkpoint

    def write(self, storage: Content, out: Writing) -> dict[str, Any]:
        """A tree of the content, and of what is needed to read it. The storage is locked until it has been written."""
        return {"checkpointer": type(self).__name__, "content": self._save(storage, out)}

    def read(self, storage: Content, saved: Any, source: Reading, options: LoadOptions) -> Apply:
        """Check a tree of `write`; the returned function stores its content."""
        fields = Fields(saved, f"{source.path}, storage")
        name = fields.text("checkpointer")
        if name != type(self).__name__:
            raise CheckpointMismatch(
                f"{source.path}: the storage was saved by a {name} and is to be loaded by a {type(self).__name__}: set "
                f"storage.checkpointer = {name}()"
            )
        return self._load(storage, fields.any("content"), source, options)

    def _save(self, storage: Content, out: Writing) -> dict[str, Any]:
        """A tree of the content; here files of the user's."""
        if type(self).dumps is StorageCheckpointerBase.dumps:
            raise CheckpointError(f"a {type(storage).__name__} has no checkpointer: set storage.checkpointer")
        name = f"files-{len(out.folders)}"
        self.dumps(storage, out.folder(name))
        return {"folder": name}

    def _load(self, storage: Content, saved: Any, source: Reading, options: LoadOptions) -> Apply:
        """Check a tree of `_save`; the returned function stores its content."""
        folder = source.folder(Fields(saved, str(source.path)).text("folder"))
        return partial(self.loads, storage, folder)

    def _through_save_hooks(self, storage: Content, data: Any) -> Any:
        """The result of the save hooks."""
        for hook in self._save_hooks:
            self._set_ring(hook, storage)
            data = hook(data, path=None)
        return data

    def _set_ring(self, hook: Any, storage: Content) -> None:
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


def _callable(hook: Any) -> Callable[..., Any]:
    if not callable(hook):
        raise TypeError(f"a hook must be callable, got {type(hook).__name__}")
    return hook


def _of_storage(tree: Any) -> Any:
    """The tree of a storage, which is a part of the tree of a buffer."""
    within = isinstance(tree, Mapping) and "checkpointer" not in tree and "storage" in tree
    return tree["storage"] if within else tree
