"""Saving and loading of buffers."""

import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fbuf.checkpoint import CheckpointMismatch, Fields, Source, Verify, Writing, load
from interop.buffers.turn import turn, turns
from interop.checkpoint.checkpointers import Together, abandoned_on_error
from interop.checkpoint.component import Aliases, described, state_for
from interop.checkpoint.rule import EXACT, Rule
from interop.formats.torchrl_folder import TorchrlDump, is_torchrl_dump
from interop.shared.interrupts import uninterrupted

_KIND = "replay buffer"


class Saveable(Aliases):
    """What `dumps`, `loads` and their like do. See `ReplayBuffer`."""

    _batch_size: int | None
    _latest_checkpoint: Path | None = None  # whose files the next one may share

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the buffer in a folder: rows, sampler, writer, generator and transforms.

        It is of one moment: other threads, and processes that share the buffer, wait until all was read, not until it is on
        the disk. It is there, flushed, when this returns; killed at any point it leaves the checkpoint that was there or
        the new one, whole. Only the filled part is written, and of that what differs from the last checkpoint of this
        buffer and from the one in the folder: what does not is linked to, where they are on one disk. Each can be deleted.

        Prefetched batches are dropped and drawn again, here and where this is loaded. Without a generator of its own the
        random numbers of a buffer are torch's global ones, which are not saved. `prefetch`, `collate_fn`, hooks and
        functions are not saved: what is loaded into is built with them.

        Args:
            path: a folder; made if it is missing, below one that exists. Other files in it stay.

        Raises:
            FileNotFoundError: the folder above is missing.
            RuntimeError: a tensor storage was not written to yet.
            TypeError: something cannot be saved; the message names it.
            OSError: the disk is full, or fails.
        """
        self._storage  # type: ignore[attr-defined]  # noqa: B018  # components, not what makes them
        previous = [] if self._latest_checkpoint is None else [self._latest_checkpoint]
        with Writing(path, previous) as out, self._turns(), self._queue_still():
            self._drop_requests()
            out.write(self._saved_with(out))
        self._latest_checkpoint = out.path

    def loads(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        """Load what `dumps` saved into a buffer built alike, so that it goes on as the saved one would.

        All is read and checked first, then put in at once: after an error the buffer is as it was, bit for bit. A storage
        without memory gets it; one that has memory keeps it and is written over, and what was read is in memory a second
        time until then. Parameters such as alpha, beta and batch_size are those of the checkpoint, with a warning where they
        were others. Folders written by torchrl's `dumps` from tensor storages are read as well.

        Args:
            path: the folder. Nothing in it is changed, and nothing in it is run.
            verify: "full" compares the checksum of every byte, "size" that of the manifest and the sizes of files.
            strict: keys that only the checkpoint or only the storage has are an error; without, they are left out, or zero.
            cast: items of other dtypes are cast instead of being an error.
            allow_pickle: read objects that were saved by `ListStorageCheckpointer(allow_pickle=True)`. That runs whatever
                code the file names: only for files that you trust.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointCorrupt: it is damaged; the message names the file.
            CheckpointMismatch: it is one of something else: all differences are listed.
        """
        rule = Rule(strict, cast, allow_pickle)
        self._storage  # type: ignore[attr-defined]  # noqa: B018
        with self._turns(), self._queue_still():
            if foreign := is_torchrl_dump(path):
                restored = self._restoring_dump(TorchrlDump(path), rule)
            else:
                restored = load(path, lambda source: self._restoring_from(source, rule), verify)
            self._put_in(restored)
        self._latest_checkpoint = None if foreign else Path(path).absolute()

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have `hook(data, path=None)` change what is saved of the storage; see `StorageCheckpointerBase`."""
        self._storage.register_save_hook(hook)  # type: ignore[attr-defined]

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have `hook(data, out=None)` change what was loaded for the storage."""
        self._storage.register_load_hook(hook)  # type: ignore[attr-defined]

    def _turns(self) -> Any:
        """A context in which nobody else reads or writes."""
        return turn(self)  # type: ignore[arg-type]

    def _put_in(self, restored: Callable[[], None]) -> None:
        """Put in what was checked: as a whole, whether the process is interrupted or killed."""
        with uninterrupted(), self._step():
            restored()

    def _step(self) -> Any:
        """A time, of which all that is stored counts at its end, or nothing."""
        storage = self._storage  # type: ignore[attr-defined]
        return storage.transaction() if storage.checkpointer.changes_rows else contextlib.nullcontext()

    # ------------------------------------------------------------------ trees

    def _saved_with(self, out: Writing) -> dict[str, Any]:
        storage = self._storage  # type: ignore[attr-defined]
        return {
            "kind": _KIND,
            "class": type(self).__name__,
            "storage": storage.checkpointer._described(storage, out),
            **self._saved_rest(),
        }

    def _saved_rest(self) -> dict[str, Any]:
        """All but the storage."""
        held = self.__dict__
        return {
            "batch_size": held["_batch_size"],
            "sampler": described(held["_sampler"], self._saved_sampler()),
            "writer": described(held["_writer"], held["_writer"]._saved()),
            "transforms": held["_transform"]._saved(),
            "generator": _saved_generator(held["_rng"]),
        }

    def _saved_sampler(self) -> dict[str, Any]:
        state: dict[str, Any] = self.__dict__["_sampler"]._saved()
        return state

    def _restoring_sampler(self, state: Any, rule: Rule) -> Callable[[], None]:
        put: Callable[[], None] = self.__dict__["_sampler"]._restoring(state, rule)
        return put

    def _restoring_from(self, source: Source, rule: Rule) -> Callable[[], None]:
        return self._restoring_tree(source.tree, source, rule, str(source.path))

    def _restoring_tree(
        self, tree: Any, source: Source, rule: Rule, where: str, beside: Sequence[Any] = ()
    ) -> Callable[[], None]:
        """Check everything; what is returned puts it in. The lock is held.

        What buffers `beside` have, which are loaded before, on the same storage perhaps, is left as it is.
        """
        fields = Fields(tree, where)
        if fields.text("kind") != _KIND:
            raise CheckpointMismatch(f"{where}: was saved from a {fields.text('kind')}, not from a replay buffer")
        storage = self._storage  # type: ignore[attr-defined]
        rest = self._restoring_rest(fields, ("sampler", "writer"), where, rule, beside)
        # Last to be read, for it is the largest, and first to be put in.
        ready = [self._drop_ahead]  # type: ignore[attr-defined]
        if all(storage is not each._storage for each in beside):
            ready.append(storage.checkpointer._restoring(storage, fields.any("storage"), source, rule))
        return Together([*ready, rest])

    def _restoring_rest(
        self, fields: Fields, names: Sequence[str], where: str, rule: Rule, beside: Sequence[Any] = ()
    ) -> Callable[[], None]:
        """The same for all but the storage."""
        held = self.__dict__
        size = None if fields.any("batch_size") is None else fields.whole("batch_size", 1, 2**31)
        ready: list[Callable[[], None]] = []
        with abandoned_on_error(ready):
            for name in names:
                component = held[f"_{name}"]
                state = state_for(component, fields.any(name), f"{where}, {name}")
                put = self._restoring_sampler if name == "sampler" else component._restoring
                ready.append(put(state, rule))
            ready.append(held["_transform"]._restoring(fields.any("transforms"), rule))
            ready.append(_restoring_generator(held["_rng"], fields.any("generator"), where))
        return Together([*ready, self._rejoining(size, beside)])

    def _rejoining(self, batch_size: int | None, beside: Sequence[Any] = ()) -> Callable[[], None]:
        size = self._batch_size if batch_size is None else batch_size
        if self._batch_size not in (None, size):  # told now, while a filter may make an error of it
            warnings.warn(
                f"the buffer had batch_size={self._batch_size}, the checkpoint has {size}, which counts",
                UserWarning,
                stacklevel=5,
            )

        def rejoin() -> None:
            self._batch_size = size
            self._rejoin(beside)  # type: ignore[attr-defined]

        return rejoin

    # ------------------------------------------------------------------ state dicts

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that `dumps` saves, as plain values and tensors: `torch.load(weights_only=True)` reads it.

        Keys: "_storage", "_sampler", "_writer", "_transforms", "_batch_size", "_consume_after_n_samples", "_rng" and
        "_prefetch_state", which is None: batches are drawn again. It takes the memory of the rows a second time: `dumps`
        does not.
        """
        self._storage  # type: ignore[attr-defined]  # noqa: B018
        with self._turns(), self._queue_still():
            self._drop_requests()
            held = self.__dict__
            return {
                "_storage": held["_storage"].state_dict(),
                "_sampler": held["_sampler"].state_dict(),
                "_writer": held["_writer"].state_dict(),
                "_transforms": {key: _copied(each) for key, each in held["_transform"]._state().items()},
                "_batch_size": held["_batch_size"],
                "_consume_after_n_samples": getattr(held["_sampler"], "max_sample_count", None),
                "_rng": None if held["_rng"] is None else (held["_rng"].get_state(), str(held["_rng"].device)),
                "_prefetch_state": None,
            }

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy what `state_dict` gave into a buffer built alike. After an error nothing has changed."""
        self._storage  # type: ignore[attr-defined]  # noqa: B018
        where = "the state_dict of a buffer"
        fields = Fields(state_dict, where)
        with self._turns(), self._queue_still():
            storage = self._storage  # type: ignore[attr-defined]
            put = self._restoring_dict(fields, where, lambda: storage._from_dict(fields.any("_storage")), EXACT)
            self._put_in(put)

    def _restoring_dict(
        self, fields: Fields, where: str, rows: Callable[[], Callable[[], None]], rule: Rule
    ) -> Callable[[], None]:
        """Check a `state_dict`, whose rows `rows` checks and reads; what is returned puts it in."""
        held = self.__dict__
        rng = None if fields.any("_rng") is None else fields.items("_rng", 2)
        saved = None if rng is None else {"state": np.asarray(rng[0]), "device": rng[1]}
        ready: list[Callable[[], None]] = [self._drop_ahead]  # type: ignore[attr-defined]
        with abandoned_on_error(ready):
            ready.append(held["_sampler"]._from_dict(fields.any("_sampler"), rule))
            ready.append(held["_writer"]._from_dict(fields.any("_writer"), rule))
            ready.append(held["_transform"]._loading(fields.any("_transforms"), f"{where}, transforms", rule))
            ready.append(_restoring_generator(held["_rng"], saved, where))
            size = None if fields.any("_batch_size") is None else fields.whole("_batch_size", 1, 2**31)
            # Last, for it may take memory, and first to be put in.
            ready = [ready[0], rows(), *ready[1:], self._rejoining(size)]
        return Together(ready)

    def _restoring_dump(self, dump: TorchrlDump, rule: Rule) -> Callable[[], None]:
        """Check a folder that torchrl's `dumps` wrote; what is returned loads it."""
        storage, held = self._storage, self.__dict__  # type: ignore[attr-defined]
        with dump.named():
            state = dump.state(storage, held["_sampler"], held["_writer"])
            cursor, written = (state["_writer"].get(name) for name in ("_cursor", "_write_count"))
            fields = Fields(state, dump.where)
            rows = partial(dump.restoring_rows, storage, cursor, written, rule)
            return self._restoring_dict(fields, dump.where, rows, rule)

    def _queue_still(self) -> Any:
        """A context in which no batch is drawn ahead, or taken."""
        queue = self.__dict__["_prefetch"]
        return contextlib.nullcontext() if queue is None else queue.held_still()

    def _drop_requests(self) -> None:
        """Before a save: what is saved and what goes on draw the same batches."""
        self._drop_ahead()  # type: ignore[attr-defined]


class SaveableEnsemble(Saveable):
    """The same for several buffers: each is saved as it would be by itself, in one checkpoint of one moment."""

    _members: tuple[Any, ...]

    def _saved_sampler(self) -> dict[str, Any]:
        state: dict[str, Any] = self.sampler._saved_choice()  # type: ignore[attr-defined]
        return state

    def _restoring_sampler(self, state: Any, rule: Rule) -> Callable[[], None]:
        put: Callable[[], None] = self.sampler._restoring_choice(state)  # type: ignore[attr-defined]
        return put

    def _turns(self) -> Any:
        with contextlib.ExitStack() as still:
            still.enter_context(self._members_still())
            for member in self._members:
                still.enter_context(member._queue_still())
            return still.pop_all()

    def _members_still(self) -> Any:
        """A context in which nobody else reads or writes any of them; they may be drawn ahead of."""
        return turns(self._members)

    def _drop_requests(self) -> None:
        super()._drop_requests()
        for member in self._members:
            member._drop_ahead()

    def _step(self) -> Any:
        with contextlib.ExitStack() as steps:
            for storage in (member._storage for member in self._members):
                if storage.checkpointer.changes_rows:
                    steps.enter_context(storage.part())  # two of them may have one storage
            return steps.pop_all()

    def _saved_with(self, out: Writing) -> dict[str, Any]:
        members = [member._saved_with(out) for member in self._members]
        rest = self._saved_rest()
        return {"kind": _KIND, "class": type(self).__name__, "members": members, **rest, "writer": None}

    def _restoring_tree(
        self, tree: Any, source: Source, rule: Rule, where: str, beside: Sequence[Any] = ()
    ) -> Callable[[], None]:
        fields = Fields(tree, where)
        members = fields.items("members")
        if len(members) != len(self._members):
            raise CheckpointMismatch(f"{where}: {len(members)} buffers were saved, {len(self._members)} are here")
        ready: list[Callable[[], None]] = []
        with abandoned_on_error(ready):
            for place, (member, saved) in enumerate(zip(self._members, members, strict=True)):
                before = [*beside, *self._members[:place]]
                ready.append(member._restoring_tree(saved, source, rule, f"{where}, member {place}", before))
            ready.append(self._restoring_rest(fields, ("sampler",), where, rule))
        return Together(ready)


def _saved_generator(generator: torch.Generator | None) -> dict[str, Any] | None:
    if generator is None:
        return None
    return {"state": generator.get_state().numpy(), "device": str(generator.device)}


def _restoring_generator(generator: torch.Generator | None, saved: Any, where: str) -> Callable[[], None]:
    if saved is None or generator is None:  # where there is none, torch's global one goes on as it is
        return lambda: None
    state = Fields(saved, f"{where}, generator").array("state", np.uint8, (None,))
    tensor = torch.from_numpy(np.array(state))
    trial = torch.Generator(generator.device)
    try:
        trial.set_state(tensor)
    except RuntimeError as error:
        raise CheckpointMismatch(f"{where}: the state of the generator is none of a {generator.device} one") from error

    def put() -> None:
        generator.set_state(tensor)

    return put


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
