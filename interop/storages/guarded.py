"""Writes of rows that a killed process leaves whole: as they were, or as they are to be."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interop.host.equal_places import chosen_items, last_of_equal
from interop.host.rows import TorchRows
from interop.shared.journal import Journal, counted
from interop.shared.undo import Memory

Advance = Callable[[Tensor, int, int], None]


def write_run(storage: Any, start: int, index: Tensor, leaves: Sequence[Tensor], advance: Advance | None) -> None:
    """`TensorStorage.set_run` in steps, of as many rows as fit into the journal: after each the writer's counters move."""
    journal: Journal = storage.journal
    count, capacity, rows = index.shape[0], storage.row_count, storage._own_rows()
    with journal.part():
        if start >= storage.filled_rows and start + count <= capacity:
            _write_part(storage, start, count, start, count, (), leaves)
            if advance is not None:
                advance(index, count, start + count)
            return
        done = 0
        while True:
            filled, stop = storage.filled_rows, count
            first = max(done, count - capacity)  # of the rows before it nothing stays
            row = (start + first) % capacity
            over = _around(row, stop - first, capacity, filled)
            if not journal.fits(
                sum(map(len, over))
            ):  # all in order then: a part is what as many rows alone would leave
                first, row = done, (start + done) % capacity
                stop = min(count, done + min(journal.most, capacity))
                over = _around(row, stop - done, capacity, filled)
            journal.reserve(sum(map(len, over)))
            part = leaves
            if stop - first < count:
                leaves = leaves if done or stop == count else rows.apart(leaves)
                part = [leaf[first:stop] for leaf in leaves]
            _write_part(storage, (start + done) % capacity, stop - done, row, stop - first, over, part)
            if advance is not None:
                advance(index[done:stop], stop - done, start + stop)
            if stop == count:
                return
            journal.cut()
            done = stop


def _write_part(
    storage: Any, start: int, moved: int, row: int, count: int, over: Sequence[range], leaves: Sequence[Tensor]
) -> None:
    """Write rows from `row` on, of those `moved` from `start` on the last; those that this writes over are saved before."""
    capacity = storage.row_count
    for each in over:
        storage.journal.save(each)
    storage.ring.wrote_run(start, moved, capacity)
    storage.rows.write_run(row, leaves)
    storage._grow(min(row + count, capacity))
    if storage.priorities is not None:
        for each in _around(row, count, capacity, capacity):
            storage.priorities.forget(each)


def _around(row: int, count: int, capacity: int, below: int) -> list[range]:
    """The rows below one of those from `row` on around the ring."""
    found = [range(row, min(row + count, below)), range(min(row + count - capacity, below))]
    return [each for each in found if len(each)]


def write_at(storage: Any, places: Any, leaves: Sequence[Tensor], reached: int | None) -> None:
    """`TensorStorage.set` at resolved places, in steps; with `reached` it is in order, and the length grows to it."""
    journal: Journal = storage.journal
    rows, filled = storage._own_rows(), storage.filled_rows
    over = counted(places[0] if isinstance(places, tuple) else places, filled)
    with journal.part():
        storage._enter(places, reached, storage.row_count)
        if journal.fits(len(over)):
            journal.reserve(len(over))
            journal.save(over)
            rows.write_at(places, leaves)
        else:
            _write_parts(journal, rows, places, leaves, filled)
        if reached is not None:
            if storage.priorities is not None:
                storage.priorities.forget(places[0] if isinstance(places, tuple) else places)
            storage._grow(reached)


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


def can_guard(storage: Any) -> bool:
    """Whether writes to a storage can be guarded: its rows are in torch's memory on the host."""
    rows = storage.rows
    return storage.is_shared() if rows is None else rows.in_place


def started(storage: Any) -> Journal:
    """A journal in memory that workers share, of a storage that is written by this process alone until now. Its lock is
    held."""
    journal = Journal()
    journal.start(storage, Memory(Journal.size_for(storage)))
    journal.shared = True
    return journal
