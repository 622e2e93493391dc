"""Undo records: rows are saved before they are overwritten, and put back if the process that writes is killed.

Before its first change a transaction saves the counters and then, one after the other, the rows that it will overwrite. One
store of 8 bytes begins it, another one commits it. The stores of a killed process were done in their order, into shared
memory or files, so that nothing has to be flushed. Power failures are another matter: checkpoints survive those.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt
from interop.host.ring import CELLS, Ring
from interop.host.threads import renew_in_children
from interop.shared.folder_description import ACTIVE, COMMITS, HEAD
from interop.shared.memory import Memory

RowNumbers = range | np.ndarray
LARGEST = 8 << 20  # bytes of rows in a record, unless one row is larger
LARGE = 1 << 19  # bytes from which torch's threaded copy is faster
_PAGE = 4096
# Words of the head. ACTIVE is not zero in a transaction; _EXTRA says whether some process keeps the extra column.
_USED, _EXTRA = 1, 5
_ENTRY = 3  # words before some saved rows: the first row or -1, how many, whether the extra column is saved
_PART = contextlib.nullcontext()
_PATIENCE, _PAUSE = 0.2, 1e-3  # seconds that another process may take for a transaction, and between two looks at it
_ENOUGH = 30.0  # seconds after which a reader gives up


class RowBytes:
    """The bytes of the rows of an array [rows, ...]."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.size, self.rows = array[:1].nbytes, array.shape[0]
        dense = array.flags.c_contiguous and self.size > 0
        self._bytes = array.reshape(array.shape[0], -1).view(np.uint8) if dense else None
        self._flat = None if self._bytes is None else self._bytes.reshape(-1)

    def save(self, rows: RowNumbers, out: np.ndarray) -> None:
        """Copy rows to `out`."""
        if self._flat is None or self._bytes is None:
            out[:] = np.ascontiguousarray(self._array[_index(rows)]).reshape(-1).view(np.uint8)
        elif isinstance(rows, range):
            held = self._flat[rows.start * self.size : rows.stop * self.size]
            if held.size < LARGE:
                out[:] = held
            else:
                torch.from_numpy(out).copy_(torch.from_numpy(held))
        else:
            self._bytes.take(rows, 0, out.reshape(-1, self.size), mode="clip")

    def restore(self, rows: RowNumbers, saved: np.ndarray) -> None:
        """Copy saved bytes back to rows."""
        at = _index(rows)
        if self._bytes is not None:
            self._bytes[at] = saved.reshape(-1, self.size)
        else:
            self._array[at] = saved.copy().view(self._array.dtype).reshape(self._array[at].shape)


def _index(rows: RowNumbers) -> slice | np.ndarray:
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows


class Undo:
    """An undo record of counters and rows. `with undo:` is a transaction: it commits, or rolls back on an error.

    Transactions are not nested; `with undo.part():` joins the open one. The caller holds a lock.
    """

    memory: Memory | None = None
    find_extra: Callable[[], None] | None = None  # calls `keep_extra` for a column that another process has made
    _inside = False  # whether this process is in a transaction
    _head: Any = None
    _last_spans: tuple[int | None, list[Any], int]

    def _begin(self, memory: np.ndarray, cells: int) -> None:
        """Use this memory: zeros, or a record of an earlier process."""
        words = memory[: self.before_log(cells)].view(np.int64)
        held: Any = memoryview(words.data)
        self._head, self._cells, self._saved = held[:HEAD], held[HEAD : HEAD + cells], held[HEAD + cells :]
        self._log, self._log_start = memory[words.nbytes :], words.nbytes
        self._words: Any = memoryview(self._log.data).cast("q")
        self._columns: list[RowBytes] = []
        self._extra: RowBytes | None = None
        self._extra_size = 0  # bytes of a row of the extra column, whether it is here or not
        self._looked = False  # whether some process keeps the extra column, as far as this one knows
        self._measure()
        if not (0 <= self.commits < 2**62 and 0 <= self._head[ACTIVE] < 2**62):
            raise self._damaged()
        renew_in_children(self.renew)

    @staticmethod
    def before_log(cells: int) -> int:
        """Bytes of the memory before the log."""
        return 8 * (HEAD + 2 * cells)

    def renew(self) -> None:
        self._inside = False

    def _damaged(self) -> CheckpointCorrupt:
        where = "" if self.memory is None or self.memory.path is None else f"{self.memory.path}: "
        return CheckpointCorrupt(f"{where}the undo record of the last write is damaged")

    @property
    def active(self) -> bool:
        """Whether a transaction was begun and not ended, by any process."""
        return self._head is not None and bool(self._head[ACTIVE])

    @property
    def commits(self) -> int:
        """The number of committed transactions."""
        found: int = self._head[COMMITS]
        return found

    # ------------------------------------------------------------------ transactions

    def __enter__(self) -> None:
        if self._inside:  # a signal has interrupted the end of the last one
            self.recover()
        if self._head is not None:
            self._arm()
        self._inside = True  # last: a signal before it has begun nothing

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._head is not None:
            if kind is None:
                self._commit()
            else:
                self.recover()
        self._inside = False

    def recover_interrupted(self) -> None:
        """Roll back a transaction that a signal, or the end of its process, left open. Outside of a transaction."""
        if self._inside or self.active:
            self.recover()
            self._inside = False

    def part(self) -> contextlib.AbstractContextManager[Any]:
        """Joins the transaction of this process, or is one."""
        return _PART if self._inside else self

    def _arm(self) -> None:
        head = self._head
        if bool(head[_EXTRA]) != self._looked:
            self._find()
        self._saved[:] = self._cells
        head[_USED] = 0
        head[ACTIVE] = head[COMMITS] + 1

    def _commit(self) -> None:
        self._head[ACTIVE] = 0
        self._head[COMMITS] += 1

    def cut(self) -> None:
        """Commit, and begin another transaction."""
        self._commit()
        self._arm()

    # ------------------------------------------------------------------ columns

    def _watch(self, columns: list[np.ndarray]) -> None:
        """Save rows of these arrays from now on."""
        self._columns = [RowBytes(array) for array in columns]
        self._measure()

    def keep_extra(self, size: int, array: np.ndarray | None) -> None:
        """Save an extra column of `size` bytes a row; None if this process does not have its array."""
        self._extra_size = size
        if array is not None:
            self._extra = RowBytes(array)
            self._head[_EXTRA] = self._looked = True
        self._measure()

    def drop_extra(self) -> None:
        """No process keeps the extra column any more."""
        self._extra = None
        self._only_extra_here()

    @property
    def has_extra(self) -> bool:
        """Whether some process keeps the extra column."""
        return bool(self._head[_EXTRA])

    def _only_extra_here(self) -> None:
        """No other process keeps the extra column."""
        self._head[_EXTRA] = self._looked = self._extra is not None

    def _find(self) -> None:
        if self.find_extra is not None:
            self.find_extra()
        self._looked = self.has_extra

    def _measure(self) -> None:
        self._row = sum(column.size for column in self._columns) + (0 if self._extra is None else self._extra.size)
        self._last_spans = (None, [], 0)

    # ------------------------------------------------------------------ rows

    def _need(self, count: int) -> int:
        """Bytes of the log for `count` rows, in one entry or two."""
        columns = len(self._columns) + (self._extra is not None)
        return count * (self._row + 8) + 2 * 8 * (_ENTRY + columns)

    @property
    def most(self) -> int:
        """How many rows fit into one transaction, at least one."""
        return max(1, (self._log.size - self._need(0)) // (self._row + 8))

    def fits(self, count: int) -> bool:
        """Whether `count` rows fit into one transaction."""
        return self._need(count) <= self._log.size

    def reserve(self, count: int) -> None:
        """Make room for `count` rows. If the log is too full this commits and begins another transaction."""
        if self._head[_USED] and self._head[_USED] + self._need(count) > self._log.size:
            self.cut()

    def save(self, rows: RowNumbers) -> None:
        """Save rows before they are overwritten. There must be room for them."""
        count, head = len(rows), self._head
        if not count:
            return
        spans, total = self._spans(count)
        listed = 0 if isinstance(rows, range) else count
        at: int = head[_USED]
        end = at + 8 * (_ENTRY + listed) + total
        if end > self._log.size:
            raise RuntimeError(
                f"{count} rows are too large for the memory that processes share to take them back: share the storage after "
                "such a row was written; nothing was written"
            )
        if self.memory is not None and self._log_start + end > self.memory.reserved:
            self.memory.reserve(self._log_start + end)  # an error rolls the transaction back
        place = at // 8
        self._words[place] = rows.start if isinstance(rows, range) else -1
        self._words[place + 1], self._words[place + 2] = count, int(self._extra is not None)
        at += 8 * (_ENTRY + listed)
        if not isinstance(rows, range):
            self._log[at - 8 * listed : at].view(np.int64)[:] = rows
        for column, start, stop in spans:
            column.save(rows, self._log[at + start : at + stop])
        head[_USED] = at + total

    def _spans(self, count: int) -> tuple[list[tuple[Any, int, int]], int]:
        """`_cut_up` for the columns that are here; most transactions have as many rows as the last."""
        if self._last_spans[0] != count:
            self._last_spans = (count, *self._cut_up(count, self._extra is not None))
        return self._last_spans[1:]

    def _cut_up(self, count: int, extra: bool) -> tuple[list[tuple[Any, int, int]], int]:
        """Where the saved bytes of each column start and stop, and their total; None for a column that is not here."""
        spans: list[tuple[Any, int, int]] = []
        at = 0
        columns: list[tuple[Any, int]] = [(column, column.size) for column in self._columns]
        for column, size in [*columns, (self._extra, self._extra_size)] if extra else columns:
            spans.append((column, at, at + count * size))
            at += -(-count * size // 8) * 8
        return spans, at

    def recover(self) -> bool:
        """Roll back an open transaction. Returns whether there was one. May be killed, and repeated."""
        if not self.active:
            return False
        if self.has_extra != self._looked:
            self._find()
        for rows, saved in reversed(list(self._entries())):
            for column, held in saved:
                column.restore(rows, held)
        self._cells[:] = self._saved
        self._head[ACTIVE] = 0
        return True

    def _entries(self) -> Iterator[tuple[RowNumbers, list[tuple[RowBytes, np.ndarray]]]]:
        at, used = 0, self._head[_USED]
        while at < used <= self._log.size:
            first, count, extra = self._words[at // 8 : at // 8 + _ENTRY]
            at += 8 * _ENTRY
            rows: RowNumbers = range(first, first + count)
            if first < 0:
                rows = self._log[at : at + 8 * count].view(np.int64).copy()
                at += 8 * count
            if count <= 0 or extra not in (0, 1) or not self._are_rows(rows, count):
                break
            spans, total = self._cut_up(count, bool(extra))
            if at + total > used:
                break
            yield rows, [(column, self._log[at + start : at + stop]) for column, start, stop in spans if column]
            at += total
        if at != used:
            raise self._damaged()

    def _are_rows(self, rows: RowNumbers, count: int) -> bool:
        """Whether these are `count` existing rows."""
        every = [*self._columns, *([] if self._extra is None else [self._extra])]
        there = min(column.rows for column in every)
        if isinstance(rows, range):
            return rows.stop <= there
        return rows.size == count and rows.min() >= 0 and rows.max() < there


def settle(memory: Memory, cells: int) -> None:
    """Make private memory hold a record as it was between two transactions, though a process may be writing it.

    An open transaction of a working process does not count. That of a process that stands still is left to `recover`.
    O(cells), and O(log) for that; up to 0.2 s in the middle of a transaction. RuntimeError if the record changes at each
    look for 30 s.
    """
    size, seen = Undo.before_log(cells), memory.read_only
    assert seen is not None
    words, own = seen[:size].view(np.int64), memory.bytes[:size].view(np.int64)
    head, first, moved, found = words[:HEAD], None, False, False
    begun = time.monotonic()
    while not found or time.monotonic() < begun + _PATIENCE:
        held, now = head.tolist(), words.copy()
        first = first or held
        moved = moved or held != first
        if head.tolist() == held:
            own[:], found = now, True
            own[:HEAD] = held
            if not held[ACTIVE]:
                return
        else:
            moved = True
            if time.monotonic() > begun + _ENOUGH:
                raise RuntimeError(f"{memory.path} changes faster than it can be read: open it again in a quiet moment")
        time.sleep(_PAUSE)
    if not moved:  # for all that time: the process has ended, or is doing something else
        used = size + min(max(int(own[_USED]), 0), seen.size - size)
        memory.bytes[size:used] = seen[size:used]
        if head.tolist() == first:
            return
    own[HEAD : HEAD + cells] = own[HEAD + cells :]
    own[ACTIVE] = 0


# ---------------------------------------------------------------------- the record of a storage


class HostRows(Protocol):
    """Rows whose leaves NumPy views. The views change when the memory of the rows moves."""

    @property
    def host_arrays(self) -> list[np.ndarray] | None: ...


class Recorded(NamedTuple):
    """What a journal saves: rows with `per_row` items each, and the priorities of these, [rows, per_row]."""

    rows: HostRows | None
    per_row: int
    priorities: np.ndarray | None


class Journal(Undo):
    """The undo record of a storage: its counters, its rows on the host, and their priorities as the extra column.

    It records nothing until it is started, with the memory of the rows.

    Attributes:
        path: the file of the record, now or later; None for a record in shared memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.memory: Memory | None = None
        self.path = path
        self._rows: HostRows | None = None
        self._seen: list[np.ndarray] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether it records writes, or will once there are rows."""
        return self.memory is not None or self.path is not None

    @staticmethod
    def size(row: int, leaves: int, per_row: int, rows: int) -> int:
        """Bytes of memory for rows of `row` bytes, so many leaves and `per_row` items."""
        row += 8 * (per_row + 1)  # with priorities, and the number of the row
        log = max(min(LARGEST, rows * row), row) + 16 * (leaves + 8)
        return -(-(Undo.before_log(CELLS) + log) // _PAGE) * _PAGE

    @staticmethod
    def size_unknown() -> int:
        """Bytes of memory for a storage whose rows are not known yet: up to 64 MiB each."""
        return Journal.size(8 * LARGEST, 1000, 1, 1)

    def start(self, ring: Ring, memory: Memory | None = None) -> None:
        """Keep the counters of a storage in the record from now on; by default in the file at `path`."""
        if memory is None:
            assert self.path is not None
            memory = Memory(os.path.getsize(self.path), self.path)
        self._open(memory)
        ring.use(self._cells, copy=True)
        if self._inside:  # in the first write
            self._arm()

    def resume(self, ring: Ring, memory: Memory, capacity: int, guarded: Recorded) -> None:
        """Continue the record of an earlier process, and roll back its open transaction. CheckpointCorrupt for damage."""
        if memory.read_only is not None:
            settle(memory, CELLS)
        self._open(memory)
        self._take(guarded)
        self._only_extra_here()
        self.recover()
        ring.use(self._cells, copy=False)
        if not ring.fits(capacity):
            raise CheckpointCorrupt(f"{memory.path}: the counters are damaged")

    def attach(self, ring: Ring) -> None:
        """Use the record in a worker."""
        assert self.memory is not None
        self._open(self.memory)
        ring.use(self._cells, copy=False)

    def _open(self, memory: Memory) -> None:
        self.memory = memory
        self._begin(memory.bytes, CELLS)

    def guard(self, ring: Ring, guarded: Recorded) -> None:
        """Record writes of these rows from now on."""
        if self.memory is None:
            self.start(ring)
        elif self.memory.grow():
            self.attach(ring)
        self._take(guarded)

    def _take(self, guarded: Recorded) -> None:
        self._rows, self._seen = guarded.rows, None
        self.keep_extra(8 * guarded.per_row, guarded.priorities)
        self._look()

    def _look(self) -> None:
        """Watch the arrays of the rows, whose memory may have moved."""
        held = None if self._rows is None else self._rows.host_arrays
        if held is not None and held is not self._seen:
            self._seen = held
            self._watch(held)

    def save(self, rows: RowNumbers) -> None:
        self._look()
        super().save(rows)

    def recover(self) -> bool:
        if self.active:
            self._look()
        return super().recover()

    def __getstate__(self) -> dict[str, Any]:
        return {"memory": self.memory, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]
        self.memory = state["memory"]


class ReadOnly(Journal):
    """The journal of a storage that cannot be written: transactions raise RuntimeError."""

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


def counted(rows: Any, filled: int) -> RowNumbers:
    """The rows of resolved places that are stored."""
    if isinstance(rows, int):
        return range(rows, min(rows + 1, filled))
    if isinstance(rows, slice):
        if rows.step in (None, 1):
            return range(rows.start, max(rows.start, min(rows.stop, filled)))
        named = np.arange(rows.start, rows.stop, rows.step)
    else:
        named = rows.reshape(-1).numpy()
    return named[named < filled]
