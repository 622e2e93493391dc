"""What of a tensor storage a killed process may leave half-done: its counters, those of its writers, and its rows."""

import weakref
from typing import Any

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt
from interop.shared.saved_rows import Rows
from interop.shared.undo import EXTRAS, Cell, Memory, Undo, settle

LENGTH, WRITTEN, END, EDITS, WRITER, EMPTIED = range(6)  # cells; WRITER is where those of the last one to write are
_WRITERS, _CELLS = 8, 1024  # cells of writers are from here to there: a cursor and a count each
_LARGEST = 8 << 20  # bytes of rows in a record, where a row is not larger
_PAGE = 4096
_MANY = 2**63 - 2**40  # what counters are below, so that there is more to be counted
PRIORITIES = 1  # a further column


class Journal(Undo):
    """The undo record of a storage, of its rows on the host and of the writers that were registered on it.

    Until it is started, with the memory of the rows, a step records nothing: there is nothing to be undone.
    """

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self._of: Any = None  # the storage, by a weak reference
        self.shared = False  # whether other processes may have its cells
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()  # writers
        self._places: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._resumes = False  # whether the next writer goes on where another one was

    @staticmethod
    def size(row: int, leaves: int, per_row: int, rows: int) -> int:
        """Bytes of memory for rows of so many bytes, leaves and items."""
        row += 8 * (per_row + 1)  # with priorities, and its number
        log = max(min(_LARGEST, rows * row), row) + 16 * (leaves + 8)
        return -(-(Undo.before_log(_CELLS) + log) // _PAGE) * _PAGE

    @staticmethod
    def size_for(storage: Any) -> int:
        """The same for a storage; for one of which nothing is known yet, for rows of up to 64 MiB."""
        if storage._rows is None:
            return Journal.size(8 * _LARGEST, 1000, 1, 1)
        leaves = storage._rows.tensors
        row = max(sum(leaf[:1].nbytes for leaf in leaves), _LARGEST if storage.may_renew() else 0)
        return Journal.size(row, len(leaves), storage._per_row, storage._row_count)

    def start(self, storage: Any, memory: Memory) -> None:
        """Keep the counters of the storage and of its writers here from now on, and guard its rows."""
        held = storage._length.value, storage._ledger.written, storage._ledger.end, storage._ledger.edits
        self._open(storage, memory)
        for place, value in enumerate(held):
            self._cells[place] = value
        self._count(storage)
        for writer in list(self._waiting):
            self.enlist(writer)
        if self._inside:  # in the first write
            self._arm()

    def resume(self, storage: Any, memory: Memory) -> None:
        """The same with counters as a storage before left them. What it was killed in is put back."""
        self._open(storage, memory)
        self._only_extras_here()
        self.recover()
        last = int(self._cells[WRITER])
        if last and not _WRITERS <= last < self._counted - 1:
            raise CheckpointCorrupt(f"{memory.path}: the counters are damaged")
        with self:
            self._cells[_WRITERS], self._cells[_WRITERS + 1] = self.writer
            self._cells[WRITER] = _WRITERS if last else 0
        self._use(_WRITERS + 2 if last else _WRITERS)
        self._resumes = last > 0
        self._count(storage)
        self._check(storage)

    def read(self, storage: Any, memory: Memory) -> None:
        """Give a storage the counters as they are now, between two steps, of memory and for rows that are private."""
        settle(memory, _CELLS)
        self._open(storage, memory)
        self._only_extras_here()
        self.recover()
        last = int(self._cells[WRITER])
        if last and not _WRITERS <= last < self._counted - 1:
            raise CheckpointCorrupt(f"{memory.path}: the counters are damaged")
        storage._length.value = self._cells[LENGTH]
        storage._ledger.restored(self._cells[WRITTEN], self._cells[END])
        self._check(storage)

    def _check(self, storage: Any) -> None:
        """CheckpointCorrupt for counters that no storage of this size has."""
        assert self.memory is not None
        length, rows, per_row = storage._length.value, storage._row_count, storage._per_row
        (cursor, count), end = self.writer, storage._ledger.end
        fits = 0 <= length <= rows * per_row and length % per_row == 0 and max(cursor, end) < max(rows, 1)
        grow = count, *(self._cells[place] for place in (WRITTEN, EDITS, EMPTIED))
        if not (fits and min(cursor, end, count, storage._ledger.written) >= 0 and max(grow) < _MANY):
            raise CheckpointCorrupt(f"{self.memory.path}: the counters are damaged")

    @property
    def writer(self) -> tuple[int, int]:
        """The cursor and the count of the writer that wrote last."""
        last = self._cells[WRITER]
        return (self._cells[last], self._cells[last + 1]) if last else (0, 0)

    def attach(self, storage: Any) -> None:
        """Guard the rows of a storage in a worker, which has the counters already."""
        assert self.memory is not None
        self._open(storage, self.memory)

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
        self._begin(memory.bytes, _CELLS)
        self._use(max(self._counted, _WRITERS))
        self._take(storage)

    def _take(self, storage: Any) -> None:
        self._of = weakref.ref(storage)
        self._rows, self._seen = storage._rows, None
        kept = storage._priorities
        self.add(PRIORITIES, 8 * storage._per_row, None if kept is None else kept.by_row)
        self._look()

    def drop_priorities(self) -> None:
        """Nobody keeps any: others make theirs anew."""
        self._extras.clear()
        self._only_extras_here()

    def _find(self) -> None:
        storage = self._of()
        if self._head[EXTRAS] and storage is not None and storage._priorities is None:
            storage._find_priorities()
        super()._find()

    def _count(self, storage: Any) -> None:
        assert self.memory is not None
        storage._length, *counts = (Cell(self.memory, place) for place in (LENGTH, WRITTEN, END, EDITS))
        storage._ledger.keep(*counts)

    def _look(self) -> None:
        """See to it that the columns are those of the rows: their memory may have moved."""
        held = None if self._rows is None else self._rows._numpy
        if held is not None and held is not self._seen:
            self._seen = held
            self._watch(list(held))

    # ------------------------------------------------------------------ writers

    def enlist(self, writer: Any) -> None:
        """Keep the counters of a writer here. RuntimeError where there have been too many."""
        if self.memory is None:
            self._waiting.add(writer)
            return
        held = writer._cursor_cell
        if isinstance(held, Cell) and held.memory is self.memory:
            return
        values = None if self._resumes else (writer._cursor, writer.write_count)
        place = _WRITERS if self._resumes else self._free()
        self._resumes = False
        self._places[place] = writer
        if values is not None:
            self._cells[place], self._cells[place + 1] = values
            if place == self._counted:
                self._use(place + 2)
        writer._count_in(Cell(self.memory, place), Cell(self.memory, place + 1))

    def _free(self) -> int:
        counted: int = self._head[3]  # by any process
        if not self.shared:
            for place in range(_WRITERS, counted, 2):
                if place not in self._places:
                    return place
        if counted + 2 > _CELLS:
            raise RuntimeError("too many writers were registered on the storage: use the same one again")
        return counted

    def wrote(self, writer: Any) -> None:
        """This writer was the last to write."""
        if self.memory is not None:
            self._cells[WRITER] = writer._cursor_cell.place

    @property
    def emptied(self) -> int:
        """How often the storage was emptied."""
        found: int = self._cells[EMPTIED] if self.memory is not None else 0
        return found

    def empty(self) -> None:
        """Count that it was."""
        if self.memory is not None:
            self._cells[EMPTIED] += 1

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
        self._cursor, self._count = self.writer = journal.writer
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

    def enlist(self, writer: Any) -> None:
        """Tell a writer where the one stands that wrote the rows."""
        writer._cursor, writer._write_count = self._cursor, self._count


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
