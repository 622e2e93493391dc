"""How the content of a storage is written in a checkpoint, and read."""

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from fbuf.checkpoint import CheckpointError, CheckpointMismatch, Fields, Source, Verify, Writing, load
from interop.checkpoint.rule import Rule
from interop.checkpoint.tensor_states import refuse_frames, restoring_data, saved_ring
from interop.checkpoint.values import decode, encode
from interop.shared.interrupts import uninterrupted


class StorageCheckpointerBase:
    """Saves and loads the content of storages. It is set by `storage.checkpointer = ...`, or given to a buffer.

    A checkpointer of your own defines `dumps(storage, path)`, which makes that folder and writes what files it likes in
    it, and `loads(storage, path)`. In `ReplayBuffer.dumps` these files are flushed, summed up and put in place with the
    rest; `loads` is called last, on files that were checked, and has to leave the storage as it was where it raises.
    """

    changes_rows = True  # whether `loads` writes rows; where it does not, a buffer loads though its rows are read-only

    def __init__(self) -> None:
        self._save_hooks: list[Callable[..., Any]] = []
        self._load_hooks: list[Callable[..., Any]] = []

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have `hook(data, path=None)` make what is saved of the data, after those before it.

        The data may be views of what is stored: a hook makes others and changes no tensor in place.

        One with the attributes `shift` and `is_full` is told where the ring begins: the row behind the last one that was
        written, and whether all rows are. Hooks are not saved.
        """
        self._save_hooks.append(_callable(hook))

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have `hook(data, out=None)` change what was loaded, after those before it."""
        self._load_hooks.append(_callable(hook))

    def dumps(self, storage: Any, path: str | os.PathLike[str]) -> None:
        """Save the content in a folder, which is made if it is missing: whole and flushed, or not at all."""
        with Writing(path) as out, self._still(storage):
            out.write(self._described(storage, out))

    def loads(
        self,
        storage: Any,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Load what `dumps` saved, for the options see `ReplayBuffer.loads`. After an error nothing has changed."""
        with self._still(storage):
            self._load_from(storage, path, verify, Rule(strict, cast, allow_pickle))

    @staticmethod
    def _still(storage: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which nobody changes the storage."""
        still: contextlib.AbstractContextManager[Any] = storage._still()
        return still

    def _load_from(self, storage: Any, path: str | os.PathLike[str], verify: Verify, rule: Rule) -> None:
        def use(source: Source) -> Callable[[], None]:
            return self._restoring(storage, _of_storage(source.tree), source, rule)

        self._put_in(storage, load(path, use, verify))

    @staticmethod
    def _put_in(storage: Any, put: Callable[[], None]) -> None:
        with uninterrupted(), storage.transaction():
            put()

    # ------------------------------------------------------------------ as a part of a checkpoint

    def _described(self, storage: Any, out: Writing) -> dict[str, Any]:
        """A saved tree of the content, and what is needed to read it."""
        return {"checkpointer": type(self).__name__, "content": self._save(storage, out)}

    def _restoring(self, storage: Any, saved: Any, source: Source, rule: Rule) -> Callable[[], None]:
        """Check a tree of `_described` against a storage; what is returned puts it in."""
        fields = Fields(saved, f"{source.path}, storage")
        name = fields.text("checkpointer")
        if name != type(self).__name__:
            raise CheckpointMismatch(
                f"{source.path}: the storage was saved by a {name} and is to be loaded by a {type(self).__name__}: set "
                f"storage.checkpointer = {name}()"
            )
        return self._load(storage, fields.any("content"), source, rule)

    def _save(self, storage: Any, out: Writing) -> dict[str, Any]:
        """A saved tree of the content. The storage is still until it has been written."""
        if type(self).dumps is StorageCheckpointerBase.dumps:
            raise CheckpointError(f"a {type(storage).__name__} has no checkpointer: set storage.checkpointer")
        name = f"files-{len(out.folders)}"
        self.dumps(storage, out.folder(name))
        return {"folder": name}

    def _load(self, storage: Any, saved: Any, source: Source, rule: Rule) -> Callable[[], None]:
        """Check all of a saved tree against a storage; what is returned puts it in, and does not fail."""
        folder = source.folder(Fields(saved, str(source.path)).text("folder"))
        return lambda: self.loads(storage, folder)

    def _tell_hooks(self, storage: Any) -> None:
        """Tell the save hooks that want to know where the ring begins."""
        for hook in self._save_hooks:
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


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """The rows that are stored, as they are in memory. Parts that did not change since the last checkpoint are linked.

    With hooks it saves what the save hooks make of the stored tensordict, and stores what the load hooks make of that.
    """

    def _save(self, storage: Any, out: Writing) -> dict[str, Any]:
        if not storage.initialized:
            raise RuntimeError("Cannot save a non-initialized storage.")
        if not self._save_hooks:
            return {"rows": storage._saved()}
        refuse_frames(storage)
        self._tell_hooks(storage)
        data = storage[:]
        for hook in self._save_hooks:
            data = hook(data, path=None)
        return {"hooked": encode(data, "the data of the save hooks"), "ring": saved_ring(storage)}

    def _load(self, storage: Any, saved: Any, source: Source, rule: Rule) -> Callable[[], None]:
        fields = Fields(saved, f"{source.path}, storage")
        if self._load_hooks or "hooked" in fields:
            if "hooked" not in fields or not self._load_hooks:
                raise CheckpointMismatch(
                    f"{source.path}: data that went through save hooks is loaded by load hooks, and by nothing else"
                )
            data = decode(fields.any("hooked"), rule, f"{source.path}, storage")
            for hook in self._load_hooks:
                data = hook(data, out=None)
            return restoring_data(storage, data, fields.any("ring"), rule)
        return storage._restoring(fields.any("rows"), rule)


class StorageEnsembleCheckpointer(StorageCheckpointerBase):
    """Each member of a `StorageEnsemble` by its own checkpointer, and the state of the transforms of the members."""

    def _save(self, storage: Any, out: Writing) -> dict[str, Any]:
        members = [member.checkpointer._described(member, out) for member in storage._storages]
        chains = [None if each is None else each._saved() for each in storage.transforms or ()]
        return {"members": members, "transforms": chains}

    def _load(self, storage: Any, saved: Any, source: Source, rule: Rule) -> Callable[[], None]:
        where = f"{source.path}, storage"
        fields = Fields(saved, where)
        members, chains = fields.items("members"), fields.items("transforms")
        if len(members) != len(storage._storages) or len(chains) != len(storage.transforms or ()):
            raise CheckpointMismatch(f"{where}: {len(members)} storages were saved, {len(storage._storages)} are here")
        ready: list[Callable[[], None]] = []
        with abandoned_on_error(ready):
            for member, each in zip(storage._storages, members, strict=True):
                ready.append(member.checkpointer._restoring(member, each, source, rule))
            for chain, each in zip(storage.transforms or (), chains, strict=True):
                if chain is not None:
                    ready.append(chain._restoring(each, rule))
        return Together(ready)


class Together:
    """Several things that were checked, to be put in at once, or to be abandoned."""

    def __init__(self, parts: list[Callable[[], None]]) -> None:
        self._parts = parts

    def __call__(self) -> None:
        for each in self._parts:
            each()

    def abandon(self) -> None:
        """Give back what was taken for them."""
        for each in self._parts:
            getattr(each, "abandon", _nothing)()


@contextlib.contextmanager
def abandoned_on_error(parts: list[Callable[[], None]]) -> Any:
    """Give back what these took, where the context raises."""
    try:
        yield
    except BaseException:
        Together(parts).abandon()
        raise


def _nothing() -> None:
    pass


def _callable(hook: Any) -> Callable[..., Any]:
    if not callable(hook):
        raise TypeError(f"a hook must be callable, got {type(hook).__name__}")
    return hook


def _of_storage(tree: Any) -> Any:
    """The tree of a storage: in what a buffer has saved it is a part."""
    within = isinstance(tree, Mapping) and "checkpointer" not in tree and "storage" in tree
    return tree["storage"] if within else tree
