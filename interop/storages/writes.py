"""Writes of rows into the memory of a storage, under its journal: a write that does not finish is rolled back."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from interop.data.index import whole_rows
from interop.host.device_rows import JaxRows
from interop.host.equal_places import chosen_items, last_of_equal
from interop.host.rows import TorchRows
from interop.shared.journal import Journal, Rows, counted

if TYPE_CHECKING:
    from interop.storages.tensors import TensorStorage

Advance = Callable[[Tensor, int, int], None]


def write_run(storage: "TensorStorage", start: int, index: Tensor, leaves: Sequence[Tensor], advance: Advance) -> None:
    """Write rows from `start` on, around the ring. Calls `advance(index, count, cursor)` after the rows are written.

    A write of more rows than fit into the journal is divided into several transactions.
    """
    journal, count, capacity, rows = storage.journal, index.shape[0], storage.row_count, storage.own_rows()
    with journal.part():
        if journal.memory is None:
            ring = storage.ring
            ring.wrote_run(start, count, capacity)  # first: an interrupted write may have changed rows
            rows.write_run(start, leaves)
            ring.size = max(ring.size, min(start + count, capacity))
            advance(index, count, start + count)
            return
        if start >= storage.filled_rows and start + count <= capacity:
            _write_part(storage, start, count, start, count, (), leaves)
            advance(index, count, start + count)
            return
        done = 0
        while True:
            filled, stop = storage.filled_rows, count
            first = max(done, count - capacity)  # of the rows before it nothing stays
            row = (start + first) % capacity
            over = _around(row, stop - first, capacity, filled)
            if not journal.fits(sum(map(len, over))):  # in order then: a part leaves what as many rows alone would
                first, row = done, (start + done) % capacity
                stop = min(count, done + min(journal.most, capacity))
                over = _around(row, stop - done, capacity, filled)
            journal.reserve(sum(map(len, over)))
            part = leaves
            if stop - first < count:
                leaves = leaves if done or stop == count else _guarded(rows).apart(leaves)
                part = [leaf[first:stop] for leaf in leaves]
            _write_part(storage, (start + done) % capacity, stop - done, row, stop - first, over, part)
            advance(index[done:stop], stop - done, start + stop)
            if stop == count:
                return
            journal.cut()
            done = stop


def _write_part(
    storage: "TensorStorage", start: int, moved: int, row: int, count: int, over: Sequence[range], leaves: Any
) -> None:
    """Save the rows `over`, then write `count` rows from `row` on: the last of `moved` rows from `start` on."""
    capacity, ring = storage.row_count, storage.ring
    for each in over:
        storage.journal.save(each)
    ring.wrote_run(start, moved, capacity)
    storage.own_rows().write_run(row, leaves)
    ring.size = max(ring.size, min(row + count, capacity))
    if storage.priorities is not None:
        for each in _around(row, count, capacity, capacity):
            storage.priorities.forget(each)


def _around(row: int, count: int, capacity: int, below: int) -> list[range]:
    """The `count` rows from `row` on around the ring, as ranges, without rows from `below` on."""
    found = [range(row, min(row + count, below)), range(min(row + count - capacity, below))]
    return [each for each in found if len(each)]


def write_at(
    storage: "TensorStorage", places: Any, leaves: Sequence[Tensor], reached: int | None, capacity: int
) -> None:
    """Write at resolved places. With `reached` the length grows to it."""
    journal, rows, filled, ring = storage.journal, storage.own_rows(), storage.filled_rows, storage.ring
    row = places[0] if isinstance(places, tuple) else places
    with journal.part():
        if reached is None:
            ring.edited(row)
        else:
            ring.wrote_elsewhere(_named(row, whole_rows(places)), capacity, reached > ring.size)
        over: Rows = range(0) if journal.memory is None else counted(row, filled)
        if journal.memory is None or journal.fits(len(over)):
            if len(over):
                journal.reserve(len(over))
                journal.save(over)
            rows.write_at(places, leaves)
        else:
            _write_parts(journal, _guarded(rows), places, leaves, filled)
        if reached is not None:
            if storage.priorities is not None:
                storage.priorities.forget(row)
            ring.size = max(ring.size, reached)


def _write_parts(journal: Journal, rows: TorchRows, places: Any, leaves: Sequence[Tensor], filled: int) -> None:
    leaves = rows.apart(leaves)
    slots, last, lanes = last_of_equal(places, rows.lanes)
    row_of = slots // math.prod(lanes)
    begins = np.flatnonzero(np.diff(row_of, prepend=-1))[:: journal.most]
    for begin, stop in zip(begins, [*begins[1:], slots.size], strict=True):
        journal.cut()
        whole = np.unique(row_of[begin:stop])
        journal.save(whole[whole < filled])
        shape = (rows.tensors[0].shape[0], *lanes)
        at = tuple(map(torch.from_numpy, np.unravel_index(slots[begin:stop], shape)))
        items = [held.shape[len(shape) :] for held in rows.tensors]
        part = [chosen_items(leaf.detach(), last[begin:stop], item) for leaf, item in zip(leaves, items, strict=True)]
        rows.write_at(at if lanes else at[0], part)


def _guarded(rows: TorchRows | JaxRows) -> TorchRows:
    """Rows with a journal, which are never on an accelerator."""
    assert not isinstance(rows, JaxRows)
    return rows


def _named(rows: Any, whole: bool) -> range | np.ndarray:
    """The rows of resolved places; a range if they are consecutive and whole."""
    if isinstance(rows, int):
        named: range | np.ndarray = range(rows, rows + 1)
    elif not isinstance(rows, slice):
        return rows.reshape(-1).numpy() if isinstance(rows, Tensor) else np.array([rows])
    elif rows.step in (None, 1) and rows.start < rows.stop:
        named = range(rows.start, rows.stop)
    else:
        return np.arange(rows.start, rows.stop, rows.step or 1)
    return named if whole else np.array(named)
