"""Writes of storage, writer and samplers that an interrupt leaves done or not done, never in part."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from interop.checkpoint.state import declared
from interop.host.threads import came_from_a_signal, uninterrupted
from interop.storages.storage import Storage

_T = TypeVar("_T")


class Undoable(Protocol):
    """A storage, writer or sampler that has more state than the counters of the storage."""

    def before_write(self) -> dict[str, Any]:
        """What `put_back` needs after a write of any size. O(1)."""

    def put_back(self, before: dict[str, Any]) -> None:
        """Be as before the write, but for rows and other large memory that it has overwritten."""


class OwnAttributes:
    """The attributes that a class of the user's adds to a storage or writer of the library: these are put back."""

    def __init__(self, component: object) -> None:
        self._component = component
        self._declared = declared(type(component))

    def before_write(self) -> dict[str, Any]:
        """The attributes, but not what is in their lists and arrays."""
        return {name: value for name, value in vars(self._component).items() if name not in self._declared}

    def put_back(self, before: dict[str, Any]) -> None:
        """Have these attributes again, and no later ones."""
        attributes = vars(self._component)
        for name in attributes.keys() - self._declared - before.keys():
            del attributes[name]
        attributes.update(before)


class Attributes:
    """Some attributes of an object, which are put back."""

    def __init__(self, owner: object, names: Sequence[str]) -> None:
        self._owner = owner
        self._names = names

    def before_write(self) -> dict[str, Any]:
        attributes = vars(self._owner)
        return {name: attributes[name] for name in self._names}

    def put_back(self, before: dict[str, Any]) -> None:
        vars(self._owner).update(before)


class KeptFor:
    """For which sampler a storage keeps values in a file. Whether this sampler must read them is put back."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def before_write(self) -> dict[str, Any]:
        file = self._storage.contents.kept
        return {} if file is None else {"file": file, "binding": file.binding}

    def put_back(self, before: dict[str, Any]) -> None:
        if before:
            before["file"].binding = before["binding"]


def redone(undoable: Sequence[Undoable], change: Callable[[], _T]) -> _T:
    """`finished` for a change that cannot be made twice: what an interrupted one has changed is put back first.

    An error of the change itself, as of a method of the user's, is raised as it came: nothing is put back, and nothing is
    called again.
    """
    kept = [(each, each.before_write()) for each in undoable]
    try:
        return change()
    except BaseException as error:
        if came_from_a_signal(error):
            with uninterrupted():
                for each, before in reversed(kept):
                    each.put_back(before)
                change()
        raise


def all_or_nothing(storage: Storage, undoable: Sequence[Undoable], write: Callable[[], _T]) -> _T:
    """Run a write, under the lock of the storage. If it raises, as a signal handler may make it, it is done or not done.

    `write` may run twice. See `finish_or_undo`; `undoable` is all that the write changes.
    """
    counters = storage.ring.cells.tobytes()
    kept = [(each, each.before_write()) for each in undoable]
    if storage.guard.device_writes is not None:
        write = partial(storage.guard.device_writes.together, write)
    try:
        return write()
    except BaseException:
        finish_or_undo(storage, counters, kept, write)
        raise


def finish_or_undo(
    storage: Storage,
    counters: bytes,
    kept: Sequence[tuple[Undoable, Any]],
    write: Callable[[], Any],
    *,
    finish: bool = False,
    counts: tuple[int, int, int, int] | None = None,
    of_samplers: Sequence[tuple[Undoable, Any]] = (),
) -> None:
    """Finish or undo a write that was interrupted. The lock of the storage is held since before.

    Rows that are overwritten are saved nowhere, but for those that a journal guards. So the write is not undone once it may
    have changed rows, which the counters of the storage tell: all but the rows is put back to where it was, and the write is
    made again, to its end, while signals wait. An error of the write itself comes again, and is raised.

    Args:
        counters: of the storage, as they were.
        kept: what the write changes, and the results of `before_write`.
        write: makes the write.
        finish: make it in any case.
        counts: those of the storage before, if a write that raises again is to be reported to the samplers.
        of_samplers: the part of `kept` that is put back before that report, for some samplers know the write already.
    """
    with uninterrupted():
        storage.guard.recover()
        begun = storage.ring.cells.tobytes() != counters
        try:
            with storage.guard.transaction():
                storage.ring.put_back(counters)
                _put_back(storage, kept)
                if begun or finish:
                    write()
        except BaseException:
            if counts is not None:  # rows may be written, with the priorities of the rows before
                storage.guard.recover()
                storage.followers.report(storage, counts, partial(_put_back, storage, of_samplers))
            raise


def _put_back(storage: Storage, kept: Sequence[tuple[Undoable, Any]]) -> None:
    with storage.guard.transaction():
        for each, before in reversed(kept):
            each.put_back(before)
