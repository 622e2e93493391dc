"""Undo records in memory that outlives a process: what one that was killed left half-done, the next one puts back.

Before the first change a record takes the counters as they are and then, one after the other, the rows that are about to
be written over. One store of 8 bytes puts it into force, another one ends it. A process that is killed has done its stores
in their order, and what they went into is shared memory or a file: nothing has to be flushed. Loss of power is another
matter, for which there are checkpoints.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fbuf.checkpoint import CheckpointCorrupt
from interop.host.threads import renew_in_children
from interop.shared.memory import Memory
from interop.shared.saved_rows import RowBytes, Rows

# Words of the head: the first is not zero in a step, the last one is which extras there are, whoever has them.
ACTIVE, _USED, _COMMITS, EXTRAS = 0, 1, 4, 5
_HEAD = 8  # words
_ENTRY = 3  # words before what is saved of some rows: the first of them or -1, how many, which extras
_PART = contextlib.nullcontext()
_PATIENCE, _PAUSE = 0.2, 1e-3  # seconds that a step of another process may take, and between two looks at it
_ENOUGH = 30.0  # seconds after which a record is not looked at any more


class Undo:
    """A record of counters and rows: `with undo:` is a step, of which all counts or, where it breaks off, nothing.

    A step is within no other; `with undo.part():` is a part of the one that it is in. Who uses it holds a lock.
    """

    memory: Memory | None = None
    find_extras: Callable[[], None] | None = None  # adds those that another process has made
    _inside = False  # whether this process is in a step
    _known = 0  # the extras that were looked for
    _head: Any = None
    _last_spans: tuple[Any, list[Any], int]

    def _begin(self, memory: np.ndarray, cells: int) -> None:
        """Use this memory, of zeros or as a record before left it."""
        words = memory[: self.before_log(cells)].view(np.int64)
        held: Any = memoryview(words.data)
        self._head, self._cells, self._kept = held[:_HEAD], held[_HEAD : _HEAD + cells], held[_HEAD + cells :]
        self._log, self._log_start = memory[words.nbytes :], words.nbytes
        self._words: Any = memoryview(self._log.data).cast("q")
        self._columns: list[RowBytes] = []
        self._extras: dict[int, RowBytes] = {}  # by bit: not every process has them
        self._sizes: dict[int, int] = {}  # bytes a row of all there can be
        self._known = 0
        self._measure()
        if not (0 <= self.commits < 2**62 and 0 <= self._head[ACTIVE] < 2**62):
            raise self._damaged()
        renew_in_children(self)

    @staticmethod
    def before_log(cells: int) -> int:
        """Bytes of the memory that come before the log."""
        return 8 * (_HEAD + 2 * cells)

    def renew(self) -> None:
        self._inside = False

    def _damaged(self) -> CheckpointCorrupt:
        where = "" if self.memory is None or self.memory.path is None else f"{self.memory.path}: "
        return CheckpointCorrupt(f"{where}the record by which the last write is taken back is damaged")

    @property
    def active(self) -> bool:
        """Whether a step was begun and is not over."""
        return self._head is not None and bool(self._head[ACTIVE])

    @property
    def commits(self) -> int:
        """Steps that counted."""
        found: int = self._head[_COMMITS]
        return found

    # ------------------------------------------------------------------ a step

    def __enter__(self) -> None:
        if self._inside:  # one that an interrupt kept from ending
            self.recover()
        if self._head is not None:
            self._arm()
        self._inside = True  # last: an interrupt before it has begun nothing

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._head is not None:
            if kind is None:
                self._commit()
            else:
                self.recover()
        self._inside = False

    def recover_interrupted(self) -> None:
        """Put back what a step did that an interrupt, or the end of its process, kept from ending. Within no step."""
        if self._inside or self.active:
            self.recover()
            self._inside = False

    def part(self) -> contextlib.AbstractContextManager[Any]:
        """A part of the step that this process is in, or else a step."""
        return _PART if self._inside else self

    def _arm(self) -> None:
        head = self._head
        if head[EXTRAS] != self._known:
            self._find()
        self._kept[:] = self._cells
        head[_USED] = 0
        head[ACTIVE] = head[_COMMITS] + 1

    def _commit(self) -> None:
        self._head[ACTIVE] = 0
        self._head[_COMMITS] += 1

    def cut(self) -> None:
        """Have what was done of the step count, and begin another one for the rest."""
        self._commit()
        self._arm()

    # ------------------------------------------------------------------ rows

    def _watch(self, columns: list[np.ndarray]) -> None:
        """Save rows of these arrays."""
        self._columns = [RowBytes(array) for array in columns]
        self._measure()

    def add(self, bit: int, size: int, array: np.ndarray | None) -> None:
        """Save rows of a further array, of so many bytes a row, where it is here: others may have it."""
        self._sizes[bit] = size
        if array is not None:
            self._extras = dict(sorted({**self._extras, bit: RowBytes(array)}.items()))
            self._head[EXTRAS] |= bit
            self._known |= bit
        self._measure()

    def _find(self) -> None:
        """Have the extras that another process has made, where this one can."""
        if self.find_extras is not None:
            self.find_extras()
        self._known = self._head[EXTRAS]

    def _only_extras_here(self) -> None:
        """Nobody else has any: others are gone, or never were."""
        self._head[EXTRAS] = self._known = sum(self._extras)

    def _measure(self) -> None:
        self._row = sum(column.size for column in (*self._columns, *self._extras.values()))
        self._last_spans = (None, [], 0)

    def _need(self, count: int) -> int:
        """Bytes that so many rows take in the log, in one part or two."""
        columns = len(self._columns) + len(self._extras)
        return count * (self._row + 8) + 2 * 8 * (_ENTRY + columns)

    @property
    def most(self) -> int:
        """Rows that fit into one step, at least one."""
        return max(1, (self._log.size - self._need(0)) // (self._row + 8))

    def fits(self, count: int) -> bool:
        """Whether so many rows can be saved in one step."""
        return self._need(count) <= self._log.size

    def reserve(self, count: int) -> None:
        """Have room for so many rows, which fit: without it what was done of the step counts, and another one begins."""
        if self._head[_USED] and self._head[_USED] + self._need(count) > self._log.size:
            self.cut()

    def save(self, rows: Rows) -> None:
        """Keep rows as they are, to be put back. There is room for them."""
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
            self.memory.reserve(self._log_start + end)  # an error ends the step, which is put back
        place = at // 8
        self._words[place] = rows.start if isinstance(rows, range) else -1
        self._words[place + 1], self._words[place + 2] = count, sum(self._extras)
        at += 8 * (_ENTRY + listed)
        if not isinstance(rows, range):
            self._log[at - 8 * listed : at].view(np.int64)[:] = rows
        for column, start, stop in spans:
            column.save(rows, self._log[at + start : at + stop])
        head[_USED] = at + total

    def _spans(self, count: int) -> tuple[list[tuple[Any, int, int]], int]:
        """`_cut_up` by the columns that are here; most steps are of as many rows as the last."""
        if self._last_spans[0] != count:
            self._last_spans = (count, *self._cut_up(count, self._extras))
        return self._last_spans[1:]

    def _cut_up(self, count: int, extras: dict[int, Any]) -> tuple[list[tuple[Any, int, int]], int]:
        """Where the bytes of each column start and stop, and how many there are; None for a column that is not here."""
        spans: list[tuple[Any, int, int]] = []
        at = 0
        every: list[tuple[Any, int]] = [(column, column.size) for column in self._columns]
        for column, size in every + [(column, self._sizes[bit]) for bit, column in extras.items()]:
            spans.append((column, at, at + count * size))
            at += -(-count * size // 8) * 8
        return spans, at

    def recover(self) -> bool:
        """Put back what a step that did not end has changed; whether there was one. May be killed, and run again."""
        if not self.active:
            return False
        for rows, saved in reversed(list(self._entries())):
            for column, held in saved:
                column.put_back(rows, held)
        self._cells[:] = self._kept
        self._head[ACTIVE] = 0
        return True

    def _entries(self) -> Iterator[tuple[Rows, list[tuple[RowBytes, np.ndarray]]]]:
        at, used = 0, self._head[_USED]
        while at < used <= self._log.size:
            first, count, bits = self._words[at // 8 : at // 8 + _ENTRY]
            at += 8 * _ENTRY
            rows: Rows = range(first, first + count)
            if first < 0:
                rows = self._log[at : at + 8 * count].view(np.int64).copy()
                at += 8 * count
            extras = {bit: self._extras.get(bit) for bit in self._sizes if bit & bits}
            if count <= 0 or sum(extras) != bits or not self._are_rows(rows, count):
                break
            spans, total = self._cut_up(count, extras)
            if at + total > used:
                break
            yield rows, [(column, self._log[at + start : at + stop]) for column, start, stop in spans if column]
            at += total
        if at != used:
            raise self._damaged()

    def _are_rows(self, rows: Rows, count: int) -> bool:
        """Whether so many rows were listed, all of which there are."""
        there = min(column.rows for column in (*self._columns, *self._extras.values()))
        if isinstance(rows, range):
            return rows.stop <= there
        return rows.size == count and rows.min() >= 0 and rows.max() < there


def settle(memory: Memory, cells: int) -> None:
    """Have private memory hold a record as it was between two steps, though a process may be writing it: first thing.

    A step of a process that is at work does not count yet. One that stands still is left to be put back by `recover`.
    O(cells), and O(log) for that; up to 0.2 s in the middle of a step. RuntimeError after 30 s of changes at each look.
    """
    size, seen = Undo.before_log(cells), memory.read_only
    assert seen is not None
    words, own = seen[:size].view(np.int64), memory.bytes[:size].view(np.int64)
    head, first, moved, found = words[:_HEAD], None, False, False
    begun = time.monotonic()
    while not found or time.monotonic() < begun + _PATIENCE:
        held, now = head.tolist(), words.copy()
        first = first or held
        moved = moved or held != first
        if head.tolist() == held:
            own[:], found = now, True
            own[:_HEAD] = held
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
    own[_HEAD : _HEAD + cells] = own[_HEAD + cells :]
    own[ACTIVE] = 0


def commits_of(path: str | os.PathLike[str]) -> int:
    """The steps that counted, of a record in a file."""
    with open(path, "rb") as file:
        head = np.frombuffer(file.read(8 * _HEAD).ljust(8 * _HEAD, b"\0"), np.int64)
    return int(head[_COMMITS])
