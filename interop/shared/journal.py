"""What a killed process may leave half-done of a tensor storage: its counters and its rows."""

import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt
from interop.host.ring import CELLS, Ring
from interop.shared.memory import Memory
from interop.shared.saved_rows import Rows
from interop.shared.undo import EXTRAS, Undo, settle

LARGEST = 8 << 20  # bytes of rows in a record, where a row is not larger
_PAGE = 4096
PRIORITIES = 1  # a further column


class HostRows(Protocol):
    """Rows whose leaves NumPy sees; it may see others after their memory moved."""

    @property
    def host_arrays(self) -> list[np.ndarray] | None: ...


class Guarded(NamedTuple):
    """What a journal guards: rows of so many items, and the priorities of these, [rows, items of a row]."""

    rows: HostRows | None
    per_row: int
    priorities: np.ndarray | None


class Journal(Undo):
    """The undo record of a storage: of its counters, and of its rows on the host.

    Until it is started, with the memory of the rows, it records nothing: there is nothing to be rolled back.

    Attributes:
        path: the file that has the record, or will have it; None for a record in memory that processes share.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.memory: Memory | None = None
        self.path = path
        self._rows: HostRows | None = None
        self._seen: list[np.ndarray] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether it guards the rows, or will when there are some."""
        return self.memory is not None or self.path is not None

    @staticmethod
    def size(row: int, leaves: int, per_row: int, rows: int) -> int:
        """Bytes of memory for rows of so many bytes, leaves and items."""
        row += 8 * (per_row + 1)  # with priorities, and its number
        log = max(min(LARGEST, rows * row), row) + 16 * (leaves + 8)
        return -(-(Undo.before_log(CELLS) + log) // _PAGE) * _PAGE

    @staticmethod
    def size_unknown() -> int:
        """The same for a storage of which nothing is known yet: for rows of up to 64 MiB."""
        return Journal.size(8 * LARGEST, 1000, 1, 1)

    def start(self, ring: Ring, memory: Memory | None = None) -> None:
        """Keep the counters of a storage here from now on. Without memory it is that of the file."""
        if memory is None:
            assert self.path is not None
            memory = Memory(os.path.getsize(self.path), self.path)
        self._open(memory)
        ring.use(self._cells, copy=True)
        if self._inside:  # in the first write
            self._arm()

    def resume(self, ring: Ring, memory: Memory, capacity: int, guarded: "Guarded") -> None:
        """The same with the counters that a storage of so many rows left, before this one. The write in which it was killed
        is rolled back. CheckpointCorrupt for counters that no such storage has."""
        if memory.read_only is not None:
            settle(memory, CELLS)
        self._open(memory)
        self._take(guarded)
        self._only_extras_here()
        self.recover()
        ring.use(self._cells, copy=False)
        if not ring.fits(capacity):
            raise CheckpointCorrupt(f"{memory.path}: the counters are damaged")

    def attach(self, ring: Ring) -> None:
        """Keep the counters of the storage in a worker, of which the record has them already."""
        assert self.memory is not None
        self._open(self.memory)
        ring.use(self._cells, copy=False)

    def _open(self, memory: Memory) -> None:
        self.memory = memory
        self._begin(memory.bytes, CELLS)

    def guard(self, ring: Ring, guarded: "Guarded") -> None:
        """Guard these rows from now on."""
        if self.memory is None:
            self.start(ring)
        elif self.memory.grow():
            self.attach(ring)
        self._take(guarded)

    def _take(self, guarded: "Guarded") -> None:
        self._rows, self._seen = guarded.rows, None
        self.add(PRIORITIES, 8 * guarded.per_row, guarded.priorities)
        self._look()

    @property
    def has_extras(self) -> bool:
        """Whether some process keeps priorities."""
        return bool(self._head[EXTRAS])

    def drop_priorities(self) -> None:
        """Nobody keeps any: others make theirs anew."""
        self._extras.clear()
        self._only_extras_here()

    def _look(self) -> None:
        """See to it that the columns are those of the rows: their memory may have moved."""
        held = None if self._rows is None else self._rows.host_arrays
        if held is not None and held is not self._seen:
            self._seen = held
            self._watch(held)

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
        return {"memory": self.memory, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]
        self.memory = state["memory"]


class ReadOnly(Journal):
    """Stands in the place of a journal where nothing may be written."""

    is_wanted = True  # and is never started

    def __init__(self, folder: str, *, closed: bool = False) -> None:
        super().__init__()
        self._folder, self._closed = folder, closed

    def part(self) -> "ReadOnly":
        return self

    def __enter__(self) -> None:
        if self._closed:
            why = "was closed here, and is read as with mode='r': write to what LazyMemmapStorage.open() gives"
        else:
            why = "was opened with mode='r', nothing can be written to it: open it with mode='r+'"
        raise RuntimeError(f"{self._folder} {why}; nothing was written")


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
