"""Whether the rows of a storage are still the items that they were."""

from interop.storages.storage import Storage


class UnmovedRows:
    """The rows of a storage at one moment, as its ring counts them. Values that are edited in place do not count.

    Of a storage of a user's class, whose ring does not count every write, only those that it counts are seen.

    Args:
        storage: its lock is held, here and in each call.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._counts = self._present()
        self._version = storage.ring.version

    def _present(self) -> tuple[int, int, int, int]:
        ring = self._storage.ring
        return ring.written, ring.cursor, ring.emptied, self._storage.contents.filled_rows

    def still_there(self) -> bool:
        """Whether no row was written, removed or loaded since. Edits count where it is not known which rows they changed."""
        ring = self._storage.ring
        if self._present() != self._counts:
            return False
        if ring.version != self._version:
            if ring.since(self._version) is None:
                return False
            self._version = ring.version
        return True
