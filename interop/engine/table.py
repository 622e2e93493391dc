"""Admits rows, writes them to a place and reads them by slot: a layout, a place, and the counters of the ring.

A batch is admitted, which finds every error of structure, shape and dtype and, for the first batch, fixes the layout and
takes memory from the place. Then its leaves are written, one copy a leaf. Under a record the rows that they overwrite are
saved first. Reads return leaves; the caller builds items of them.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from fbuf.memory_plan import Share
from interop.data.fitting import fitting
from interop.data.index import (
    as_int,
    as_tensor,
    in_range,
    indexed,
    is_basic,
    reach,
    resolved,
    spelled_out,
    whole_rows,
)
from interop.data.keys import as_key, entries_below, nearest
from interop.data.layout import KeyPath, Layout, LeafSpec, stack_items
from interop.data.packed import PackedValues
from interop.data.shared_prefixes import moved, pieces_of, used_spans
from interop.engine import plans
from interop.engine.followers import Followers
from interop.engine.guard import Guard
from interop.engine.places.place import Place
from interop.host.device_rows import JaxRows
from interop.host.equal_places import chosen_items, last_of_equal
from interop.host.ring import Ring
from interop.host.stored_rows import Rows
from interop.host.threads import uninterrupted
from interop.shared.journal import LARGEST, Journal, Recorded, RowNumbers, counted
from interop.shared.memory import Memory


class Claim(NamedTuple):
    """The rows that a writer takes for new items, one after the other around the ring.

    Attributes:
        start: the first row.
        rows: their numbers, int64 [count].
        is_counted: whether the ring counts them as written by a writer.
        written: is called with the rows once they are written; several times, for parts of a large claim.
    """

    start: int
    rows: Tensor
    is_counted: bool = True
    written: Callable[[Tensor], None] | None = None

    def settle(self, ring: Ring, rows: Tensor) -> None:
        """Count these rows of the claim, which are written."""
        if self.is_counted:
            ring.count += rows.shape[0]
        if self.written is not None:
            self.written(rows)


class Table:
    """Items of one layout in rows of a place.

    The caller holds the lock of the guard, but for reads of a table that no other thread writes.

    Args:
        place: where the bytes are.
        max_items: how many items fit, before that is rounded up to whole rows.
        ndim: how many leading dims count as items: 1 for rows, 2 for [rows, lanes].
        ring: the counters.
        guard: the lock and the transactions.
        followers: drop prefetched batches where keys are added, which these lack.
        kind: what holds the table, for messages: the name of a class.
        is_local: whether the counters belong to one process.
        fill: by path, the values of stored rows under keys that come with a later batch.
        ragged: entries whose rows may have any length.
        shared_prefixes: those of them whose rows are stored once as far as they begin alike.

    Attributes:
        layout: of the items in memory; None without memory.
        rows: their leaves, [rows, *lanes, ...]; None without memory.
        lanes: the dims of a row.
        per_row: how many items a row has.
        keeps_layout: whether an empty table keeps its layout.
        ragged, shared_prefixes: paths, as given; those of `shared_prefixes` are in both.
    """

    def __init__(
        self,
        place: Place,
        max_items: int,
        ndim: int,
        ring: Ring,
        guard: Guard,
        followers: Followers,
        kind: str,
        *,
        is_local: bool = False,
        fill: Mapping[KeyPath, Tensor] | None = None,
        ragged: Collection[KeyPath] = (),
        shared_prefixes: Collection[KeyPath] = (),
    ) -> None:
        self.place = place
        self.max_items = max_items
        self.ndim = ndim
        self.ring = ring
        self.guard = guard
        self.followers = followers
        self.kind = kind
        self.is_local = is_local
        self.fill = fill or {}
        self.layout: Layout | None = None
        self.rows: Rows | None = None
        self.lanes: tuple[int, ...] = ()
        self.per_row = 1
        self.keeps_layout = False
        self.ragged = frozenset((*ragged, *shared_prefixes))
        self.shared_prefixes = frozenset(shared_prefixes)
        self._epoch = 0
        guard.guards(self)

    # ------------------------------------------------------------------ what there is

    @property
    def row_count(self) -> int:
        """How many rows fit."""
        return -(-self.max_items // self.per_row)

    @property
    def max_size(self) -> int:
        """How many items fit; the rows are whole."""
        return self.row_count * self.per_row

    @property
    def lead(self) -> tuple[int, ...]:
        """[rows, *lanes] of the memory."""
        return (self.row_count, *self.lanes)

    @property
    def packs(self) -> bool:
        """Whether items have text or ragged rows."""
        return self.layout is not None and bool(self.layout.varied)

    @property
    def fixed_layout(self) -> Layout | None:
        """The layout that new items must have; None if the next write fixes it."""
        if self.ring.size or self.keeps_layout or not self.place.can_renew(self.guard.is_shared):
            return self.layout
        return None

    def own_rows(self) -> Rows:
        """The rows. RuntimeError before the first write."""
        if self.place.meets_others:
            self.look()
        if self.rows is None:
            raise RuntimeError("Cannot get elements out of a non-initialized storage: call extend() or add() first")
        return self.rows

    def look(self) -> None:
        """Take the memory that another process has allocated, and drop memory that one has given up."""
        if not self.place.meets_others or self.guard.is_read_only:
            return
        if self._epoch != (epoch := self.place.epoch):
            self.disown()
            self._epoch = epoch
        if self.rows is None and (found := self.place.found()) is not None:
            layout, _, rows = found
            self.adopt(layout, rows)

    # ------------------------------------------------------------------ memory

    def takes(self, layout: Layout, lanes: tuple[int, ...]) -> bool:
        """Whether items of this layout and these lanes fit into the memory of an empty table."""
        return self.layout is not None and self.lanes == lanes and self.layout.alike(layout)

    def rows_for(self, lanes: tuple[int, ...]) -> int:
        """How many rows of these lanes there is room for. RuntimeError for lanes without items."""
        per_row = math.prod(lanes)
        if per_row == 0:
            raise RuntimeError("the data has a batch dim of size 0: its rows would hold no items; nothing was written")
        return -(-self.max_items // per_row)

    def row_capacity(self, data: object) -> int:
        """How many rows fit, once a batch like `data` is written."""
        if self.ndim == 1 or data is None or not self._needs_memory(data, self.ndim):
            return self.row_count
        return self.rows_for(self.lanes_of(data, batch=True))

    def item_capacity(self, data: object) -> int:
        """How many items fit, once a batch like `data` is written."""
        return self.row_capacity(data) * math.prod(self.lanes_of(data, batch=True))

    def lanes_of(self, data: object, batch: bool) -> tuple[int, ...]:
        """The lanes of the data of a first write: a batch of rows, a list of rows, or one row."""
        if isinstance(data, list) and data:
            data = data[0]
            batch = False
        if self.ndim == 1:
            return ()
        shape = some(Layout.of(data, 0).flatten(data, 0))[0].shape
        if len(shape) < batch + self.ndim - 1:
            raise RuntimeError(f"the storage has ndim={self.ndim}: data of shape {list(shape)} has too few dims")
        return tuple(shape[batch:][: self.ndim - 1])

    def _layout_of(self, data: object, dims: int) -> Layout:
        """The layout of items like those of data, which has so many leading dims."""
        return self.sharing(Layout.of(data, dims, self.ragged))

    def sharing(self, layout: Layout) -> Layout:
        """The layout, where ragged rows share prefixes as in this table."""
        return layout.sharing(self.shared_prefixes) if layout.varied else layout

    def _needs_memory(self, data: object, dims: int) -> bool:
        """Whether writing data with `dims` leading dims needs new memory."""
        if self.fixed_layout is not None:
            return False
        return not self.takes(self._layout_of(data, dims), self.lanes_of(data, dims == self.ndim))

    def values_for(self, layout: Layout) -> PackedValues | None:
        """The memory of text and ragged rows for items of this layout."""
        folder = self.place.values_folder()
        values = layout.values
        if not layout.varied or (values is not None and values.folder == folder):
            return values
        return PackedValues(folder)

    def adopt(self, layout: Layout, rows: Rows) -> None:
        """Use these rows from now on."""
        if layout.varied:
            layout = layout.keeping(self.values_for(layout))
            shared = {path for path, entry in layout.varied.items() if entry.shares}  # also of a reopened folder
            self.shared_prefixes |= shared
            self.ragged |= shared
        self.layout, self.rows = layout, rows
        self.guard.device_writes = rows.writes
        self.lanes, self.per_row = rows.lanes, math.prod(rows.lanes)
        self.place.adopted(self.lead)
        if self.guard.journal.is_wanted:
            self.record_rows()
            self.guard.lock.hooked = True  # an unfinished write is rolled back first
        elif self.guard.is_shared:
            try:
                self.start_record()
            except BaseException:  # there is no memory for it
                self.disown()
                raise

    def disown(self) -> None:
        """Drop the rows."""
        self.layout, self.rows, self.guard.device_writes = None, None, None
        self.lanes, self.per_row = (), 1
        self.place.dropped()

    def give_up(self) -> None:
        """Drop the memory of an empty table, in all processes; the next write allocates. RuntimeError for one to be read."""
        self.refuse_edit(())
        if self.rows is not None:
            self.place.vacate(self.lead)
        self.disown()

    def plan(self, data: object) -> list[Share]:
        """The memory that the table takes, or will take after the first write of a batch."""
        if self.rows is not None and self.layout is not None:
            shares = self.place.plan(self.layout, self.lead, self.place.known_device(), is_allocated=True)
            values = self.layout.values
            return shares if values is None else [*shares, self._share_of_values(values.folder, values.bytes)]
        layout = self._layout_of(data, self.ndim)
        leaves = some(layout.flatten(data, self.ndim))
        lanes = self.lanes_of(data, batch=True)
        device = _device_of(layout, leaves) if self.place.device == "auto" else self.place.known_device()
        shares = self.place.plan(layout, (self.rows_for(lanes), *lanes), device)
        return [*shares, self._share_of_values(self.place.values_folder(), None)] if layout.varied else shares

    def _share_of_values(self, folder: Path | None, size: int | None) -> Share:
        what = "of text and ragged rows" + (", which share their beginnings" if self.shared_prefixes else "")
        return Share("values", what, "cpu" if folder is None else str(folder), size)

    # ------------------------------------------------------------------ the record of unfinished writes

    def start_record(self) -> None:
        """Record writes, so that the next process rolls back the write of a killed one."""
        journal = self.guard.journal
        can_be_undone = self.is_shared() if self.rows is None else self.rows.in_place
        if can_be_undone and not journal.is_wanted and not self.is_local:
            journal.start(self.ring, Memory(self._record_size()))
            if self.rows is not None:
                self.record_rows()

    def _record_size(self) -> int:
        if self.rows is None:
            return Journal.size_unknown()
        leaves = self.rows.tensors
        row = sum(leaf[:1].nbytes for leaf in leaves)
        if self.place.can_renew(self.guard.is_shared):
            row = max(row, LARGEST)
        return Journal.size(row, len(leaves), self.per_row, self.row_count)

    def record_rows(self) -> None:
        """Let the journal record writes of the rows."""
        self.guard.journal.guard(self.ring, self.recorded())

    def recorded(self) -> Recorded:
        """The memory that the journal records."""
        kept = self.place.kept
        return Recorded(self.rows, self.per_row, None if kept is None else kept.by_row)

    # ------------------------------------------------------------------ admission of data

    def stacked(self, data: object) -> object:
        """A list of items as one batch of them."""
        if not isinstance(data, list):
            return data
        return stack_items(data, self.ragged if self.layout is None else {*self.ragged, *self.layout.varied})

    def admit(
        self,
        data: object,
        dims: int,
        is_new: bool,
        lead: tuple[int, ...] | None = None,
        has_all_rows: bool = False,
    ) -> list[Tensor]:
        """The leaves of data with `dims` leading dims, checked. Stored rows do not change.

        Args:
            data: one batch.
            dims: how many of its leading dims count as items.
            is_new: whether it fixes the layout and gets memory.
            lead: the leading dims that it must have, if an index says so.
            has_all_rows: whether it has all stored rows. Then it may have new keys; otherwise only those with a `fill`.

        Raises:
            KeyError, TypeError, RuntimeError: it does not fit.
            NotEnoughMemoryError, OSError: there is no memory for it.
        """
        layout = self._layout_of(data, dims) if is_new or self.layout is None else self.layout
        if layout.values is not None and not is_new:
            self.refuse_edit(())  # before values are appended
            if layout.values.due:
                self._reclaim(layout.values)
        try:
            leaves = some(layout.flatten(data, dims))
        except KeyError:
            wider = self._wider(layout, data, dims)
            added = wider.places.keys() - layout.places.keys()
            if not added or not (has_all_rows or (self.fill and added <= self.fill.keys() - wider.varied.keys())):
                raise
            layout = wider
            leaves = wider.flatten(data, dims)
        shape = tuple(leaves[0].shape[:dims])
        if lead is not None and shape != lead:
            raise RuntimeError(f"the index names places of shape {lead}, data has {shape}; nothing was written")
        lanes = shape[dims - self.ndim + 1 :] if self.ndim > 1 else ()
        if is_new:
            count = shape[0] if dims == self.ndim else 1
            layout, leaves = self._allocate(layout, leaves, data, dims, lanes, count)
        elif lead is None and lanes != self.lanes:
            raise RuntimeError(f"items have the batch dims {self.lanes}, got {lanes}; nothing was written")
        if layout is not self.layout:
            self._widen(layout, leaves if has_all_rows else None)
        return leaves

    def _allocate(
        self,
        layout: Layout,
        leaves: list[Tensor],
        data: object,
        dims: int,
        lanes: tuple[int, ...],
        count: int,
    ) -> tuple[Layout, list[Tensor]]:
        """Take memory for items of a layout, of which `count` rows will be written. Returns the layout and leaves to use."""
        place = self.place
        self.give_up()
        asked = place.device
        rows_of_all = self.rows_for(lanes)
        place.device = _device_of(layout, leaves) if asked == "auto" else asked
        try:
            # The memory outlives settings of the caller. A signal here would leave files without an owner.
            with uninterrupted(), torch.inference_mode(False), torch.device("cpu"):
                memory = place.allocate(layout, (rows_of_all, *lanes))
                self._epoch = place.epoch
                memory.reserve(count)
                kept = layout.keeping(self.values_for(layout))
                if kept is not layout:  # its folder exists now
                    layout = kept
                    leaves = kept.flatten(data, dims)
                self.adopt(layout, memory)
        except Exception:
            place.device = asked  # the next data may be on another device, with more memory
            raise
        assert self.layout is not None
        return self.layout, leaves

    # ------------------------------------------------------------------ further keys

    def _wider(self, layout: Layout, data: object, dims: int) -> Layout:
        """The layout with the further keys of data."""
        wider = self.sharing(layout.wider(data, dims))
        return wider.keeping(self.values_for(wider))

    def add_columns(self, data: TensorDictBase) -> None:
        """Store new entries of all stored items; `data` has these items with all their entries."""
        assert self.layout is not None
        layout = self._wider(self.layout, data, self.ndim)
        self._widen(layout, layout.flatten(data, self.ndim))

    def _widen(self, layout: Layout, leaves: Sequence[Tensor] | None) -> None:
        """Add the further leaves of a layout. Stored rows get the given leaves, or those of `fill`; others do not change.

        RuntimeError if other processes have the rows, or the place takes rows in order only.
        """
        before = self.layout
        rows = self.own_rows()
        journal = self.guard.journal
        assert before is not None
        self.refuse_edit(())
        size = sum(share.bytes or 0 for share in plans.arrays("", layout.leaves, (self.per_row,), ""))
        needed = Journal.size(size, len(layout.leaves), self.per_row, 1)
        is_too_small = journal.memory is not None and needed > journal.memory.bytes.size
        is_elsewhere = self.place.meets_others or self.guard.lock.given
        if self.place.in_order or is_too_small or (is_elsewhere and rows.shared) or self.guard.lock.forked:
            raise RuntimeError(
                f"no keys can be added to this {self.kind}: its rows are shared with other processes, hold frames, or would "
                "not fit into its journal of writes. Put all keys into the first batch; nothing was written"
            )
        added = [place for place, spec in enumerate(layout.leaves) if spec not in before.leaves]
        values = {layout.leaves[at]: leaves[at] if leaves else self._filling(layout.leaves[at]) for at in added}
        places = {spec: place for place, spec in enumerate((*before.leaves, *values))}

        def fill(memory: Rows) -> None:
            memory.reserve(self.ring.size)
            if self.ring.size:
                memory.write_run(0, list(values.values()))

        with uninterrupted(), torch.inference_mode(False), torch.device("cpu"):
            further = self.place.widen(layout, tuple(values), self.lead, fill)
            self.rows = rows.beside(further, [places[spec] for spec in layout.leaves])
            self.layout = layout
            if journal.is_wanted:
                self.record_rows()
            self.ring.edited(slice(None))
            self.followers.drop_prefetched()

    def _filling(self, spec: LeafSpec) -> Tensor:
        """The values of stored rows under a new key."""
        value = self.fill[spec.path]
        if not torch.can_cast(value.dtype, spec.dtype):
            raise RuntimeError(f"{spec.name}: items are {spec.dtype}, fill has {value.dtype}; nothing was written")
        return value.to(spec.dtype).expand(spec.shape).expand(self.ring.size, *self.lanes, *spec.shape)

    # ------------------------------------------------------------------ writes

    def write_run(self, claim: Claim, data: object) -> None:
        """Write a batch to the rows of a claim, and move the cursor behind them.

        A write of more rows than fit into the record is divided into several transactions.
        """
        start, index = claim.start, claim.rows
        data = self.stacked(data)
        is_new = self._needs_memory(data, self.ndim)
        leaves = self.admit(data, self.ndim, is_new)
        count = index.shape[0]
        if leaves[0].shape[0] != count:
            raise RuntimeError(f"{count} places for {leaves[0].shape[0]} rows; nothing was written")
        self._refuse(range(start, start + count), leaves, True, is_new)
        journal = self.guard.journal
        capacity = self.row_count
        rows = self.own_rows()
        ring = self.ring
        with journal.part():
            if journal.memory is None:
                ring.wrote_run(start, count, capacity)  # first: an interrupted write may have changed rows
                rows.write_run(start, leaves, index)
                ring.size = max(ring.size, min(start + count, capacity))
                claim.settle(ring, index)
            elif start >= ring.size and start + count <= capacity:
                self._write_part(start, count, start, count, (), leaves)
                claim.settle(ring, index)
            else:
                self._write_recorded(claim, leaves)

    def _write_recorded(self, claim: Claim, leaves: Sequence[Tensor]) -> None:
        """Write rows over stored ones, which are saved first, in as many transactions as the record needs."""
        journal = self.guard.journal
        capacity = self.row_count
        start, index = claim.start, claim.rows
        count = index.shape[0]
        done = 0
        while True:
            stored = self.ring.size
            stop = count
            first = max(done, count - capacity)  # of the rows before it nothing stays
            row = (start + first) % capacity
            over = _around(row, stop - first, capacity, stored)
            if not journal.fits(sum(map(len, over))):  # in order then: a part leaves what as many rows alone would
                first = done
                row = (start + done) % capacity
                stop = min(count, done + min(journal.most, capacity))
                over = _around(row, stop - done, capacity, stored)
            journal.reserve(sum(map(len, over)))
            part = leaves
            if stop - first < count:
                leaves = leaves if done or stop == count else self.own_rows().apart(leaves)
                part = [leaf[first:stop] for leaf in leaves]
            self._write_part((start + done) % capacity, stop - done, row, stop - first, over, part)
            claim.settle(self.ring, index[done:stop])
            if stop == count:
                return
            journal.cut()
            done = stop

    def _write_part(
        self, start: int, moved: int, row: int, count: int, over: Sequence[range], leaves: Sequence[Tensor]
    ) -> None:
        """Save the rows `over`, then write `count` rows from `row` on: the last of `moved` rows from `start` on."""
        capacity = self.row_count
        ring = self.ring
        for rows in over:
            self.guard.journal.save(rows)
        ring.wrote_run(start, moved, capacity)
        self.own_rows().write_run(row, leaves)
        ring.size = max(ring.size, min(row + count, capacity))
        if self.place.kept is not None:
            for rows in _around(row, count, capacity, capacity):
                self.place.kept.forget(rows)

    def write(self, cursor: object, data: object, grows: bool) -> None:
        """Write data at an int, slice, mask, array or tensor of rows, or a tuple of these over rows and lanes. O(batch).

        With `grows` the length grows to include the rows. Of equal places the last wins. IndexError for rows out of range,
        RuntimeError if the length would grow over rows that were never written, and the errors of `admit`. Nothing is
        written then.
        """
        single = as_int(cursor)
        data = self.stacked(data)
        dims = self.ndim - (single is not None)
        is_new = self.rows is None if type(cursor) is tuple else self._needs_memory(data, dims)
        lanes = self.lanes_of(data, batch=single is None) if is_new else self.lanes
        capacity = self.rows_for(lanes)
        stored = 0 if is_new else self.ring.size
        if type(cursor) is int and grows and not is_new and 0 <= cursor <= stored and cursor < capacity:
            self.write_at(cursor, self.admit(data, len(lanes), False, lanes), cursor + 1, capacity)
            return
        # Negative places count from the end of the filled part, as in reads.
        places = resolved(cursor, stored, capacity if is_new or grows else stored, (capacity, *lanes))
        named = indexed((capacity, *lanes), places)
        if is_new and not whole_rows(places):
            raise RuntimeError("the first write must be of whole rows, to tell what a row is; nothing was written")
        reached, gapless = reach(places, stored) if grows else (0, True)
        if not gapless:
            raise RuntimeError(
                f"a write up to row {reached - 1} where {stored} are stored must be of whole rows and leave no gap: what "
                "was never written would count as stored; nothing was written"
            )
        first = places[0] if isinstance(places, tuple) else places
        is_all = not grows and isinstance(first, slice) and named[0] == stored == len(range(stored)[first])
        leaves = self.admit(data, len(named), is_new, named, is_all and whole_rows(places))
        self.write_at(places, leaves, reached if grows else None, capacity, is_new)

    def write_at(
        self, places: object, leaves: list[Tensor], reached: int | None, capacity: int, is_new: bool = False
    ) -> None:
        """Write leaves at resolved places. With `reached` the length grows to it."""
        self._refuse(places, leaves, reached is not None, is_new)
        journal = self.guard.journal
        rows = self.own_rows()
        stored = self.ring.size
        ring = self.ring
        row = places[0] if isinstance(places, tuple) else places
        with journal.part():
            over: RowNumbers = range(0) if journal.memory is None else counted(row, stored)
            if journal.memory is None or journal.fits(len(over)):
                if len(over):
                    journal.reserve(len(over))  # may commit: before the counters change, which belong to these rows
                self._count_write_at(row, places, reached, capacity)
                if len(over):
                    journal.save(over)
                rows.write_at(places, leaves)
            else:
                ring.edited(row)
                self._write_in_parts(places, leaves, stored)
                if reached is not None:
                    self._count_write_at(row, places, reached, capacity)
            if reached is not None:
                if self.place.kept is not None:
                    self.place.kept.forget(row)
                ring.size = max(ring.size, reached)

    def _count_write_at(self, row: object, places: object, reached: int | None, capacity: int) -> None:
        """Note a write at places. On the heap this comes first: an interrupted write may have changed rows."""
        if reached is None:
            self.ring.edited(row)
        else:
            self.ring.wrote_elsewhere(_named(row, whole_rows(places)), capacity, reached > self.ring.size)

    def _write_in_parts(self, places: object, leaves: Sequence[Tensor], stored: int) -> None:
        """Write at places of more rows than fit into the record, in several transactions."""
        journal = self.guard.journal
        rows = self.own_rows()
        leaves = rows.apart(leaves)
        slots, last, lanes = last_of_equal(places, rows.lanes)
        row_of = slots // math.prod(lanes)
        begins = np.flatnonzero(np.diff(row_of, prepend=-1))[:: journal.most]
        for begin, stop in zip(begins, [*begins[1:], slots.size], strict=True):
            journal.cut()
            saved = np.unique(row_of[begin:stop])
            journal.save(saved[saved < stored])
            shape = (rows.tensors[0].shape[0], *lanes)
            at = tuple(map(torch.from_numpy, np.unravel_index(slots[begin:stop], shape)))
            items = [leaf.shape[len(shape) :] for leaf in rows.tensors]
            part = [
                chosen_items(leaf.detach(), last[begin:stop], item) for leaf, item in zip(leaves, items, strict=True)
            ]
            rows.write_at(at if lanes else at[0], part)

    def _refuse(self, places: object, leaves: list[Tensor], in_order: bool, is_new: bool) -> None:
        """Raise for a write that the rows cannot take. New memory is dropped then."""
        try:
            self.own_rows().refuse(places, leaves, in_order)
        except Exception:
            if is_new:
                self.disown()
            raise

    def emptied(self) -> None:
        """Forget all items; the memory is kept. Inside a transaction."""
        self.ring.renewed(0)
        self.ring.size = 0
        self.ring.emptied += 1
        if self.rows is not None:
            self.rows.clear()

    # ------------------------------------------------------------------ edits in place

    def refuse_edit(self, paths: Iterable[KeyPath]) -> None:
        """RuntimeError if one of these entries cannot be written in place, or nothing can be written at all."""
        if self.guard.is_read_only:
            with self.guard.transaction():  # raises
                pass
        if self.layout is None or self.rows is None:
            return
        fixed = {self.layout.leaves[place].path: self.layout.leaves[place].name for place in self.rows.fixed}
        paths = list(paths)
        varied = [path for path in paths if path in self.layout.varied]
        if varied:
            raise RuntimeError(
                f"{', '.join(map(str, varied))}: text and ragged rows are not edited in place: write whole items, by "
                "rb[index] = data; nothing was written"
            )
        refused = [fixed[path] for path in paths if path in fixed]
        if refused:
            raise RuntimeError(
                f"{', '.join(refused)} cannot be edited: observations, ends and ids determine the frames of items, and stay "
                "as they were written; nothing was written"
            )

    def editable(self, given: object) -> TensorDict | None:
        """The entries that can be written in place, of rows that are otherwise copied at reads; None if reads are views.

        RuntimeError if an entry named in `given` cannot be written in place.
        """
        self.refuse_edit(())
        rows = self.rows
        layout = self.layout
        if rows is None or layout is None:
            return None
        if (self.packs or rows.fixed) and (isinstance(given, Mapping) or is_tensor_collection(given)):
            self.refuse_edit(path for path, _ in entries_below(given))
        if not rows.fixed or not layout.is_tensordict:
            return None
        views = TensorDict({}, (self.ring.size, *self.lanes))
        for place, spec in enumerate(layout.leaves):
            if place not in rows.fixed:
                column = rows.column(place)
                assert column is not None
                views.set(spec.path, column[: self.ring.size])
        return views

    def edited(self) -> None:
        """Entries were changed in place, through views."""
        if isinstance(self.rows, JaxRows):
            self.rows.settle()

    # ------------------------------------------------------------------ text and ragged rows

    def spans(self) -> dict[KeyPath, np.ndarray]:
        """The spans of text and ragged entries of all stored rows, [rows, *lanes, ..., 2], by path."""
        assert self.layout is not None
        leaves = self.own_rows().at(self.ring.size, slice(None))
        return {path: spans.detach().cpu().numpy() for path, spans in self.layout.spans(leaves).items()}

    def used_spans(self) -> list[np.ndarray]:
        """All spans that stored rows use, int64 [n, 2] for each entry: with those of the pieces of ragged rows."""
        layout = self.layout
        assert layout is not None and layout.values is not None
        found = []
        for path, spans in self.spans().items():
            flat = spans.reshape(-1, 2)
            found.append(used_spans(layout.values, flat) if layout.varied[path].shares else flat)
        return found

    def _reclaim(self, values: PackedValues) -> None:
        """Free segments of text and ragged rows that no row uses, and move the rows out of segments that few rows use."""
        layout = self.layout
        rows = self.own_rows()
        stored = self.ring.size
        spans = self.spans()
        assert layout is not None
        sparse = values.reclaim(self.used_spans())
        if not sparse.size:
            return
        within = []
        for path, of_entry in spans.items():
            if layout.varied[path].shares:
                pieces, counts = pieces_of(values, of_entry.reshape(-1, 2))
                of_rows = np.repeat(np.arange(len(counts)), counts)
                hit = values.within(of_entry.reshape(-1, 2), sparse)
                hit[of_rows[values.within(pieces, sparse)]] = True
                within.append(hit.reshape(stored, -1).any(1))
            else:
                within.append(values.within(of_entry, sparse).reshape(stored, -1).any(1))
        places = torch.from_numpy(np.flatnonzero(np.any(within, 0)))
        leaves = rows.at(stored, places.to(rows.device))
        for path in spans:
            old = leaves[layout.places[path]]
            again = partial(moved, values) if layout.varied[path].shares else values.again
            new = torch.from_numpy(again(old.detach().cpu().numpy().reshape(-1, 2)))
            leaves[layout.places[path]] = new.reshape(old.shape).to(old.device)
        self.write_at(places, leaves, None, self.row_count)

    def appended(
        self, places: tuple[Tensor, ...], more: Mapping[KeyPath, object], replace: Mapping[KeyPath, object]
    ) -> Callable[[], None]:
        """Check and pack values that are added to text and ragged rows. The function writes them, and may run twice.

        Each row has its values from before or all of the new ones, also after a kill in the middle.

        Args:
            places: of different stored items, int64 [n] for each item dim, on the CPU.
            more: by path, for each item what is put behind its value.
            replace: by path the new values of other entries, [n, ...] as the rows have them; a number is for all.

        Raises, before anything is written: KeyError for an entry that is not stored, TypeError for one that is no text or
        ragged rows, and the errors of `Varied.extended`, of `fitting` and of writes.
        """
        self.own_rows()
        layout = self.layout
        assert layout is not None
        if layout.values is not None:
            self.refuse_edit(())  # before values are appended
            if layout.values.due:
                self._reclaim(layout.values)
        if unknown := [as_key(path) for path in (*more, *replace) if path not in layout.places]:
            names = ", ".join(spec.name for spec in layout.leaves)
            raise KeyError(
                f"{unknown} are not stored{nearest(unknown, layout.places)}; stored are {names}; nothing was written"
            )
        self.refuse_edit(replace)
        for path in more:
            if path not in layout.varied or len(layout.leaves[layout.places[path]].shape) != 1:
                raise TypeError(
                    f"{layout.leaves[layout.places[path]].name} has the same shape in all items, only text and ragged rows "
                    "grow: pass it in replace=, or name it in the ragged= of the storage; nothing was written"
                )
        at = places if self.ndim > 1 else places[0]
        leaves, _ = self.read(at)
        for path, value in replace.items():
            leaves[layout.places[path]] = fitting(leaves[layout.places[path]], value, path)
        values = layout.values
        for path, data in more.items():
            assert values is not None  # an entry that grows is in it
            place = layout.places[path]
            grown = layout.varied[path].extended(leaves[place].detach().cpu(), data, values, layout.leaves[place].name)
            leaves[place] = grown.to(leaves[place].device)

        def write() -> None:
            self.write_at(at, leaves, None, self.row_count)

        return write

    # ------------------------------------------------------------------ reads

    def read(self, index: object) -> tuple[list[Tensor], tuple[int, ...]]:
        """The leaves of items at an index over the filled part, and the shape of the items.

        Views for ints and slices, copies for arrays and masks. RuntimeError before the first write, IndexError out of range.
        """
        rows = self.own_rows()
        stored = (self.ring.size, *self.lanes)
        if isinstance(index, tuple):
            index = tuple(each if is_basic(each) else as_tensor(each) for each in spelled_out(index, self.ndim))
            if self.ndim > 1 and len(index) == self.ndim and all(map(_is_long, index)):
                flat = torch.zeros((), dtype=torch.int64, device="cpu")
                for axis, each in enumerate(index):
                    flat = flat * stored[axis] + in_range(each, stored[axis])
                return self.read_slots(flat)
            index = index[0] if len(index) == 1 else index
        single = as_int(index)
        if single is not None and not -stored[0] <= single < stored[0]:
            raise IndexError(f"index {single} is out of range: {stored[0]} rows are stored")
        if single is not None or is_basic(index):
            place = index if single is None else single
            return rows.at(stored[0], place), indexed(stored, place)
        if isinstance(index, tuple):
            return rows.at(stored[0], index), indexed(stored, index)
        place = as_tensor(index)
        if place.dtype == torch.bool:
            if tuple(place.shape) != stored[: place.ndim]:
                raise IndexError(f"the mask has shape {list(place.shape)}, the filled part {list(stored)}")
            place = place.to(rows.device)
            return rows.at(stored[0], place), indexed(stored, place.cpu())
        place = in_range(place, stored[0])
        if self.ndim == 1:
            return self.read_slots(place)
        return rows.at(stored[0], place.to(rows.device)), (*place.shape, *stored[1:])

    def read_slots(self, slots: Tensor) -> tuple[list[Tensor], tuple[int, ...]]:
        """Copies of the leaves of items at flat slots, which are not checked, and their shape."""
        rows = self.own_rows()
        shape = tuple(slots.shape)
        leaves = rows.read(slots if len(shape) == 1 else slots.reshape(-1))
        if len(shape) != 1:
            leaves = [leaf.reshape((*shape, *leaf.shape[1:])) for leaf in leaves]
        return leaves, shape

    def build(self, leaves: Sequence[Tensor], batch_size: Sequence[int]) -> object:
        """Items of these leaves, of the user's type."""
        assert self.layout is not None
        device = self.place.device
        return self.layout.build(leaves, batch_size, device if isinstance(device, torch.device) else None)

    def columns(self) -> dict[KeyPath, Tensor]:
        """Views of all stored rows of each leaf, [rows, *lanes, ...], by path."""
        assert self.layout is not None
        leaves = self.own_rows().at(self.ring.size, slice(None))
        return {spec.path: leaf for spec, leaf in zip(self.layout.leaves, leaves, strict=True)}

    def column(self, path: KeyPath) -> Tensor | None:
        """The memory of an entry, [rows, *lanes, ...]; None if it is not one tensor.

        KeyError for an entry that is not stored, TypeError for text and ragged rows.
        """
        rows = self.own_rows()
        layout = self.layout
        name = path[0] if len(path) == 1 else path
        assert layout is not None
        if path not in layout.places:
            stored = ", ".join(spec.name for spec in layout.leaves)
            raise KeyError(f"{name!r} is not stored as a tensor; stored are {stored}")
        if path in layout.varied:
            raise TypeError(f"{name!r} holds text or ragged rows, which have no column; a tensor is needed here")
        return rows.column(layout.places[path])

    def host_columns(self, paths: Sequence[KeyPath]) -> list[np.ndarray | None] | None:
        """NumPy views of entries, [items, ...] each, None for an entry that is not stored; None if one has no view."""
        rows = self.own_rows()
        layout = self.layout
        dims = self.ndim
        assert layout is not None
        columns: list[np.ndarray | None] = []
        for path in paths:
            if (place := layout.places.get(path)) is None:
                columns.append(None)
                continue
            column = rows.array(place)
            if column is None or not (dims == 1 or column.flags.c_contiguous):
                return None
            if dims > 1:
                column = column.reshape(math.prod(column.shape[:dims]), *column.shape[dims:])
            columns.append(column)
        return columns

    # ------------------------------------------------------------------ copies and other processes

    def is_shared(self) -> bool:
        """Whether other processes see what this one writes."""
        return self.place.is_found() if self.rows is None else self.rows.shared

    def shares_in_forks(self) -> bool:
        """Whether forked children share it without being asked. In memory maps also the first write may be theirs."""
        return self.is_shared() or (self.place.mapped and self.rows is None and not self.guard.is_read_only)

    def start_sharing(self, owner: object) -> None:
        """Move rows to where other processes see them. `owner` is the storage that keeps the table."""
        if self.rows is None:
            self.place.prepare_sharing()
        self.meet(owner)
        if self.layout is not None and self.layout.values is not None:
            folder = self.place.values_folder()
            if folder is None:
                raise RuntimeError(
                    f"text and ragged rows of this {self.kind} are in memory of this process: use a LazyMemmapStorage, or a "
                    "LazyTensorStorage with compilable=False, to share them"
                )
            self.layout.values.move_to(folder)
        if self.rows is not None:
            self.rows.share()

    def meet(self, owner: object) -> None:
        """Let processes find memory that one of them allocates."""
        self.place = self.place.shared(owner)

    def state_for_worker(self) -> dict[str, object]:
        """What a process that is starting needs, which shares the rows."""
        tensors = None
        if self.rows is not None:
            with self.guard.held():
                self.rows.share()
            tensors = self.rows.tensors
        return {**self._plain_state(), "_tensors": tensors}

    def state_for_copy(self) -> dict[str, object]:
        """What a copy needs, which has memory of its own."""
        tensors = None
        layout = self.layout
        if self.rows is not None:
            tensors = self.rows.copies(self.ring.size)
            if layout is not None and layout.values is not None:
                layout = layout.keeping(layout.values.copied())
        state = {**self._plain_state(), "place": self.place.copied(self.rows is not None)}
        return {**state, "layout": layout, "_epoch": 0, "_tensors": tensors}

    def _plain_state(self) -> dict[str, object]:
        state = {**self.__dict__}
        del state["rows"], state["ring"], state["guard"], state["followers"]
        return state

    @classmethod
    def of_state(
        cls, state: dict[str, object], ring: Ring, guard: Guard, followers: Followers, owner: object
    ) -> "Table":
        """The table of a state, with the counters, the guard and the followers of the new storage, which owns it."""
        table = cls.__new__(cls)
        tensors: Any = state.pop("_tensors")
        table.__dict__.update(state)
        table.ring = ring
        table.guard = guard
        guard.guards(table)
        table.followers = followers
        table.rows = None
        table.place = table.place.attached(guard, ring, owner)
        if tensors is not None:
            assert table.layout is not None
            table.rows = table.place.holding(table.layout, tensors, table.lead)
            guard.device_writes = table.rows.writes
        if guard.journal.memory is not None:
            guard.journal.attach(ring)
            table.record_rows()
        return table


def some(leaves: list[Tensor]) -> list[Tensor]:
    """The leaves. RuntimeError for none."""
    if not leaves:
        raise RuntimeError("cannot store items without any tensor")
    return leaves


def _around(row: int, count: int, capacity: int, below: int) -> list[range]:
    """The `count` rows from `row` on around the ring, as ranges, without rows from `below` on."""
    ranges = [range(row, min(row + count, below)), range(min(row + count - capacity, below))]
    return [rows for rows in ranges if len(rows)]


def _named(rows: object, are_whole: bool) -> range | np.ndarray:
    """The rows of resolved places; a range if they are consecutive and whole."""
    if isinstance(rows, int):
        named: range | np.ndarray = range(rows, rows + 1)
    elif not isinstance(rows, slice):
        return rows.reshape(-1).numpy() if isinstance(rows, Tensor) else np.array([rows])
    elif rows.step in (None, 1) and rows.start < rows.stop:
        named = range(rows.start, rows.stop)
    else:
        return np.arange(rows.start, rows.stop, rows.step or 1)
    return named if are_whole else np.array(named)


def _is_long(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.int64


def _device_of(layout: Layout, leaves: Sequence[Tensor]) -> torch.device:
    """The device of the first tensor; spans are on the CPU."""
    tensors = (leaf for spec, leaf in zip(layout.leaves, leaves, strict=True) if spec.path not in layout.varied)
    return next(tensors, leaves[0]).device
