"""The observer that counts: it keeps what happens to one buffer in a list, and counts later, many draws at once."""

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.engine.observers import Observed, Observer
from interop.metrics.row_lives import DrawnAges, RowLives

_WEIGHTS = "priority_weight"
_STALENESS = "staleness"
_USES = "group_uses"
_MASKS = (("collector", "mask"), "validity_mask")  # False for padding
_COPIED = (_WEIGHTS, _STALENESS, _USES, *_MASKS)
_GATHERED = 1 << 20  # items, about, after which they are counted
_MOST = 1 << 14  # batches and writes, likewise
_READ, _INDEX, _VERSION, _VALUES = range(4)  # of the entry of a batch
_RETURNED = -1  # in the place of `_READ`
_version_of = attrgetter("_version")  # of a tensor: how often it was changed in place


@dataclasses.dataclass
class Counts:
    """Sums over the batches that were returned, and over the writes.

    Attributes:
        batches, draws: returned batches, and the items in them.
        written: items written.
        unknown: drawn items whose index was changed in place before it was counted.
        ages: see `DrawnAges`.
        weighted: batches with importance weights; `ess` and `ess_share` are sums over these.
        stale, staleness, staleness_max: drawn items with a staleness, its sum, and the highest.
        used, uses: drawn items of groups whose uses are counted, and the sum of the uses.
    """

    batches: int = 0
    draws: int = 0
    written: int = 0
    unknown: int = 0
    ages: DrawnAges = dataclasses.field(default_factory=DrawnAges)
    weighted: int = 0
    ess: float = 0.0
    ess_share: float = 0.0
    stale: int = 0
    staleness: float = 0.0
    staleness_max: float = -math.inf
    used: int = 0
    uses: int = 0

    def add(self, other: "Counts") -> None:
        """Add the numbers of another buffer, or of a later time."""
        for field in dataclasses.fields(self):
            ours = getattr(self, field.name)
            theirs = getattr(other, field.name)
            if isinstance(ours, DrawnAges):
                ours.add(theirs)
            elif field.name == "staleness_max":
                self.staleness_max = max(ours, theirs)
            else:
                setattr(self, field.name, ours + theirs)


class Tally(Observer):
    """Counts the draws and writes of one buffer.

    A draw and a write append one entry to a list. It is counted by `take`, and when many items have gathered. The indices
    of batches are not copied: a copy takes more than a hundredth of a draw.
    """

    def __init__(self) -> None:
        self._log: list[Any] = []  # batches as they are read and again as they are returned; writes; undone writes
        self._most = 64  # entries of the log
        self._writes = 0
        self._storage: Callable[[], Observed | None] = _none
        self._in_order = self._copies = False
        self._dims: Sequence[int] | None = None  # of its items, without the first; None before the first write
        self._lives = RowLives()
        self._rows = 0  # written
        self._begun = 0  # `_rows` when all rows were new
        self._counts = Counts()  # since the last `take`

    # ------------------------------------------------------------------ what happens

    def joined(self, storage: Observed, in_order: bool, copies: bool) -> None:
        is_new = self._storage() is not storage
        if is_new:
            self._count()  # what the last storage had
        self._in_order = in_order
        self._copies = copies
        if is_new:
            self._storage = weakref.ref(storage)
            self._begin(storage)

    def started_over(self) -> None:
        self._count()
        storage = self._storage()
        if storage is not None:
            self._begin(storage)

    def read(self, info: dict[Any, Any]) -> Callable[[], object]:
        index = info["index"]
        if self._copies:
            index = _of_user(index, self._storage(), self._dims or ())
        values = None if len(info) == 1 else {key: _copied(info[key]) for key in _COPIED if key in info}
        entry = [None, index, _version_of(index) if type(index) is Tensor else _version(index), values]
        log = self._log
        log.append(entry)
        if len(log) > self._most:
            self._count()
        return partial(log.append, entry)

    def mark_update(self, index: object) -> None:
        self._writes += 1
        if self._dims is None:
            self._dims = _dims(self._storage())
        self._log.append((self._writes, index if type(index) is int else _copied(index)))

    def before_write(self) -> dict[str, Any]:
        if len(self._log) > self._most:
            self._count()
        return {"writes": self._writes}

    def put_back(self, before: dict[str, Any]) -> None:
        self._writes = before["writes"]
        self._log.append(_Undone(self._writes))

    def _begin(self, storage: Observed) -> None:
        filled = storage.contents.filled_rows
        self._dims = _dims(storage)
        births = None
        if self._in_order:
            births = np.repeat(self._rows - 1 - storage.contents.row_ages(), self._lanes)
        self._rows += 1
        self._begun = self._rows  # batches that were read before are late
        self._lives.begin(births if births is None else births + 1, filled * self._lanes, self._rows)

    @property
    def _lanes(self) -> int:
        return math.prod(self._dims or ())

    # ------------------------------------------------------------------ counting

    def take(self) -> Counts:
        """The counts since the last call. The lock of the storage is held."""
        self._count()
        counts = self._counts
        self._counts = Counts()
        return counts

    def draws_of_stored(self) -> np.ndarray:
        """How often each stored item was drawn since it was written, int32 [items]. Valid until the next write or draw."""
        self._count()
        storage = self._storage()
        return self._lives.draws(0 if storage is None else storage.contents.filled_rows * self._lanes)

    def _count(self) -> None:
        """Count the entries of the log."""
        log = self._log
        length = len(log)
        entries = log[:length]
        del log[:length]  # another thread may have appended to it meanwhile
        storage = self._storage()
        if storage is None or not entries:
            return
        items = 0
        dims = self._dims or ()
        capacity = max(storage.max_size, 1)
        written = _Written(self._lanes)
        returned = list[tuple[list[Any], int, int]]()
        for entry in _that_count(entries):
            if type(entry) is list:
                if entry[_READ] is None:
                    entry[_READ] = self._rows
                elif entry[_READ] != _RETURNED:
                    returned.append((entry, entry[_READ], self._rows))
                    entry[_READ] = _RETURNED
            else:
                slots = _slots(entry[1], dims)
                slots = slots[slots >= 0]
                if written.count and written.count + slots.size > capacity:  # slots would be written twice
                    items += self._advance(dims, written, returned)
                    written, returned = _Written(written.lanes), []
                self._rows = written.add(slots, self._rows)
                self._counts.written += slots.size
                items += slots.size
        items += self._advance(dims, written, returned)
        self._most = min(max(_GATHERED * length // max(items, 1), 64), _MOST)

    def _advance(self, dims: Sequence[int], written: "_Written", returned: list[tuple[list[Any], int, int]]) -> int:
        """Count these writes, and batches with the rows written at their read and at their return.

        Returns how many items there are in the batches.
        """
        counts = self._counts
        indices, sizes, read, rows = list[Tensor](), list[int](), list[int](), list[int]()
        for entry, rows_read, rows_returned in returned:
            index = entry[_INDEX]
            values = entry[_VALUES]
            mask = None if values is None else next((values[key] for key in _MASKS if key in values), None)
            if values:
                self._weigh(values, mask)
            counts.batches += 1
            is_as_read = entry[_VERSION] == _version(index)
            if type(index) is not Tensor or index.ndim != 1 or not index.is_cpu or index.dtype != torch.int64:
                index = torch.from_numpy(_slots(index, dims))
            if mask is not None and mask.numel() == index.numel():
                index = index[mask.reshape(-1).cpu()]
            size = len(index)
            counts.draws += size
            if not is_as_read:
                counts.unknown += size
            elif rows_read < self._begun:
                counts.ages.late += size
            else:
                indices.append(index)
                sizes.append(size)
                read.append(rows_read)
                rows.append(rows_returned)
        drawn = torch.cat(indices).numpy() if indices else np.zeros(0, np.int64)
        at_read, at_return = (np.repeat(np.array(each, np.int64), sizes) for each in (read, rows))
        counts.ages.add(self._lives.advance(*written.arrays(), drawn, at_read, at_return))
        return drawn.size

    def _weigh(self, values: dict[Any, Any], mask: Tensor | None) -> None:
        """Count the values of a batch."""
        counts = self._counts
        weights = _numbers(values.get(_WEIGHTS), mask)
        if weights.size and (square := float((weights * weights).sum())) > 0:
            ess = float(weights.sum()) ** 2 / square
            counts.weighted += 1
            counts.ess += ess
            counts.ess_share += ess / weights.size
        staleness = _numbers(values.get(_STALENESS), mask)
        if staleness.size:
            counts.stale += staleness.size
            counts.staleness += float(staleness.sum())
            counts.staleness_max = max(counts.staleness_max, float(staleness.max()))
        uses = _numbers(values.get(_USES), mask)
        counts.used += uses.size
        counts.uses += int(uses.sum())


class _Written:
    """Slots of written items, and the rows that were written before each."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.count = 0
        self._slots = list[np.ndarray]()
        self._births = list[np.ndarray]()

    def add(self, slots: np.ndarray, rows: int) -> int:
        """Add items that were written when `rows` rows had been. The number of rows that have been written now."""
        births = rows + np.arange(slots.size) // self.lanes
        self._slots.append(slots)
        self._births.append(births)
        self.count += slots.size
        return int(births[-1]) + 1 if slots.size else rows

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots and births, int64 [items]."""
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *self._slots]), np.concatenate([none, *self._births])


@dataclasses.dataclass(frozen=True)
class _Undone:
    """All writes but the first so many were undone."""

    writes: int


def _that_count(entries: list[Any]) -> list[Any]:
    """The entries of a log without the writes that were undone."""
    if not any(type(entry) is _Undone for entry in entries):
        return entries
    kept = list[Any]()
    for entry in entries:
        if type(entry) is _Undone:
            kept = [each for each in kept if type(each) is list or each[0] <= entry.writes]
        else:
            kept.append(entry)
    return kept


def _slots(index: object, dims: Sequence[int]) -> np.ndarray:
    """Flat slots, int64 [n], of an int, an array or tensor [n], or coordinates: a tuple of arrays, or [n, item dims].

    `dims` are the lengths of the item dims, without the first.
    """
    columns = [_host(each).reshape(-1) for each in index] if isinstance(index, tuple) else [_host(index)]
    if not isinstance(index, tuple) and dims and columns[0].ndim == 2:
        columns = list(columns[0].T)
    slots = columns[0].astype(np.int64).reshape(-1)
    for column, length in zip(columns[1:], dims, strict=True):
        slots = slots * length + column
    return slots


def _host(values: object) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _of_user(index: object, storage: Observed | None, dims: Sequence[int]) -> Tensor:
    """Flat slots of an index that a class of the user's has returned; none for an index that is not understood."""
    try:
        assert storage is not None
        if isinstance(index, slice):
            index = np.arange(len(storage))[index]
        if isinstance(index, Tensor | np.ndarray) and index.dtype in (torch.bool, np.bool_):
            index = np.flatnonzero(_host(index))
        slots = _slots(index, dims)
    except (TypeError, ValueError, RuntimeError, IndexError):
        slots = np.zeros(0, np.int64)
    return torch.from_numpy(np.where(slots < 0, slots + (0 if storage is None else len(storage)), slots))


def _version(index: object) -> object:
    """What differs after a change of the tensor in place."""
    if isinstance(index, Tensor):
        return _version_of(index)
    return [_version_of(each) for each in index if isinstance(each, Tensor)] if type(index) is tuple else 0


def _copied(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.requires_grad else value.clone()
    return tuple(map(_copied, value)) if type(value) is tuple else np.array(value)


def _numbers(values: object, mask: Tensor | None) -> np.ndarray:
    """Values of drawn items, float64, without those of padding."""
    if values is None:
        return np.zeros(0)
    numbers = np.asarray(values.cpu() if isinstance(values, Tensor) else values, np.float64).reshape(-1)
    return numbers[mask.reshape(-1).cpu().numpy()] if mask is not None and mask.numel() == numbers.size else numbers


def _dims(storage: Observed | None) -> Sequence[int] | None:
    """The lengths of the item dims of a storage without the first; None if it does not know them yet."""
    if storage is None or storage.ndim == 1:
        return ()
    return None if storage.shape is None else tuple(storage.shape[1:])


def _none() -> None:
    return None
