"""What keeps rows sound while they are written: the lock of a storage, and the record that rolls back unfinished writes.

A write takes the lock, opens a transaction, and saves the rows that it overwrites, where the storage has a record. A process
that takes the lock next rolls back what a killed one has left open, and tells the samplers of what others have written.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from interop.engine.followers import Followed, Followers, counts_of
from interop.host.device_writes import DeviceWrites
from interop.host.maps import in_shared_memory
from interop.host.ring import CELLS
from interop.host.threads import uninterrupted
from interop.shared.journal import Journal, ReadOnly
from interop.shared.storage_lock import StorageLock


class Shareable(Protocol):
    """What a storage shares with other processes: its table."""

    def is_shared(self) -> bool:
        """Whether other processes see what this one writes."""

    def shares_in_forks(self) -> bool:
        """Whether forked children share it without being asked."""

    def start_sharing(self, owner: object) -> None:
        """Move rows to where other processes see them. `owner` is the storage."""

    def start_record(self) -> None:
        """Record writes from now on, so that another process can roll them back."""

    def look(self) -> None:
        """Follow what other processes did with the memory."""


class Unshared:
    """The rows of a storage that no other process sees."""

    def is_shared(self) -> bool:
        return False

    def shares_in_forks(self) -> bool:
        return False

    def start_sharing(self, owner: object) -> None:
        """Nothing can be moved."""

    def start_record(self) -> None:
        """Nothing is recorded."""

    def look(self) -> None:
        """There is nothing to see."""


UNSHARED = Unshared()


def _no_table() -> None:
    return None


class Guarded(Followed, Protocol):
    """A storage."""

    followers: Followers
    generations: Any

    @property
    def compilable(self) -> bool: ...


class Guard:
    """The lock and the transactions of one storage.

    Attributes:
        lock: excludes threads and, once the storage is shared, processes.
        journal: the record of the open transaction. It records nothing until it is started.
        device_writes: the writes of rows on a device that programs write; None for other rows.
    """

    def __init__(self, storage: Guarded) -> None:
        self._storage = weakref.ref(storage)
        self.lock = StorageLock(self)
        self.journal = Journal()
        self.device_writes: DeviceWrites | None = None
        self._counters: torch.Tensor | None = None  # shared memory of the ring, if there is no record
        self._shareable: Callable[[], Shareable | None] = _no_table

    def held(self) -> contextlib.AbstractContextManager[Any]:
        """Hold the lock. Reentrant. Rolls back what another process left unfinished, before anything else."""
        return self.lock.held()

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """A transaction: commits on exit, rolls back on an error. Inside another one it is a part of that."""
        return self.journal.part()

    def recover(self) -> None:
        """Roll back a write that a killed process or a signal left unfinished. The lock is held, no transaction is open."""
        self.journal.recover_interrupted()
        if self.device_writes is not None:
            self.device_writes.drop()

    def replace(self, change: Callable[[], None]) -> None:
        """Make a checked change in a transaction. If it is interrupted, it is made again before the exception is raised."""
        replaced([self], change)

    @property
    def is_read_only(self) -> bool:
        """Whether every transaction is refused."""
        return isinstance(self.journal, ReadOnly)

    # ------------------------------------------------------------------ other processes

    def guards(self, table: Shareable) -> None:
        """Share this table when the storage is shared. Does not keep it alive."""
        self._shareable = weakref.ref(table)

    @property
    def shareable(self) -> Shareable:
        """What the storage shares with other processes."""
        return self._shareable() or UNSHARED

    @property
    def is_shared(self) -> bool:
        """Whether the lock excludes processes."""
        return self.lock.processes is not None

    def share(self) -> None:
        """Share rows and counters with processes started or forked from now on. O(1) if they are shared already."""
        if not self.is_shared:
            with self.held():
                self.start_sharing()

    def start_sharing(self) -> None:
        """Move rows and counters to where other processes see them, and exclude processes from now on. The lock is held."""
        storage = self._storage()
        assert storage is not None
        self.shareable.start_sharing(storage)
        self.shareable.start_record()
        if not self.journal.is_wanted and self._counters is None and not storage.compilable:
            self._counters = in_shared_memory(torch.zeros(CELLS, dtype=torch.int64, device="cpu"))
            storage.ring.use(self._counters.numpy().data, copy=True)
        if storage.generations is not None:
            storage.generations.share(storage)
        self.lock.share()
        self.released()

    def shares_in_forks(self) -> bool:
        """Whether forked children share the storage without being asked."""
        storage = self._storage()
        return storage is not None and not storage.compilable and self.shareable.shares_in_forks()

    def rows_are_shared(self) -> bool:
        """Whether other processes see what is written into the rows."""
        return self.shareable.is_shared()

    def refuse_forked_child(self) -> None:
        """RuntimeError in a forked child that does not share memory and counters with its parent."""
        if self.lock.forked and not (self.is_shared and self.rows_are_shared()):
            raise RuntimeError(
                f"this {type(self._storage()).__name__} is in memory that a forked process does not share, and can only be "
                "read here: use a LazyTensorStorage on the CPU and call share() on the buffer before the fork, or a "
                "LazyMemmapStorage (both without compilable=True), or build the buffer in the process that writes to it; "
                "nothing was written"
            )

    def acquired(self) -> None:
        """The lock was taken by the outermost `held`, of a storage that processes may share."""
        storage = self._storage()
        if storage is None:
            return
        self.shareable.look()
        self.recover()
        seen = storage.followers.seen
        if seen is not None and not self.lock.forked:
            storage.followers.report(storage, seen)

    def released(self) -> None:
        """The lock is about to be released: other processes may write."""
        storage = self._storage()
        if storage is not None:
            follows = storage.followers.is_watching and self.is_shared
            storage.followers.seen = counts_of(storage) if follows else None

    def given(self) -> dict[str, Any]:
        """What `take` needs in a process that is starting. The storage is shared."""
        return {"lock": self.lock.give(), "journal": self.journal, "counters": self._counters}

    def take(self, given: dict[str, Any]) -> None:
        """Guard the storage together with the process that has given this."""
        storage = self._storage()
        assert storage is not None
        self.lock.take(given["lock"])
        self.journal, self._counters = given["journal"], given["counters"]
        if self._counters is not None:
            storage.ring.use(self._counters.numpy().data, copy=False)


def replaced(guards: Sequence[Guard], change: Callable[[], None]) -> None:
    """Make a change in a transaction of each storage. An interrupted one is made again before the exception is raised.

    The locks are held. `change` may run twice, and was checked before: an error of its own comes again.
    """

    def run() -> None:
        with contextlib.ExitStack() as transactions:
            for guard in guards:
                transactions.enter_context(guard.transaction())
            change()

    try:
        run()
    except BaseException:
        with uninterrupted():
            for guard in guards:
                guard.recover()
            run()
        raise
