"""What happened to the rows of a storage, for those who keep something about them and want to catch up."""

from collections import deque
from typing import Any

from interop.shared_int import SharedInt

_KEPT = 64  # edits that are remembered one by one


class Ledger:
    """Counts rows written around the ring, and lists edits of rows elsewhere. Processes that share rows share the counts."""

    def __init__(self) -> None:
        self._written = SharedInt()
        self._end = SharedInt()
        self._edits = SharedInt()
        self._named: deque[tuple[int, Any]] = deque(maxlen=_KEPT)  # of this process

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

    def run(self, start: int, count: int, capacity: int) -> None:
        """Rows were written from `start` on, around the ring."""
        if start != self._end.value:
            self.edit(None)
        self._end.value = (start + count) % capacity
        self._written.value += count

    def edit(self, rows: Any, end: int | None = None) -> None:
        """Rows were written where they are, or the storage was changed as a whole (None)."""
        edits = self._edits.value + 1
        self._edits.value = edits
        self._named.append((edits, rows))
        if end is not None:
            self._end.value = end

    def restored(self, written: int, end: int) -> None:
        """All rows are others, as they were when these were the counts."""
        self.edit(None, end)
        self._written.value = written

    def since(self, edits: int) -> list[Any] | None:
        """The rows of every edit after the first `edits`; None where one is not known."""
        named = [rows for number, rows in self._named if number > edits]
        return named if len(named) == self.edits - edits and all(rows is not None for rows in named) else None

    def __getstate__(self) -> dict[str, Any]:
        return {"counts": (self._written, self._end, self._edits)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._written, self._end, self._edits = state["counts"]
        self._named = deque(maxlen=_KEPT)
