"""What keeps a storage sound: its lock, among threads and processes, and the record that rolls back unfinished writes.

A write takes the lock, opens a transaction, and saves the rows that it overwrites, where the storage has a record. A process
that takes the lock next rolls back what a killed one has left open.
"""

import contextlib

from interop.shared.journal import Journal, ReadOnly
from interop.shared.storage_lock import Locked, StorageLock


class Guard:
    """The lock and the transactions of one storage.

    Attributes:
        lock: excludes threads and, once the storage is shared, processes.
        journal: the record of the open transaction. It records nothing until it is started.
    """

    def __init__(self, storage: Locked) -> None:
        self.lock = StorageLock(storage)
        self.journal = Journal()

    def held(self) -> contextlib.AbstractContextManager[object]:
        """Hold the lock. Reentrant. Rolls back what another process left unfinished, before anything else."""
        return self.lock.held()

    def transaction(self) -> contextlib.AbstractContextManager[object]:
        """A transaction: commits on exit, rolls back on an error. Inside another one it is a part of that."""
        return self.journal.part()

    def recover(self) -> None:
        """Roll back a write that a killed process or a signal left unfinished. The lock is held, no transaction is open."""
        self.journal.recover_interrupted()

    @property
    def is_read_only(self) -> bool:
        """Whether every transaction is refused."""
        return isinstance(self.journal, ReadOnly)

    @property
    def is_shared(self) -> bool:
        """Whether the lock excludes processes."""
        return self.lock.processes is not None
