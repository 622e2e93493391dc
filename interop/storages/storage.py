"""The base class of storages."""

import contextlib
import copy
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from fbuf.memory_plan import Plan, Share
from interop.checkpoint.checkpointers import StorageCheckpointerBase
from interop.checkpoint.state import Aliases
from interop.data.arguments import class_of, whole
from interop.data.layout import Layout
from interop.data.randomness import Seeded
from interop.engine import plans
from interop.engine.guard import Guard
from interop.engine.kept_values import KeptValues
from interop.host.maps import in_shared_memory
from interop.host.ring import CELLS, Ring
from interop.host.threads import uninterrupted
from interop.shared.processes import starting_a_worker
from interop.shared.storage_lock import StorageLock


class Follower(Protocol):
    """A buffer, or anything else with this method."""

    def mark_update(self, index: Any) -> None:
        """New items are at index."""


class Storage(Aliases, Seeded):
    """Items by slot. A subclass defines `set`, `get`, `__len__` and `_empty`.

    Buffers hold `lock` while they read or write. Direct calls of `get` and `set` do not: hold it yourself where other
    threads or processes use the storage.

    Args:
        max_size: the largest number of items.
        checkpointer: saves and loads the content.
        compilable: keep the counters local to this process.
    """

    ndim = 1
    _checkpointer: Any = None
    default_checkpointer: Callable[[], Any] = StorageCheckpointerBase
    _compilable = False
    generations: Any = None  # how often each row was written, if a writer counts that
    guard: Guard  # the lock and the transactions
    _counters: torch.Tensor | None = None  # shared memory of the ring, if there is no journal
    reopened = False  # whether the rows were written by an earlier process
    _watched = False  # whether writes of other processes are reported to samplers
    _seen: tuple[int, int, int, int] | None = None  # the counts when the lock was last released, if so
    lock: StorageLock
    _listeners: "_Listeners"
    ring: Ring  # rows in use, cursor, and counters of writes

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # here, for subclasses that do not call `__init__`
        storage = super().__new__(cls)
        storage.guard = Guard(storage)
        storage.lock = storage.guard.lock
        storage._listeners = _Listeners()
        storage.ring = Ring()
        return storage

    def __init__(self, max_size: int, checkpointer: Any = None, compilable: bool = False) -> None:
        self._max_size = whole("max_size", max_size)
        self._compilable = compilable
        if checkpointer is not None:
            self.checkpointer = checkpointer

    @property
    def max_size(self) -> int:
        """Capacity in items."""
        return self._max_size

    @property
    def asked_size(self) -> int:
        """Capacity in items as the user asked for it, before it is rounded up to whole rows."""
        return getattr(self, "_max_size", self.max_size)

    @property
    def checkpointer(self) -> Any:
        """What saves and loads the content."""
        if self._checkpointer is None:
            self._checkpointer = type(self).default_checkpointer()
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        value = value() if isinstance(value, type) else value
        if value is not None and not isinstance(value, StorageCheckpointerBase):
            raise TypeError(f"checkpointer must be a StorageCheckpointerBase, got {class_of(value)}")
        self._checkpointer = value

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Save the content in a folder, by the checkpointer."""
        self.checkpointer.dumps(self, path)

    def loads(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Load a checkpoint of a storage or of a whole buffer, by the checkpointer. After an error nothing has changed.

        `verify`, `strict`, `cast` and `allow_pickle` are those of `ReplayBuffer.loads`.
        """
        self.checkpointer.loads(self, path, **options)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Change saved data by `hook(data, path=None)`; see `StorageCheckpointerBase`."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Change loaded data by `hook(data, out=None)`."""
        self.checkpointer.register_load_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the content, as tensors and plain values."""
        raise NotImplementedError(f"{type(self).__name__} does not define state_dict()")

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy in a result of `state_dict`."""
        raise NotImplementedError(f"{type(self).__name__} does not define load_state_dict()")

    def restoring_dict(self, given: Any) -> Callable[[], None]:
        """Check a result of `state_dict`; the returned function loads it. Storages of users check it only then."""
        return partial(self.load_state_dict, given)

    def locked(self) -> Any:
        return self.lock.held()

    @property
    def shape(self) -> torch.Size | None:
        """The dims that count as items."""
        return torch.Size([self.max_size])

    @property
    def is_full(self) -> bool:
        return len(self) == self.max_size

    def refuse_forked_child(self) -> None:
        """RuntimeError in a forked child that does not share memory and counters with its parent."""
        if self.lock.forked and (self.lock.processes is None or not self.is_shared()):
            raise RuntimeError(
                f"this {type(self).__name__} is in memory that a forked process does not share, and can only be read here: "
                "use a LazyTensorStorage on the CPU and call share() on the buffer before the fork, or a LazyMemmapStorage "
                "(both without compilable=True), or build the buffer in the process that writes to it; nothing was written"
            )

    @property
    def compilable(self) -> bool:
        """Whether the counters belong to one process."""
        return self._compilable

    def is_shared(self) -> bool:
        """Whether other processes see what this one writes."""
        return False

    def shares_in_forks(self) -> bool:
        """Whether forked children share it without being asked. In memory maps also the first write may be theirs."""
        return self.is_shared()

    def share(self) -> None:
        """Share rows and counters with processes started or forked from now on. O(1) if they are shared already."""
        if self.lock.processes is None:
            with self.lock.held():
                self.start_sharing()

    def start_sharing(self) -> None:
        """Move the counters to shared memory. The lock is held."""
        self._start_journal()
        if not self.guard.journal.is_wanted and self._counters is None and not self._compilable:
            self._counters = in_shared_memory(torch.zeros(CELLS, dtype=torch.int64, device="cpu"))
            self.ring.use(self._counters.numpy().data, copy=True)
        if self.generations is not None:
            self.generations.share(self)
        self.lock.share()
        self.released()

    def _start_journal(self) -> None:
        """Record writes from now on, so that another process can roll them back."""

    def acquired(self) -> None:
        """The lock was taken: roll back an unfinished write, and tell samplers of writes by other processes."""
        self.recover()
        if self._seen is not None and not self.lock.forked:
            self.report_writes(self._seen)

    def released(self) -> None:
        """The lock is about to be released: other processes may write."""
        self._seen = self.counts if self._watched and self.lock.processes is not None else None

    def recover(self) -> None:
        """Roll back a write that a killed process or a signal left unfinished. The lock is held, no transaction is open."""
        self.guard.recover()

    def before_write(self) -> dict[str, Any]:
        """What `put_back` needs after an interrupted write, beside the counters of the ring. O(1)."""
        return {}

    def put_back(self, before: dict[str, Any]) -> None:
        """Be as before an interrupted write, but for the rows that it has overwritten. Inside a transaction."""

    def replace(self, change: Callable[[], None]) -> None:
        """Make a checked change in a transaction. If it is interrupted, it is made again before the exception is raised."""
        replaced([self], change)

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """A transaction: commits on exit, rolls back on error. Inside another one it is a part of that."""
        return self.guard.transaction()

    def part(self) -> contextlib.AbstractContextManager[Any]:
        """Joins the transaction that is open, or is one."""
        return self.guard.transaction()

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The counters of the ring and the length. They differ after any write."""
        return (*self.ring.counts, len(self))

    def report_writes(self, before: tuple[int, int, int, int]) -> None:
        """Call `mark_update` of the buffers for all rows written since the counts were `before`.

        Rows are known if they were written around the ring; other writes are reported by the writer. Samplers of a storage
        that was emptied meanwhile are cleared first.
        """
        if self.counts == before:
            return
        written, _, _, length = before
        rows, ring = self.row_capacity(None), self.ring
        count = min(ring.written - written, rows)
        new = torch.arange(ring.cursor - count, ring.cursor, device="cpu") % max(rows, 1)
        new = new[new < self.filled_rows]
        emptied = len(self) < length
        if emptied:
            new = torch.arange(self.filled_rows, device="cpu")
        for buffer in self.buffers():
            if buffer.sampler.follows_writes:
                if emptied:
                    buffer.sampler.clear()
                if len(new):
                    buffer.mark_update(self.coordinates(new))

    def edits_since(self, version: int | None) -> tuple[int, np.ndarray]:
        """The version of the ring, and the flat slots of rows edited after `version`, the oldest row first.

        All slots if `version` is None or the ring no longer knows which rows were edited.
        """
        ring, length, rows = self.ring, len(self), self.filled_rows
        if ring.version == version or not length:
            return ring.version, np.zeros(0, np.int64)
        edits = None if version is None else ring.since(version)
        changed = np.full(rows, edits is None)
        for each in edits or ():
            changed[each] = True
        places = (np.flatnonzero(np.roll(changed, -ring.cursor)) + ring.cursor) % rows
        lanes = length // rows
        return ring.version, (places[:, None] * lanes + np.arange(lanes)).reshape(-1)

    def kept_priorities(self) -> Any:
        """The file with the priorities of the items, made if needed; None for storages that end with the process."""
        return None

    def kept_uses(self) -> Any:
        """The file with the uses of the items, made if needed; None for storages that end with the process.

        There is one of both files: this one replaces that of the priorities, and the other way round.
        """
        return None

    @property
    def priorities(self) -> KeptValues | None:
        """Priorities or uses of the items, if they are kept in a file."""
        return None

    @property
    def tracks_writes(self) -> bool:
        """Whether the ring counts every write."""
        return False

    @property
    def filled_rows(self) -> int:
        """Rows that were written, along the first dim."""
        return len(self)

    def row_capacity(self, data: Any) -> int:
        """How many rows fit. Before the first write this depends on the batch `data` that will be written."""
        return self.max_size

    def coordinates(self, rows: Any) -> Any:
        """Row numbers as they are for one item dim; a [n, ndim] tensor of coordinates, row by row, for more."""
        if self.ndim == 1:
            return rows
        lanes = self.shape[1:] if self.shape is not None else torch.Size([])
        rows = torch.as_tensor(rows).reshape(-1)
        within = torch.cartesian_prod(*(torch.arange(n, device="cpu") for n in lanes)).reshape(-1, len(lanes))
        return torch.cat(
            [rows.repeat_interleave(within.shape[0])[:, None], within.repeat(rows.shape[0], 1).to(rows.device)], dim=1
        )

    def _max_size_along_dim0(self, *, single_data: object = None, batched_data: object = None) -> int:  # in torchrl
        return self.row_capacity(batched_data if single_data is None else [single_data])

    def random_index(self, batch_size: int) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """An index of items drawn uniformly: int64 [batch_size], a tuple of these for several item dims."""
        if not len(self):
            raise RuntimeError("Cannot sample from an empty storage. Call extend() or add() first.")
        device = "cpu" if self._rng is None else self._rng.device
        batch_size = whole("batch_size", batch_size, least=0)
        slots = torch.randint(len(self), (batch_size,), generator=self._rng, device=device)
        return slots if self.ndim == 1 else torch.unravel_index(slots, self.shape or ())

    _rand_given_ndim = random_index  # its name in torchrl

    def plan(self, data: Any = None) -> Plan:
        """The memory that the storage takes, or will take after the first write of `data`, a batch as for `extend`.

        A `TensorSpec` of an item, or with `ndim` > 1 of a row, serves as data too. Nothing is allocated. RuntimeError where
        data is needed and missing; else the errors of the write.
        """
        with self.lock.held():
            return plans.plan(self.memory_shares(data))

    def memory_shares(self, data: Any) -> list[Share]:
        """The shares of `plan`. Unknown in the base class."""
        return [Share("items", f"of a {type(self).__name__}", "cpu", None)]

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write data at `cursor`, an index. With `set_cursor` the length grows to include it."""
        raise NotImplementedError(f"{type(self).__name__} does not define set()")

    def get(self, index: Any) -> Any:
        """The items at an index."""
        raise NotImplementedError(f"{type(self).__name__} does not define get()")

    def is_live(self, index: Any) -> bool:
        """Whether `get(index)` returns the stored data itself, not a copy."""
        return True

    @property
    def item_layout(self) -> Layout | None:
        """The layout of the items in memory; None for a storage whose items may differ, and before the first write."""
        return None

    @property
    def fixed_layout(self) -> Layout | None:
        """The layout that new items must have; None if the next write fixes it, or items may differ."""
        return None

    def column(self, key: NestedKey) -> torch.Tensor | None:
        """The memory of an entry, [rows, *lanes, ...]; None if entries can only be read by `get`.

        Do not keep it: the memory may move. KeyError for an entry that is not stored. The lock is held.
        """
        return None

    def host_columns(self, paths: Sequence[tuple[Any, ...]]) -> list[np.ndarray | None] | None:
        """NumPy views of entries, [items, ...] each, None for an entry that is not stored; None if there are no views."""
        return None

    def editable(self, given: Any) -> Any:
        """The stored items as a view, whose entries named in `given` can be written in place."""
        return self[:]

    def add_columns(self, data: TensorDictBase) -> None:
        """Store new entries of all stored items; `data` has these items with all their entries."""
        self[:] = data

    def refuse_edit(self, paths: Iterable[tuple[Any, ...]]) -> None:
        """RuntimeError if one of these entries cannot be written in place."""

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} does not define __len__()")

    def empty(self) -> None:
        """Forget all items; the memory is kept. A storage with buffers is emptied by the `empty` of a buffer instead."""
        with self.lock.held(), self.transaction():
            self.refuse_forked_child()
            self._empty()

    def attach(self, buffer: Follower) -> None:
        """Call `buffer.mark_update(index)` at each write through any buffer. Does not keep the buffer alive."""
        if all(each is not buffer for each in self.attached()):
            try:
                reference: Callable[[], Any] = weakref.ref(buffer)
            except TypeError:  # a kind of object that cannot be referred to weakly
                reference = partial(_itself, buffer)
            self._listeners = _Listeners([*(each for each in self._listeners if each() is not None), reference])
        self._watched = self.tracks_writes and any(each.sampler.follows_writes for each in self.buffers())

    def detach(self, buffer: Follower) -> None:
        """Undo `attach`."""
        self._listeners = _Listeners(each for each in self._listeners if each() is not buffer)

    def attached(self) -> list[Follower]:
        """All followers, in the order of attaching."""
        return [listener for each in self._listeners if (listener := each()) is not None]

    def buffers(self) -> list[Any]:
        """The followers that are buffers: those with a sampler."""
        return [each for each in self.attached() if hasattr(each, "sampler")]

    def contains(self, index: Any) -> Any:
        """Whether a row is stored at an int index; a bool tensor for a tensor of them."""
        rows = self.filled_rows
        if isinstance(index, int):
            return -rows <= index < rows
        if isinstance(index, torch.Tensor):
            return (index >= -rows) & (index < rows)
        raise NotImplementedError(f"contains() takes an int or a tensor, got {type(index).__name__}")

    def flatten(self) -> "Storage":
        """The same content with one dim of items."""
        return self

    def clear(self) -> None:
        """Forget all items, inside a transaction that also clears the buffers."""
        self._empty()

    def edited(self, rows: Any) -> None:
        """Note that rows, a slice or an array of numbers, were changed in place. The lock is held."""
        self.ring.edited(rows)

    def _empty(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not define _empty()")

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set(index, value, set_cursor=False)

    def __iter__(self) -> Iterator[Any]:
        for row in range(self.filled_rows):
            yield self[row]

    def __contains__(self, index: Any) -> bool:
        return bool(self.contains(index))

    def __getstate__(self) -> dict[str, Any]:
        # The buffer that owns this storage attaches itself and sets the generator.
        if starting_a_worker():
            self._refuse_to_share()
            self.share()
            kept: dict[str, Any] = {"_process_lock": self.lock.give(), "_journal": self.guard.journal}
        else:
            kept = {"_counters": None, "ring": copy.deepcopy(self.ring)}
        state = {**self.__dict__, "_listeners": _Listeners(), "_rng": None, "_seen": None, **kept}
        del state["lock"], state["guard"]
        return state

    def _refuse_to_share(self) -> None:
        """RuntimeError for a storage that cannot be shared with a process that is starting."""
        if self._compilable:
            raise RuntimeError(
                f"Cannot share a {type(self).__name__} that is compilable between processes, each would count on its own: "
                "build it with compilable=False"
            )
        self.refuse_forked_child()

    def __setstate__(self, state: dict[str, Any]) -> None:
        process_lock = state.pop("_process_lock", None)
        self.guard.journal = state.pop("_journal", self.guard.journal)
        self.__dict__.update(state)
        if process_lock is not None:
            self.lock.take(process_lock)
        if self._counters is not None:
            self.ring.use(self._counters.numpy().data, copy=False)


def is_undoable(storage: Storage) -> bool:
    """Whether a write changes more than rows and the counters of the ring: whether the class defines `before_write`."""
    return type(storage).before_write is not Storage.before_write


def replaced(storages: Sequence[Storage], change: Callable[[], None]) -> None:
    """Make a change in a transaction of each storage. An interrupted one is made again before the exception is raised.

    The locks are held. `change` may run twice, and was checked before: an error of its own comes again.
    """

    def run() -> None:
        with contextlib.ExitStack() as transactions:
            for storage in storages:
                transactions.enter_context(storage.transaction())
            change()

    try:
        run()
    except BaseException:
        with uninterrupted():
            for storage in storages:
                storage.recover()
            run()
        raise


class _Listeners(list[Callable[[], Any]]):
    """References to the followers. A copy is empty: its own buffers attach themselves."""

    def __reduce__(self) -> Any:
        return _Listeners, ()


def _itself(each: Any) -> Any:
    return each
