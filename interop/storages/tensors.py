"""Tensors, tensordicts and pytrees in preallocated memory."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDictBase, is_tensor_collection
from tensordict.utils import NestedKey
from torch import Tensor

from fbuf.memory_plan import Share
from interop.checkpoint import tensor_states
from interop.checkpoint.checkpointers import TensorStorageCheckpointer
from interop.checkpoint.state import EXACT, LoadOptions
from interop.data.arguments import whole
from interop.data.index import as_int, indexed, is_basic, reach, resolved, whole_rows
from interop.data.keys import as_path, entries_below
from interop.data.layout import Layout, LeafSpec, stack_items
from interop.data.layout import Path as KeyPath
from interop.data.packed import PackedValues
from interop.host import maps
from interop.host.device_rows import JaxRows, rows_in_jax
from interop.host.rows import Rows, TorchRows
from interop.host.threads import uninterrupted
from interop.shared.first_write import FirstWrite
from interop.shared.journal import LARGEST, Guarded, Journal
from interop.shared.memory import Memory
from interop.shared.processes import starting_a_worker
from interop.storages import further_keys, planning, reading, writes
from interop.storages.ragged_rows import reclaim
from interop.storages.storage import Storage

if TYPE_CHECKING:
    from interop.specs.spec import TensorSpec  # a program without specs does not load them


class TensorStorage(Storage):
    """Items in memory of the user: a tensor, tensordict, tensorclass or pytree of tensors, which counts as full.

    Args:
        storage: the memory; its leaves share their first `ndim` dims. A tensordict without entries reserves room for as
            many items as its batch size says; the first write fixes the keys and allocates.
        max_size: must agree with the size of `storage`.
        device: where the memory is; "auto" leaves it where it is.
        ndim: how many leading dims count as items: 1 for rows, 2 for [time, environments].
        compilable: keep the length local to this process.
    """

    AS_STORED: Collection[KeyPath] = ()  # entries that the `get` of a subclass returns as they are in the rows
    default_checkpointer = TensorStorageCheckpointer
    _allocates = False  # whether the constructor got a tensordict without entries
    mapped = False  # whether rows are in files; tensordicts that are views of them are locked
    of_frames = False  # whether rows can only be written in order
    fill: Mapping[KeyPath, Tensor] | None = None  # values of stored rows under keys that come with a later batch
    _keeps_layout = False  # whether `allocate` fixed the layout
    _ragged: frozenset[KeyPath] = frozenset()  # entries whose rows may have any length
    _first: FirstWrite | None = None  # where processes find memory that one of them allocates at the first write

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        if storage is None and max_size is None:
            raise ValueError("TensorStorage needs the memory to use (storage=...), or a max_size")
        self.ndim = ndim = whole("ndim", ndim)
        self.device: torch.device | str = device if device == "auto" else torch.device(device)
        self.layout: Layout | None = None
        self.rows: Rows | None = None
        self.lanes: tuple[int, ...] = ()
        self.per_row = 1  # items
        if storage is None:
            super().__init__(max_size, compilable=compilable)  # type: ignore[arg-type]  # checked above
            return
        layout = Layout.of(storage, ndim)
        if layout.is_tensordict and not layout.leaves:
            self._allocates = True
            super().__init__(math.prod(storage.batch_size[:ndim]), compilable=compilable)
            return
        tensors = _some(layout.flatten(storage, ndim))
        shape = tensors[0].shape[:ndim]
        if max_size is not None and max_size != shape[0]:
            raise ValueError(f"max_size={max_size} does not agree with the size of the storage, {shape[0]}")
        if any(0 in [s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in tensors):
            raise ValueError("a tensor of the storage was expanded: its rows share memory. Pass storage.clone()")
        super().__init__(math.prod(shape), compilable=compilable)
        self.device = tensors[0].device if device == "auto" else torch.device(device)
        self.adopt(layout, TorchRows([_given(tensor).to(self.device) for tensor in tensors], tuple(shape[1:])))
        self.ring.size = tensors[0].shape[0]

    def adopt(self, layout: Layout, rows: Rows) -> None:
        if layout.varied:
            layout = layout.keeping(self.values_for(layout))
        self.layout, self.rows, self.lanes, self.per_row = layout, rows, rows.lanes, math.prod(rows.lanes)
        if self.journal.is_wanted:
            self.guard()
            self.lock.hooked = True  # an unfinished write is rolled back first
        elif self.lock.processes is not None:
            try:
                self._start_journal()
            except BaseException:  # there is no memory for it
                self._disown()
                raise

    @property
    def packs(self) -> bool:
        """Whether items have text or ragged rows."""
        return self.layout is not None and bool(self.layout.varied)

    def spans(self) -> dict[KeyPath, np.ndarray]:
        """The spans of text and ragged entries of all stored rows, [rows, *lanes, ..., 2], by path."""
        assert self.layout is not None
        leaves = self.own_rows().at(self.filled_rows, slice(None))
        return {path: held.detach().cpu().numpy() for path, held in self.layout.spans(leaves).items()}

    def columns(self) -> dict[KeyPath, Tensor]:
        """Views of all stored rows of each leaf, [rows, *lanes, ...], by path."""
        assert self.layout is not None
        held = self.own_rows().at(self.filled_rows, slice(None))
        return {spec.path: leaf for spec, leaf in zip(self.layout.leaves, held, strict=True)}

    def values_for(self, layout: Layout) -> PackedValues | None:
        """The memory of text and ragged rows for items of this layout."""
        folder, held = self._values_folder(), layout.values
        if not layout.varied or (held is not None and held.folder == folder):
            return held
        return PackedValues(folder)

    def _values_folder(self) -> Path | None:
        """The folder of text and ragged rows; None if they are in memory."""
        return None

    def start_sharing(self) -> None:
        if self.layout is not None and self.layout.values is not None:
            folder = self._values_folder()
            if folder is None:
                raise RuntimeError(
                    f"text and ragged rows of this {type(self).__name__} are in memory of this process: use a "
                    "LazyMemmapStorage, or a LazyTensorStorage with compilable=False, to share them"
                )
            self.layout.values.move_to(folder)
        if self.rows is not None:
            self.rows.share()
        super().start_sharing()

    def editable(self, given: Any) -> Any:
        if self.packs and (isinstance(given, Mapping) or is_tensor_collection(given)):
            self.refuse_edit(path for path, _ in entries_below(given))
        return super().editable(given)

    def refuse_edit(self, paths: Iterable[KeyPath]) -> None:
        hit = [path for path in paths if path in self.layout.varied] if self.layout is not None else []
        if hit:
            raise RuntimeError(
                f"{', '.join(map(str, hit))}: text and ragged rows are not edited in place: write whole items, by "
                "rb[index] = data; nothing was written"
            )

    def _layout_of(self, data: Any, dims: int) -> Layout:
        """The layout of items like those of data, which has so many leading dims."""
        return Layout.of(data, dims, self._ragged)

    @property
    def is_elsewhere(self) -> bool:
        """Whether other processes may use the rows."""
        return self.lock.given

    def give_up_memory(self) -> None:
        """Drop the memory of an empty storage; the next write allocates."""
        self._disown()

    def _disown(self) -> None:
        """Drop the rows."""
        self.layout, self.rows, self.lanes, self.per_row, self.priorities = None, None, (), 1, None

    @property
    def initialized(self) -> bool:
        """Whether the storage has memory."""
        if self._first is not None:
            self._look()
        return self.rows is not None

    def acquired(self) -> None:
        if self._first is not None:
            self._look()
        super().acquired()

    def _look(self) -> None:
        """Take the memory that another process has allocated, and drop memory that one has given up."""

    @property
    def max_size(self) -> int:
        return self.row_count * self.per_row  # the rows are whole

    @property
    def row_count(self) -> int:
        return -(-self._max_size // self.per_row)

    @property
    def filled_rows(self) -> int:
        return self.ring.size

    @property
    def shape(self) -> torch.Size | None:
        """The filled part: [rows, *lanes]; None before the first write."""
        return torch.Size([self.filled_rows, *self.lanes]) if self.rows is not None else None

    @property
    def item_layout(self) -> Layout | None:
        """The layout of the items in memory; None before the first write."""
        return self.layout

    @property
    def fixed_layout(self) -> Layout | None:
        """The layout that new items must have; None if the next write fixes it."""
        fixed = self.ring.size or self._keeps_layout or not self.may_renew()
        return self.layout if fixed else None

    def may_renew(self) -> bool:
        """Whether an empty storage may allocate memory for items of another layout."""
        return self._allocates and self.lock.processes is None

    def takes(self, layout: Layout, lanes: tuple[int, ...]) -> bool:
        """Whether items of this layout and these lanes fit into the memory of an empty storage."""
        return self.layout is not None and self.lanes == lanes and self.layout.alike(layout)

    def rows_for(self, lanes: tuple[int, ...]) -> int:
        """How many rows of these lanes there is room for."""
        return -(-self._max_size // max(math.prod(lanes), 1))

    def new_rows(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        """Memory for rows [*lead, ...]. Pass it to `adopt`, or call `release_memory`."""
        return self._memory(layout, lead)

    def _needs_memory(self, data: Any, dims: int) -> bool:
        """Whether writing data with `dims` leading dims needs new memory."""
        if self.fixed_layout is not None:
            return False
        return not self.takes(self._layout_of(data, dims), self.lanes_of(data, dims == self.ndim))

    def row_capacity(self, data: Any) -> int:
        if self.ndim == 1 or data is None or not self._needs_memory(data, self.ndim):
            return self.row_count
        return _rows_for(self._max_size, math.prod(self.lanes_of(data, batch=True)))

    def item_capacity(self, data: Any) -> int:
        """How many items fit, once a batch like `data` is written."""
        return self.row_capacity(data) * math.prod(self.lanes_of(data, batch=True))

    def edited(self, rows: Any) -> None:
        super().edited(rows)
        if isinstance(self.rows, JaxRows):
            self.rows.settle()

    def lanes_of(self, data: Any, batch: bool) -> tuple[int, ...]:
        """The lanes of the data of a first write: a batch of rows, a list of rows, or one row."""
        if isinstance(data, list) and data:
            data, batch = data[0], False
        if self.ndim == 1:
            return ()
        shape = _some(Layout.of(data, 0).flatten(data, 0))[0].shape
        if len(shape) < batch + self.ndim - 1:
            raise RuntimeError(f"the storage has ndim={self.ndim}: data of shape {list(shape)} has too few dims")
        return tuple(shape[batch:][: self.ndim - 1])

    def __len__(self) -> int:
        return self.ring.size * self.per_row

    @property
    def _storage(self) -> Any:
        """The whole memory as the user's type."""
        if self.rows is None or self.layout is None:
            return None
        return self.build(self.rows.tensors, (self.row_count, *self.lanes))

    def _allocate(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        """Memory for leaves of shape [*lead, ...], lead being [rows, *lanes]."""
        if not self._allocates:
            raise RuntimeError(
                "this TensorStorage was built without memory: use LazyTensorStorage to have it allocated"
            )
        return self._fresh(layout.leaves, lead)

    def _fresh(self, leaves: Sequence[LeafSpec], lead: tuple[int, ...]) -> Rows:
        """Memory for these leaves."""
        zeros = [torch.zeros((*lead, *spec.shape), dtype=spec.dtype, device=self.device) for spec in leaves]
        return TorchRows(zeros, lead[1:])

    def allocate(self, spec: "TensorSpec") -> None:
        """Allocate the memory for all items before the first write, for items of a spec.

        Keys, shapes and dtypes are fixed from then on, also after `empty`; not in processes that were started before, and
        not after the folder is opened again. Values are not checked against the spec. Disk space is reserved; other
        memory on the CPU is taken as rows are written.

        Args:
            spec: of an item; with `ndim` > 1 of a row, whose shape begins with the other dims of items, such as
                [environments]. The "index" that a writer adds to tensordicts is stored only if it is in the spec.

        Raises:
            RuntimeError: the layout is fixed already.
            TypeError: an entry is not a tensor.
            ValueError: a dim is dynamic (-1).
            NotEnoughMemoryError, OSError: there is not enough memory or disk space; nothing was allocated.
        """
        with self.lock.held(), self.transaction():
            self.refuse_forked_child()
            if self.fixed_layout is not None:
                raise RuntimeError(
                    "the layout of items is fixed already: call allocate() before the first write, and once"
                )
            row = planning.row_of(spec, self.ndim)
            self.give_up_memory()
            planning.plan(self.memory_shares(row)).check()
            self.admit(row, self.ndim, True)
            self.own_rows().reserve(self.row_count)
            self._keeps_layout = True

    def memory_shares(self, data: Any) -> list[Share]:
        if self.rows is not None and self.layout is not None:
            shares = self._planned(self.layout, (self.row_count, *self.lanes))
            values = self.layout.values
            return shares if values is None else [*shares, _share(values.folder, values.bytes)]
        if data is None:
            raise RuntimeError("nothing was written yet: give plan() the data that will be, as extend() takes it")
        data = self._stacked(data[:1]) if isinstance(data, list) else planning.example(data, self.ndim)
        layout = self._layout_of(data, self.ndim)
        lanes = self.lanes_of(data, batch=True)
        device = _device_of(layout, _some(layout.flatten(data, self.ndim)))
        shares = self._planned(layout, (_rows_for(self._max_size, math.prod(lanes)), *lanes), device)
        return [*shares, _share(self._values_folder(), None)] if layout.varied else shares

    def _planned(self, layout: Layout, lead: tuple[int, ...], found: torch.device | None = None) -> list[Share]:
        """The memory of leaves [*lead, ...]; `found` is the device of the first data."""
        device = self.device if isinstance(self.device, torch.device) else found
        return planning.arrays("items", layout.leaves, lead, planning.place_of(device or torch.device("cpu")))

    def _memory(self, layout: Layout, lead: tuple[int, ...]) -> Rows:
        """Memory for rows [*lead, ...], allocated here or by another process."""
        return self._allocate(layout, lead)

    def _stacked(self, data: Any) -> Any:
        """A list of items as one batch of them."""
        if not isinstance(data, list):
            return data
        return stack_items(data, self._ragged if self.layout is None else {*self._ragged, *self.layout.varied})

    def admit(
        self, data: Any, dims: int, new: bool, lead: tuple[int, ...] | None = None, whole: bool = False
    ) -> list[Tensor]:
        """The leaves of data with `dims` leading dims, checked; `new` data fixes the layout and allocates.

        New keys are added if data has all stored rows (`whole`), or if there is a `fill` for them. KeyError, TypeError or
        RuntimeError for data that does not fit, or whose leading dims are not `lead`. Stored rows do not change.
        """
        layout = self._layout_of(data, dims) if new or self.layout is None else self.layout
        if layout.values is not None and not new:
            self.refuse_edit(())  # before values are appended
            if layout.values.due:
                reclaim(self, layout.values)
        try:
            leaves = _some(layout.flatten(data, dims))
        except KeyError:
            wider = further_keys.wider(self, layout, data, dims)
            added = wider.places.keys() - layout.places.keys()
            if not added or not (whole or (self.fill and added <= self.fill.keys() - wider.varied.keys())):
                raise
            layout, leaves = wider, wider.flatten(data, dims)
        found = tuple(leaves[0].shape[:dims])
        if lead is not None and found != lead:
            raise RuntimeError(f"the index names places of shape {lead}, data has {found}; nothing was written")
        lanes = found[dims - self.ndim + 1 :] if self.ndim > 1 else ()
        if new:
            self.give_up_memory()
            wanted, rows = self.device, _rows_for(self._max_size, math.prod(lanes))
            self.device = _device_of(layout, leaves) if wanted == "auto" else wanted
            try:
                # The memory outlives settings of the caller. A signal here would leave files without an owner.
                with uninterrupted(), torch.inference_mode(False), torch.device("cpu"):
                    memory = self._memory(layout, (rows, *lanes))
                    memory.reserve(found[0] if dims == self.ndim else 1)
                    kept = layout.keeping(self.values_for(layout))
                    if kept is not layout:  # its folder exists now
                        layout, leaves = kept, kept.flatten(data, dims)
                    self.adopt(layout, memory)
            except Exception:
                self.device = wanted  # the next data may be on another device, with more memory
                raise
        elif lead is None and lanes != self.lanes:
            raise RuntimeError(f"items have the batch dims {self.lanes}, got {lanes}; nothing was written")
        if layout is not self.layout:
            further_keys.widen(self, layout, leaves if whole else None)
        return leaves

    def add_columns(self, data: TensorDictBase) -> None:
        assert self.layout is not None
        layout = further_keys.wider(self, self.layout, data, self.ndim)
        further_keys.widen(self, layout, layout.flatten(data, self.ndim))

    def further_rows(self, layout: Layout, new: Mapping[LeafSpec, Tensor]) -> Rows:
        """Rows of new leaves with these values; `layout` has all leaves."""
        lead = self.row_count, *self.lanes
        planning.refuse(self._planned(Layout(layout.root, tuple(new)), lead))
        rows = self._fresh(tuple(new), lead)
        rows.reserve(self.filled_rows)
        if self.ring.size:
            rows.write_run(0, list(new.values()))
        return rows

    def set_run(self, start: int, index: Tensor, data: Any, advance: writes.Advance = lambda *_: None) -> None:
        """Write rows from `start` on, around the ring; `index` has their numbers.

        `advance(index, count, cursor)` is called after the rows are written; several times for a large batch.
        """
        data = self._stacked(data)
        new = self._needs_memory(data, self.ndim)
        leaves = self.admit(data, self.ndim, new)
        if leaves[0].shape[0] != index.shape[0]:
            raise RuntimeError(f"{index.shape[0]} places for {leaves[0].shape[0]} rows; nothing was written")
        count = leaves[0].shape[0]
        self._refuse(range(start, start + count), leaves, True, new)
        writes.write_run(self, start, index, leaves, advance)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write data at an int, slice, mask, array or tensor of rows, or a tuple of these over rows and lanes. O(batch).

        Of equal places the last wins. IndexError for rows out of range, RuntimeError if the length would grow over rows
        that were never written, and the errors of `admit`. Nothing is written then.
        """
        data, dims = self._stacked(data), self.ndim - (as_int(cursor) is not None)
        new = self.rows is None if type(cursor) is tuple else self._needs_memory(data, dims)
        lanes = self.lanes_of(data, batch=as_int(cursor) is None) if new else self.lanes
        rows, filled = _rows_for(self._max_size, math.prod(lanes)), 0 if new else self.filled_rows
        if type(cursor) is int and set_cursor and not new and 0 <= cursor <= filled and cursor < rows:
            self.write_at(cursor, self.admit(data, len(lanes), False, lanes), cursor + 1, rows, new)
            return
        # Negative places count from the end of the filled part, as in reads.
        places = resolved(cursor, filled, rows if new or set_cursor else filled, (rows, *lanes))
        named = indexed((rows, *lanes), places)
        if new and not whole_rows(places):
            raise RuntimeError("the first write must be of whole rows, to tell what a row is; nothing was written")
        reached, gapless = reach(places, filled) if set_cursor else (0, True)
        if not gapless:
            raise RuntimeError(
                f"a write up to row {reached - 1} where {filled} are stored must be of whole rows and leave no gap: what "
                "was never written would count as stored; nothing was written"
            )
        first = places[0] if isinstance(places, tuple) else places
        whole = not set_cursor and isinstance(first, slice) and named[0] == filled == len(range(filled)[first])
        leaves = self.admit(data, len(named), new, named, whole and whole_rows(places))
        self.write_at(places, leaves, reached if set_cursor else None, rows, new)

    def write_at(self, places: Any, leaves: list[Tensor], reached: int | None, rows: int, new: bool) -> None:
        """Write at resolved places. With `reached` the length grows to it."""
        self._refuse(places, leaves, reached is not None, new)
        writes.write_at(self, places, leaves, reached, rows)

    def _refuse(self, places: Any, leaves: list[Tensor], in_order: bool, new: bool) -> None:
        """Raise for a write that the rows cannot take. `new` memory is dropped then."""
        try:
            self.own_rows().refuse(places, leaves, in_order)
        except Exception:
            if new:
                self._disown()
            raise

    def flatten(self) -> Storage:
        """A storage over a copy of the content with one item dim; self if it has one."""
        rows = self.own_rows()
        if self.ndim == 1:
            return self
        kept = [each.flatten(0, self.ndim - 1).clone() for each in rows.at(self.filled_rows, slice(None))]
        return TensorStorage(self.build(kept, (len(self),)), device=self.device)

    @property
    def tracks_writes(self) -> bool:
        return type(self).set is TensorStorage.set and type(self).set_run is TensorStorage.set_run

    def _empty(self) -> None:
        with self.part():
            self.ring.renewed(0)
            self.ring.size = 0
            self.ring.emptied += 1

    def _start_journal(self) -> None:
        """Record writes, so that the next process rolls back the write of a killed one."""
        guardable = self.is_shared() if self.rows is None else self.rows.in_place
        if guardable and not self.journal.is_wanted and not self._compilable:
            self.journal.start(self.ring, Memory(self._journal_size()))
            if self.rows is not None:
                self.guard()

    def _journal_size(self) -> int:
        if self.rows is None:
            return Journal.size_unknown()
        leaves = self.rows.tensors
        row = max(sum(leaf[:1].nbytes for leaf in leaves), LARGEST if self.may_renew() else 0)
        return Journal.size(row, len(leaves), self.per_row, self.row_count)

    def guard(self) -> None:
        """Let the journal record writes of the rows."""
        self.journal.guard(self.ring, self.guarded())

    def guarded(self) -> Guarded:
        """The memory that the journal records."""
        return Guarded(self.rows, self.per_row, None if self.priorities is None else self.priorities.by_row)

    # ------------------------------------------------------------------ reads

    def get(self, index: Any) -> Any:
        """The items at an index over the filled part: a view for ints and slices, a copy for arrays and masks.

        RuntimeError before the first write, IndexError out of range.
        """
        return reading.read(self, index)

    def is_live(self, index: Any) -> bool:
        return is_basic(index)

    def column(self, key: NestedKey) -> Tensor | None:
        return reading.column(self, as_path(key)) if self._reads_rows(as_path(key)) else None

    def host_columns(self, paths: Sequence[KeyPath]) -> list[np.ndarray | None] | None:
        return None if self.layout is None or not all(map(self._reads_rows, paths)) else reading.views(self, paths)

    def _reads_rows(self, path: KeyPath) -> bool:
        """Whether an entry is read from the rows, not by `get` of a subclass."""
        return type(self).get is TensorStorage.get or path in self.AS_STORED

    def build(self, leaves: Sequence[Tensor], batch_size: Sequence[int], locked: bool = False) -> Any:
        """Items of these leaves."""
        assert self.layout is not None
        device = self.device if isinstance(self.device, torch.device) else None
        built = self.layout.build(leaves, batch_size, device)
        if locked and is_tensor_collection(built):
            built.lock_()
        return built

    def own_rows(self) -> Rows:
        """The rows. RuntimeError before the first write."""
        if self._first is not None:
            self._look()
        if self.rows is None:
            raise RuntimeError("Cannot get elements out of a non-initialized storage: call extend() or add() first")
        return self.rows

    # ------------------------------------------------------------------ checkpoints

    def saved(self) -> dict[str, Any]:
        return tensor_states.saved_rows(self)

    def restoring(self, saved: Any, options: LoadOptions = EXACT) -> Callable[[], None]:
        return tensor_states.restoring_rows(self, saved, options)

    def release_memory(self) -> None:
        """Give back memory of `new_rows` that was not adopted."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of the filled rows and of the counters of the ring: "_storage", "initialized", "_len" and more.

        Plain values and tensors only: `torch.load(weights_only=True)` reads it.
        """
        with self.lock.held():
            return tensor_states.state_of(self)

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy in a result of `state_dict`. After an error nothing has changed."""
        with self.lock.held():
            put = self.restoring_dict(state_dict)
            self.replace(put)

    def restoring_dict(self, given: Any) -> Callable[[], None]:
        return tensor_states.restoring_state(self, given)

    # ------------------------------------------------------------------ copies and other processes

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        rows = state.pop("rows")
        if rows is None:
            return {**state, "_tensors": None}
        in_jax, layout = isinstance(rows, JaxRows), self.layout
        if not starting_a_worker() and layout is not None and layout.values is not None:
            state["layout"] = layout.keeping(layout.values.copied())
        if not starting_a_worker():  # a copy has memory of its own
            tensors = rows.copies(self.ring.size)
            return {**state, "_tensors": tensors, "_in_jax": in_jax}
        with self.lock.held():
            rows.share()
        return {**state, "_tensors": rows.tensors, "_in_jax": in_jax}

    def is_shared(self) -> bool:
        return self.rows is not None and self.rows.shared

    def _refuse_to_share(self) -> None:
        super()._refuse_to_share()
        if self.rows is None and not self.is_shared():
            raise RuntimeError(
                f"Cowardly refusing to share a {type(self).__name__} that was not written to: the workers would each "
                "allocate their own. Call extend() or add() first, or build it with shared_init=True where it has that"
            )
        if isinstance(self.rows, JaxRows):
            raise RuntimeError(
                f"Cannot share a {type(self).__name__} on {self.rows.device} between processes, they would not see each "
                "other's writes: use a LazyMemmapStorage, or a LazyTensorStorage on the CPU"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors, in_jax = state.pop("_tensors"), state.pop("_in_jax", False)
        super().__setstate__(state)
        self.rows = None
        if tensors is not None:
            self.rows = self._rows_of(self._in_own_memory(tensors), in_jax)
        if self.journal.memory is not None:
            self.journal.attach(self.ring)
            self.guard()

    def _rows_of(self, tensors: Sequence[Tensor], in_jax: bool) -> Rows:
        """The rows of a storage that was pickled or copied."""
        in_jax = in_jax and rows_in_jax(tensors[0].device)
        return (JaxRows.holding if in_jax else TorchRows)(tensors, self.lanes)

    def _in_own_memory(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Unpickled rows, in memory maps if this storage has these."""
        if not self.mapped or any(isinstance(tensor, MemoryMappedTensor) for tensor in tensors):
            return tensors
        return maps.copied(tensors)

    def __repr__(self) -> str:
        data = "<empty>" if self.rows is None else self[:]
        body = f"data={data},\nshape={self.shape},\nlen={len(self)},\nmax_size={self.max_size}"
        return f"{type(self).__name__}(\n" + "\n".join("    " + line for line in body.splitlines()) + ")"


def _share(folder: Path | None, size: int | None) -> Share:
    return Share("values", "of text and ragged rows", "cpu" if folder is None else str(folder), size)


def _device_of(layout: Layout, leaves: Sequence[Tensor]) -> torch.device:
    """The device of the first tensor; spans are on the CPU."""
    tensors = (leaf for spec, leaf in zip(layout.leaves, leaves, strict=True) if spec.path not in layout.varied)
    return next(tensors, leaves[0]).device


def _some(leaves: list[Tensor]) -> list[Tensor]:
    if not leaves:
        raise RuntimeError("cannot store items without any tensor")
    return leaves


def _given(tensor: Tensor) -> Tensor:
    """The user's memory without its graph. Memory maps stay as they are, so that workers open the same files."""
    mapped = isinstance(tensor, MemoryMappedTensor) and getattr(tensor, "index", None) is None
    return tensor if mapped else tensor.detach()


def _rows_for(items: int, per_row: int) -> int:
    """How many whole rows have room for items."""
    if per_row == 0:
        raise RuntimeError("the data has a batch dim of size 0: its rows would hold no items; nothing was written")
    return -(-items // per_row)
