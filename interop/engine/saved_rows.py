"""The rows of a table as a saved tree, and back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Columns, Fields, StoredColumns
from interop.checkpoint.layouts import layout_of, saved_layout
from interop.checkpoint.state import EXACT, Apply, LoadOptions, as_tensors
from interop.data import bridge
from interop.data.layout import Layout, Leaf, LeafSpec, same_kinds
from interop.data.shared_prefixes import PREFIXES, whole_rows
from interop.engine.table import Table
from interop.host.ring import Ring
from interop.host.stored_rows import Rows
from interop.host.threads import uninterrupted

_ENTRIES = ("layout", "ring", "columns", "values")  # of a result of `state`
Fill = Callable[[Sequence[np.ndarray | None]], None]  # fills an array [filled, *lanes, ...] a leaf, but for None


@dataclass(frozen=True)
class SavedRing:
    """Shape, size and cursor of the ring of saved rows."""

    ndim: int
    lanes: tuple[int, ...]
    capacity: int
    filled: int
    written: int
    end: int

    @classmethod
    def parsed(cls, fields: Fields) -> "SavedRing":
        """A saved ring. CheckpointCorrupt for one that cannot be."""
        ndim = fields.whole("ndim", 1, 64)
        capacity = fields.whole("capacity", 1)
        lanes = fields.wholes("lanes")
        if len(lanes) != ndim - 1:
            raise fields.wrong("lanes", f"{ndim - 1} sizes", list(lanes))
        filled = fields.whole("filled", 0, capacity)
        end = fields.whole("end", 0, capacity)
        return cls(ndim, lanes, capacity, filled, fields.whole("written"), end)

    @property
    def per_row(self) -> int:
        """Items of a row."""
        return math.prod(self.lanes)

    @property
    def items(self) -> int:
        """The capacity in items."""
        return self.capacity * self.per_row

    def restore(self, ring: Ring) -> None:
        """Give a ring, whose rows were replaced by the saved ones, the saved counters."""
        ring.size = self.filled
        ring.restored(self.written, self.end % self.capacity)


def saved_ring(table: Table) -> dict[str, Any]:
    """The ring of a table, to be read by `SavedRing.parsed`."""
    return {
        "ndim": table.ndim,
        "lanes": list(table.lanes),
        "capacity": table.row_count,
        "filled": table.ring.size,
        "written": table.ring.written,
        "end": table.ring.cursor,
    }


def state(table: Table) -> dict[str, Any]:
    """The rows of a table, views of its memory where that is on the host.

    Varied entries are spans in "values", their bytes without gaps.
    """
    rows = table.rows
    layout = table.layout
    if rows is None or layout is None:
        return {"layout": None}
    columns = [as_array(leaf) for leaf in rows.at(table.ring.size, slice(None))]
    values = {"values": _packed(layout, columns)} if layout.varied else {}
    stored = Columns(columns, table.row_count)
    whole = layout.sharing(())  # which earlier versions read
    return {"layout": saved_layout(whole), "ring": saved_ring(table), "columns": stored, **values}


def _packed(layout: Layout, columns: list[np.ndarray]) -> np.ndarray:
    """The bytes of varied entries; their spans in the list are replaced by spans in these."""
    assert layout.values is not None
    spans = layout.spans(columns)
    shared = {path: spans.pop(path) for path in list(spans) if layout.varied[path].shares}
    if not spans:
        data, packed = np.empty(0, np.uint8), np.empty((0, 2), np.int64)
    else:
        data, packed = layout.values.packed(np.concatenate([each.reshape(-1, 2) for each in spans.values()]))
    parts = [data]
    size = data.size
    for path, each in shared.items():
        more, whole = whole_rows(layout.values, each.reshape(-1, 2))
        whole[:, 0] += size
        columns[layout.places[path]] = whole.reshape(each.shape)
        parts.append(more)
        size += more.size
    data = np.concatenate(parts) if shared else data
    start = 0
    for path, each in spans.items():
        stop = start + each.size // 2
        columns[layout.places[path]] = packed[start:stop].reshape(each.shape)
        start = stop
    return data


def with_state(table: Table, tree: object, options: LoadOptions) -> Apply:
    """Check and read a result of `state`, or of `state_dict`; the returned function stores the rows."""
    is_tree = isinstance(tree, Mapping) and "layout" in tree
    return (_with_rows if is_tree or not isinstance(tree, Mapping) else _with_state_dict)(table, tree, options)


def _with_rows(table: Table, tree: object, options: LoadOptions) -> Apply:
    where = f"the checkpoint of a {table.kind}"
    saved = parsed(tree, where)
    if saved is None:
        return table.emptied
    layout, ring, columns, values = saved
    if table.fixed_layout is None and table.place.replaces:
        columns.check()  # before new files take the place of those that are there
    return with_rows(table, layout, ring, columns.read_into, options, where, values)


def parsed(tree: object, where: str) -> tuple[Layout, SavedRing, Columns | StoredColumns, np.ndarray | None] | None:
    """The layout, ring, columns and varied bytes of a result of `state`; None for a storage that was never written.

    CheckpointCorrupt where these do not agree, CheckpointMismatch for the state of another kind of storage.
    """
    fields = Fields(tree, where)
    if fields.any("layout") is None:
        return None
    if "scheme" in fields:
        raise CheckpointMismatch(f"{where}: it is the state of a LazyFrameStorage")
    layout = layout_of(fields.any("layout"), where)
    ring = SavedRing.parsed(fields.fields("ring"))
    columns = fields.any("columns")
    specs = None
    if isinstance(columns, Columns | StoredColumns):
        specs = [(np.dtype(dtype), shape) for dtype, shape in zip(columns.dtypes, columns.shapes, strict=True)]
    expected = [(_array_dtype(leaf.dtype), (*ring.lanes, *leaf.shape)) for leaf in layout.leaves]
    if specs != expected or columns.rows != ring.filled:
        raise CheckpointCorrupt(f"{where}: the files do not hold the rows that they should")
    return layout, ring, columns, fields.array("values", np.uint8, (None,)) if layout.varied else None


def with_data(table: Table, data: Any, ring: Any, options: LoadOptions = EXACT) -> Apply:
    """Check rows given as data of the user's type, [filled, *lanes]; the returned function stores them."""
    where = f"the checkpoint of a {table.kind}"
    refuse_frames(table)
    found = SavedRing.parsed(Fields(ring, where))
    try:
        layout = Layout.of(data, found.ndim)
        leaves = layout.flatten(data, found.ndim)
    except (TypeError, RuntimeError, KeyError) as error:
        raise CheckpointMismatch(f"{where}: what was loaded cannot be stored: {error}") from error
    if any(tuple(leaf.shape[: found.ndim]) != (found.filled, *found.lanes) for leaf in leaves):
        shape = list(leaves[0].shape[: found.ndim]) if leaves else []
        raise CheckpointMismatch(f"{where}: data of shape {shape} for {found.filled} rows of {list(found.lanes)}")
    columns = [as_array(leaf) for leaf in leaves]
    values = _packed(layout, columns) if layout.varied else None
    return with_rows(table, layout, found, Columns(columns).read_into, options, where, values)


def refuse_frames(table: Table) -> None:
    """CheckpointMismatch for a storage of frames, whose rows can be written in the order of time only."""
    if table.place.in_order:
        raise CheckpointMismatch(
            f"a {table.kind} keeps frames in the order of time, and hooks and other checkpointers would give it "
            "rows in another: use a TensorStorageCheckpointer without hooks"
        )


# ---------------------------------------------------------------------- loading


def with_rows(
    table: Table,
    layout: Layout,
    ring: SavedRing,
    fill: Fill,
    options: LoadOptions,
    where: str,
    values: np.ndarray | None = None,
) -> "LoadedRows":
    """Check saved rows against a table, and read them; the returned object stores them.

    A table without memory gets it, and the rows are read into it. Otherwise they are in memory a second time until they
    are stored.

    Args:
        table: where they go.
        layout: that of the saved items.
        ring: that of the saved rows.
        fill: reads the leaves.
        options: how far they may differ from the storage.
        where: what is loaded, for messages.
        values: of varied entries, whose leaves are spans in them.
    """
    fresh = table.fixed_layout is None and not table.takes(layout, ring.lanes)
    held = None if fresh else table.layout
    differences = _differences(table, held, layout, ring, options)
    if differences:
        raise CheckpointMismatch(f"{where} does not fit: " + "; ".join(differences))
    target = table.sharing(layout) if held is None else held
    rows = None
    place = table.place
    lead = (ring.capacity, *ring.lanes)
    device = place.device
    try:
        if fresh:
            if device == "auto":
                place.device = torch.device("cpu")
            with uninterrupted(), torch.inference_mode(False), torch.device("cpu"):
                table.give_up()
                rows = table.place.allocate(target, lead)
        target = target.keeping(table.values_for(target))
        leaves = _read(table, rows, layout, target, ring, fill, values, where)
    except BaseException:
        place.device = device
        if rows is not None:
            table.place.discard(lead)
        raise
    return LoadedRows(table, target, rows, leaves, ring)


def _differences(table: Table, held: Layout | None, saved: Layout, ring: SavedRing, options: LoadOptions) -> list[str]:
    """The differences between saved rows and a storage with items of the layout `held`, or without items."""
    if table.ndim != ring.ndim:
        return [f"it has ndim={ring.ndim}, the storage ndim={table.ndim}"]
    found = []
    rows = table.rows_for(ring.lanes)
    if rows != ring.capacity:
        found.append(
            f"it has a capacity of {ring.capacity} rows, the storage of {rows}: build it with the same max_size"
        )
    if held is None:
        return found
    if table.lanes != ring.lanes:
        found.append(f"its rows have lanes {list(ring.lanes)}, those of the storage {list(table.lanes)}")
    ours, theirs = ({leaf.path: leaf for leaf in layout.leaves} for layout in (held, saved))
    if options.strict:
        found += [f"{spec.name} is only in the checkpoint" for path, spec in theirs.items() if path not in ours]
        found += [f"{spec.name} is only in the storage" for path, spec in ours.items() if path not in theirs]
    for path in ours.keys() & theirs.keys():
        one = theirs[path]
        other = ours[path]
        if one.shape != other.shape:
            found.append(f"{one.name} has shape {list(one.shape)}, in the storage {list(other.shape)}")
        if one.dtype != other.dtype and not options.cast:
            found.append(f"{one.name} is {one.dtype}, in the storage {other.dtype} (cast=True casts it)")
        if saved.varied.get(path) != held.varied.get(path):
            found.append(f"{one.name} is text, ragged rows or a tensor, in the storage another of these")
    if not found and ours.keys() == theirs.keys() and not same_kinds(saved.root, held.root):
        found.append("its items are made of other kinds of containers")
    return sorted(found)


def _read(
    table: Table,
    rows: Rows | None,
    saved: Layout,
    target: Layout,
    ring: SavedRing,
    fill: Fill,
    values: np.ndarray | None,
    where: str,
) -> list[Tensor]:
    """The leaves of the target; none where they were read into new rows."""
    direct = rows is not None and rows.in_place
    arrays: dict[Any, np.ndarray | None] = {}
    for spec in saved.leaves:
        place = target.places.get(spec.path)
        if place is None:
            arrays[spec.path] = None
        elif rows is not None and direct and rows.tensors[place].is_contiguous():
            arrays[spec.path] = as_array(rows.tensors[place])[: ring.filled]
        else:
            arrays[spec.path] = np.empty((ring.filled, *ring.lanes, *spec.shape), _array_dtype(spec.dtype))
    (table.own_rows() if rows is None else rows).reserve(ring.filled)
    fill(list(arrays.values()))
    if values is not None and target.values is not None:
        spans = {path: each for path, each in saved.spans(list(arrays.values())).items() if each is not None}
        _check_spans(list(spans.values()), values.size, where)
        if rows is None and target.values.due:
            target.values.reclaim(table.used_spans())
        shared = {path: spans.pop(path) for path in list(spans) if path in target.varied and target.varied[path].shares}
        if spans or not shared:
            address = target.values.append_whole(values)
            for each in spans.values():
                each[..., 0] += address
        for each in shared.values():
            flat = [values[start : start + (size >> 2)].data for start, size in each.reshape(-1, 2).tolist()]
            each[...] = PREFIXES.of(target.values).append(target.values, flat).reshape(each.shape)
    if direct:
        return []
    dtypes = {spec.path: spec.dtype for spec in saved.leaves}
    return [_leaf(spec, arrays.get(spec.path), dtypes.get(spec.path), ring) for spec in target.leaves]


def _leaf(spec: LeafSpec, array: np.ndarray | None, dtype: torch.dtype | None, ring: SavedRing) -> Tensor:
    """A leaf that was read; zeros for one that was not saved."""
    if array is None or dtype is None:
        return torch.zeros((ring.filled, *ring.lanes, *spec.shape), dtype=spec.dtype, device="cpu")
    return as_tensor(array, dtype).to(spec.dtype)


def _check_spans(spans: Sequence[np.ndarray], size: int, where: str) -> None:
    """CheckpointCorrupt for spans that do not lie within so many bytes."""
    for each in spans:
        starts = each[..., 0]
        lengths = each[..., 1] >> 2
        if ((starts < 0) | (lengths < 0) | (starts > size) | (lengths > size - starts)).any():
            raise CheckpointCorrupt(f"{where}: text or ragged rows lie outside of what was saved")


@dataclass(frozen=True)
class LoadedRows:
    """Loaded rows: a call stores them, `abandon` drops them."""

    table: Table
    layout: Layout
    rows: Rows | None  # new memory
    leaves: list[Tensor]  # which are not in it yet
    ring: SavedRing

    def __call__(self) -> None:
        table = self.table
        ring = self.ring
        if table.guard.journal.active:
            self._keep()
        else:
            table.emptied()
        if self.rows is not None:
            table.adopt(self.layout, self.rows)
        if self.leaves and ring.filled:
            table.own_rows().write_run(0, self.leaves)
        ring.restore(table.ring)

    def _keep(self) -> None:
        """Log the stored rows: a kill rolls back to them. If the log is too small, a kill leaves the storage empty."""
        table = self.table
        journal = self.table.guard.journal
        stored = self.table.ring.size
        if journal.fits(stored):
            journal.reserve(stored)
            journal.save(range(stored))
            table.emptied()
        else:
            table.emptied()
            table.ring.cursor = table.ring.count = 0
            journal.cut()

    def abandon(self) -> None:
        """Release the reserved memory."""
        if self.rows is not None:
            self.table.place.discard((self.ring.capacity, *self.ring.lanes))


# ---------------------------------------------------------------------- state dicts


def state_dict(table: Table, tree: Mapping[str, Any]) -> dict[str, Any]:
    """A `state_dict` of a result of `state`: copies of the filled rows on the CPU. An entry ("a", "b") has the key "a.b".

    Other entries of the tree, which a class of the user's has added, are in it as well.
    """
    others = as_tensors({name: value for name, value in tree.items() if name not in _ENTRIES})
    if table.rows is None or table.layout is None:
        return {"_storage": {}, "initialized": False, "_len": 0, **others}
    layout = table.layout
    arrays = [array.copy() for array in tree["columns"].arrays]
    content: Any = [as_tensor(array, leaf.dtype) for array, leaf in zip(arrays, layout.leaves, strict=True)]
    if isinstance(layout.root, Leaf):
        content = content[0]
    elif layout.is_tensordict and _names(layout) is not None:
        content = dict(zip(_names(layout) or [], content, strict=True))
    values = {"_values": torch.from_numpy(tree["values"].copy())} if layout.varied else {}
    described = {"_layout": tree["layout"], "_ring": tree["ring"], **values, **others}
    return {"_storage": content, "initialized": True, "_len": table.ring.size * table.per_row, **described}


def _with_state_dict(table: Table, state: Any, options: LoadOptions) -> Apply:
    """Check a `state_dict`, or that of torchrl; the returned function stores a copy of its rows."""
    where = f"the state_dict of a {table.kind}"
    fields = Fields(state, where)
    if "initialized" not in fields or "_storage" not in fields:
        raise CheckpointMismatch(f"{where}: it is the state of something else, it has no '_storage' or 'initialized'")
    if not fields.flag("initialized"):
        return table.emptied
    content = fields.any("_storage")
    if isinstance(content, dict) and isinstance(content.get("scheme"), dict):
        raise CheckpointMismatch(f"{where}: it is the state of a LazyFrameStorage")
    if "_layout" not in state:  # all rows, filled or not
        data = _opened(content, table.ndim, where)
        rows, *lanes = data.shape[: table.ndim]
        per_row = math.prod(lanes)
        capacity = table.rows_for(tuple(lanes))
        filled = fields.whole("_len", 0, rows * per_row) // max(per_row, 1)
        ring = {"ndim": table.ndim, "lanes": lanes, "capacity": capacity, "filled": filled}
        return with_data(table, data[:filled], {**ring, "written": filled, "end": filled % capacity}, options)
    refuse_frames(table)
    layout = layout_of(state["_layout"], where)
    leaves = content if isinstance(content, list) else [content]
    if isinstance(content, dict):
        leaves = [content.get(name) for name in _names(layout) or []]
    if [getattr(leaf, "dtype", None) for leaf in leaves] != [leaf.dtype for leaf in layout.leaves]:
        raise CheckpointCorrupt(f"{where}: the tensors in '_storage' are not those of the '_layout'")
    saved = {"layout": state["_layout"], "ring": fields.any("_ring")}
    if layout.varied:
        saved["values"] = as_array(fields.any("_values"))
    try:
        saved["columns"] = Columns([as_array(leaf) for leaf in leaves])
    except ValueError as error:
        raise CheckpointCorrupt(f"{where}: {error}") from error
    return _with_rows(table, saved, options)


def _names(layout: Layout) -> list[str] | None:
    """The keys of leaves in a `state_dict`; None where two leaves would have the same."""
    names = [".".join(map(str, leaf.path)) for leaf in layout.leaves]
    return names if len(set(names)) == len(names) else None


def _opened(content: Any, ndim: int, where: str) -> Any:
    """The tensordict of a state with the keys "a" and "a.b", with `ndim` batch dims; a tensor as it is."""
    leaves = content.values() if isinstance(content, dict) else [content]
    leaves = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not leaves or any(leaf.ndim < ndim for leaf in leaves):
        raise TypeError(f"{where}: '_storage' must be a tensor or the state of a tensordict, with {ndim} dims of items")
    if isinstance(content, Tensor):
        return content
    data = TensorDict({}, leaves[0].shape[:ndim])
    for key, leaf in content.items():
        if isinstance(leaf, Tensor):
            data.set(tuple(key.split(".")), leaf)
    return data


# ---------------------------------------------------------------------- arrays


def as_array(leaf: Tensor) -> np.ndarray:
    """A tensor for NumPy, without a copy on the host; what NumPy has no dtype for as integers of the same size."""
    return bridge.numpy_view(leaf.detach().as_subclass(Tensor).cpu().resolve_conj().resolve_neg())


def as_tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The tensor of such an array."""
    found = torch.from_numpy(array)
    return found if found.dtype == dtype else found.view(dtype)


def _array_dtype(dtype: torch.dtype) -> np.dtype:
    return as_array(torch.zeros((), dtype=dtype, device="cpu")).dtype
