"""What happened to the rows of a storage, for those who keep something about them and want to catch up."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from interop.host.seams import Seams, pieces
from interop.shared.shared_int import SharedInt

_KEPT = 64  # edits that are remembered one by one
_PIECES = 16  # of a write elsewhere, of which the seams are remembered


class Ledger:
    """Counts rows written around the ring, and lists edits of rows elsewhere. Processes that share rows share the counts."""

    def __init__(self) -> None:
        self._written = SharedInt()
        self._end = SharedInt()
        self._edits = SharedInt()
        self._named: deque[tuple[int, Any]] = deque(maxlen=_KEPT)  # of this process
        self._seams: Seams | None = None  # once there was one in this process

    def keep(self, written: SharedInt, end: SharedInt, edits: SharedInt) -> None:
        """Count in these from now on."""
        self._written, self._end, self._edits = written, end, edits

    @property
    def written(self) -> int:
        """Rows ever written by runs, one after the other around the ring."""
        return self._written.value

    @property
    def end(self) -> int:
        """The row behind the one that was written last."""
        return self._end.value

    @property
    def edits(self) -> int:
        """How often rows were written otherwise."""
        return self._edits.value

    @property
    def counts(self) -> tuple[int, int, int]:
        """`written`, `end` and `edits`."""
        return self._written.value, self._end.value, self._edits.value

    def run(self, start: int, count: int, capacity: int) -> None:
        """Rows were written from `start` on, around the ring."""
        if start != self._end.value or self._seams:
            if not count:
                return
            self._part(start, count, capacity, self._settled())
        self._end.value = (start + count) % capacity
        self._written.value += count

    def _settled(self) -> tuple[int, int]:
        """What tells one state of the ring from another; the seams are those of this one."""
        counts = self._written.value, self._edits.value
        if self._seams is not None:
            self._seams.settle(counts)
        return counts

    def _part(self, start: int, count: int, capacity: int, counts: tuple[int, int]) -> None:
        if start != self._end.value:
            self.edit(None)
            self._seams = Seams() if self._seams is None else self._seams
        if self._seams is not None:
            self._seams.write(start, count, self._end.value, capacity, counts)

    def scattered(self, rows: np.ndarray, capacity: int) -> None:
        """Rows were written in this order, wherever they are. Of many pieces only the last one's end is a seam: whoever
        writes so, such as a writer that keeps the highest-ranked, makes no stream of rows."""
        counts, parts = self._settled(), pieces(rows, capacity)
        if len(parts) > _PIECES:
            parts = []
            self._end.value = (int(rows[-1]) + 1) % capacity
        for start, count in parts:
            self._part(start, count, capacity, counts)
            self._end.value = (start + count) % capacity
        self.edit(None)

    def replaced(self, start: int, stop: int, count: int, capacity: int) -> None:
        """So many rows were written where those from `start` to `stop` were, and the ones behind moved."""
        counts, end, by = self._settled(), self._end.value, count - (stop - start)
        if self._seams is not None:
            self._seams.move(start, stop, by)
        if end > start:
            self._end.value = end + by if end >= stop else start + count
        self._part(start, count, capacity, counts)
        self._end.value = (start + count) % capacity
        self.edit(None)

    def seams(self) -> Iterable[int]:
        """Row numbers other than `end` that do not follow from the row before, as far as this process knows."""
        self._settled()
        return () if self._seams is None else self._seams

    def edit(self, rows: Any, end: int | None = None) -> None:
        """Rows were written where they are, or the storage was changed as a whole (None)."""
        edits = self._edits.value + 1
        self._edits.value = edits
        self._named.append((edits, rows))
        if end is not None:
            self._end.value = end

    def renewed(self, end: int) -> None:
        """All rows are others, or none are there any more."""
        self.edit(None, end)
        self._seams = None

    def restored(self, written: int, end: int) -> None:
        """All rows are others, as they were when these were the counts."""
        self.renewed(end)
        self._written.value = written

    def since(self, edits: int) -> list[Any] | None:
        """The rows of every edit after the first `edits`; None where one is not known."""
        named = [rows for number, rows in self._named if number > edits]
        return named if len(named) == self.edits - edits and all(rows is not None for rows in named) else None

    def __getstate__(self) -> dict[str, Any]:
        return {"counts": (self._written, self._end, self._edits), "seams": self._seams}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._written, self._end, self._edits = state["counts"]
        self._seams = state.get("seams")
        self._named = deque(maxlen=_KEPT)
