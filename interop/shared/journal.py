"""What a killed process may leave half-done of a tensor storage: its counters and its rows."""

import weakref
from typing import Any

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt
from interop.host.ring import CELLS, EMPTIED
from interop.shared.saved_rows import Rows
from interop.shared.undo import EXTRAS, Memory, Undo, settle

_LARGEST = 8 << 20  # bytes of rows in a record, where a row is not larger
_PAGE = 4096
PRIORITIES = 1  # a further column


class Journal(Undo):
    """The undo record of a storage: of its counters, and of its rows on the host.

    Until it is started, with the memory of the rows, a step records nothing: there is nothing to be undone.
    """

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self._of: Any = None  # the storage, by a weak reference
        self.shared = False  # whether other processes may have its cells

    @staticmethod
    def size(row: int, leaves: int, per_row: int, rows: int) -> int:
        """Bytes of memory for rows of so many bytes, leaves and items."""
        row += 8 * (per_row + 1)  # with priorities, and its number
        log = max(min(_LARGEST, rows * row), row) + 16 * (leaves + 8)
        return -(-(Undo.before_log(CELLS) + log) // _PAGE) * _PAGE

    @staticmethod
    def size_for(storage: Any) -> int:
        """The same for a storage; for one of which nothing is known yet, for rows of up to 64 MiB."""
        if storage.rows is None:
            return Journal.size(8 * _LARGEST, 1000, 1, 1)
        leaves = storage.rows.tensors
        row = max(sum(leaf[:1].nbytes for leaf in leaves), _LARGEST if storage.may_renew() else 0)
        return Journal.size(row, len(leaves), storage._per_row, storage.row_count)

    def start(self, storage: Any, memory: Memory) -> None:
        """Keep the counters of the storage here from now on, and guard its rows."""
        self._open(storage, memory)
        storage.ring.use(self._cells, copy=True)
        if self._inside:  # in the first write
            self._arm()

    def resume(self, storage: Any, memory: Memory) -> None:
        """The same with the counters that a storage before this one left. The write in which it was killed is undone."""
        self._open(storage, memory)
        self._only_extras_here()
        self.recover()
        self._count_for(storage)

    def read(self, storage: Any, memory: Memory) -> None:
        """Give a storage the counters between two steps, of memory and for rows that are private."""
        settle(memory, CELLS)
        self.resume(storage, memory)

    def _count_for(self, storage: Any) -> None:
        """Have the storage count here. CheckpointCorrupt for counters that no storage of this size has."""
        assert self.memory is not None
        storage.ring.use(self._cells, copy=False)
        if not storage.ring.fits(storage.row_capacity(None)):
            raise CheckpointCorrupt(f"{self.memory.path}: the counters are damaged")

    def attach(self, storage: Any) -> None:
        """Guard the rows of a storage in a worker, which has the counters already."""
        assert self.memory is not None
        self._open(storage, self.memory)
        storage.ring.use(self._cells, copy=False)

    def guard(self, storage: Any) -> None:
        """The storage has rows now."""
        if self.memory is None:
            self.start(storage, storage._journal_memory())
        elif self.memory.grow():
            self.attach(storage)
        else:
            self._take(storage)

    def _open(self, storage: Any, memory: Memory) -> None:
        self.memory = memory
        self._begin(memory.bytes, CELLS)
        self._use(CELLS)
        self._take(storage)

    def _take(self, storage: Any) -> None:
        self._of = weakref.ref(storage)
        self._rows, self._seen = storage.rows, None
        kept = storage.priorities
        self.add(PRIORITIES, 8 * storage._per_row, None if kept is None else kept.by_row)
        self._look()

    def drop_priorities(self) -> None:
        """Nobody keeps any: others make theirs anew."""
        self._extras.clear()
        self._only_extras_here()

    def _find(self) -> None:
        storage = self._of()
        if self._head[EXTRAS] and storage is not None and storage.priorities is None:
            storage._find_priorities()
        super()._find()

    def _look(self) -> None:
        """See to it that the columns are those of the rows: their memory may have moved."""
        held = None if self._rows is None else self._rows._numpy
        if held is not None and held is not self._seen:
            self._seen = held
            self._watch(list(held))

    @property
    def emptied(self) -> int:
        """How often the storage was emptied."""
        found: int = self._cells[EMPTIED] if self.memory is not None else 0
        return found

    # ------------------------------------------------------------------ rows

    def save(self, rows: Rows) -> None:
        self._look()
        super().save(rows)

    def recover(self) -> bool:
        if not self.active:
            return False
        self._look()
        if self._head[EXTRAS] != self._known:
            self._find()
        return super().recover()

    def __getstate__(self) -> dict[str, Any]:
        self.shared = True
        return {"memory": self.memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.memory, self.shared = state["memory"], True


class ReadOnly:
    """What stands in the place of a journal where nothing may be written."""

    shared, active = True, False

    def __init__(self, folder: str, journal: Journal, *, closed: bool = False) -> None:
        assert journal.memory is not None
        self._folder, self._closed = folder, closed
        self.file = journal.memory.file  # whatever is at its path later

    def part(self) -> "ReadOnly":
        return self

    def __enter__(self) -> None:
        if self._closed:
            why = "was closed here, and is read as with mode='r': write to what LazyMemmapStorage.open() gives"
        else:
            why = "was opened with mode='r', nothing can be written to it: open it with mode='r+'"
        raise RuntimeError(f"{self._folder} {why}; nothing was written")

    def __exit__(self, *_: object) -> None:
        pass

    def recover(self) -> bool:
        """There is nothing to put back."""
        return False

    def begin_turn(self) -> None:
        """Nothing was begun."""


def counted(rows: Any, filled: int) -> Rows:
    """Those of the rows that resolved places name which are stored."""
    if isinstance(rows, int):
        return range(rows, min(rows + 1, filled))
    if isinstance(rows, slice):
        if rows.step in (None, 1):
            return range(rows.start, max(rows.start, min(rows.stop, filled)))
        named = np.arange(rows.start, rows.stop, rows.step)
    else:
        named = rows.reshape(-1).numpy()
    return named[named < filled]
