"""The content of tensor storages as a saved tree, and back."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Columns, Fields, StoredColumns
from interop.checkpoint.layouts import layout_of, saved_layout
from interop.checkpoint.state import EXACT, LoadOptions
from interop.data import bridge
from interop.data.layout import Layout, Leaf, LeafSpec, same_kinds
from interop.shared.interrupts import uninterrupted


def saved_ring(storage: Any) -> dict[str, Any]:
    """How far a storage is filled, and where its oldest row is."""
    return {
        "ndim": storage.ndim,
        "lanes": list(storage.lanes),
        "capacity": storage.row_count,
        "filled": storage.filled_rows,
        "written": storage.ring.written,
        "end": storage.ring.cursor,
    }


def saved_rows(storage: Any) -> dict[str, Any]:
    """The rows of a storage, views of its memory where that is on the host."""
    if storage.rows is None:
        return {"layout": None}
    filled = storage.filled_rows
    leaves = [as_array(leaf) for leaf in storage.rows.at(filled, slice(None))]
    layout = storage.layout
    values = {"values": packed_leaves(layout, leaves)} if layout.varied else {}
    columns = Columns(leaves, storage.row_count)
    return {"layout": saved_layout(layout), "ring": saved_ring(storage), "columns": columns, **values}


def packed_leaves(layout: Layout, leaves: list[np.ndarray]) -> np.ndarray:
    """The bytes of varied entries without gaps. In the list their spans are replaced by spans in these."""
    assert layout.values is not None
    spans = layout.spans(leaves)
    data, packed = layout.values.packed(np.concatenate([each.reshape(-1, 2) for each in spans.values()]))
    start = 0
    for path, each in spans.items():
        stop = start + each.size // 2
        leaves[layout.places[path]] = packed[start:stop].reshape(each.shape)
        start = stop
    return data


def restoring_rows(storage: Any, saved: Any, options: LoadOptions) -> Callable[[], None]:
    """Check saved rows against a storage, and read them; what is returned puts them in."""
    where = f"the checkpoint of a {type(storage).__name__}"
    fields = Fields(saved, where)
    if fields.any("layout") is None:
        empty: Callable[[], None] = storage.clear
        return empty
    layout = layout_of(fields.any("layout"), where)
    ring = Ring(fields.fields("ring"))
    columns = fields.any("columns")
    specs = list(zip(columns.dtypes, columns.shapes, strict=True)) if isinstance(columns, StoredColumns) else None
    expected = [(_array_dtype(leaf.dtype), (*ring.lanes, *leaf.shape)) for leaf in layout.leaves]
    if specs != expected or columns.rows != ring.filled:
        raise CheckpointCorrupt(f"{where}: the files do not hold the rows that they should")
    values = fields.array("values", np.uint8, (None,)) if layout.varied else None
    plan = Plan(storage, layout, ring, options, where)
    if storage.fixed_layout is None and getattr(storage, "existsok", False):
        columns.check()  # before new files take the place of those that are there
    return plan.filled_by(lambda arrays: columns.read_into(arrays), values)


def restoring_data(storage: Any, data: Any, ring: Any, options: LoadOptions = EXACT) -> Callable[[], None]:
    """The same for rows that are there as data of the user's kind: all that are filled, [rows, *lanes]."""
    where = f"the checkpoint of a {type(storage).__name__}"
    refuse_frames(storage)
    found = Ring(Fields(ring, where))
    try:
        layout = Layout.of(data, found.ndim)
        leaves = layout.flatten(data, found.ndim)
    except (TypeError, RuntimeError, KeyError) as error:
        raise CheckpointMismatch(f"{where}: what was loaded cannot be stored: {error}") from error
    if any(tuple(leaf.shape[: found.ndim]) != (found.filled, *found.lanes) for leaf in leaves):
        shape = list(leaves[0].shape[: found.ndim]) if leaves else []
        raise CheckpointMismatch(f"{where}: data of shape {shape} for {found.filled} rows of {list(found.lanes)}")
    plan = Plan(storage, layout, found, options, where)
    columns = [as_array(leaf) for leaf in leaves]
    values = packed_leaves(layout, columns) if layout.varied else None
    return plan.filled_by(copying(columns), values)


def copying(columns: Iterable[np.ndarray]) -> Callable[[Sequence[np.ndarray | None]], None]:
    """What copies columns into arrays, where these are not None."""

    def fill(arrays: Sequence[np.ndarray | None]) -> None:
        for array, column in zip(arrays, columns, strict=True):
            if array is not None:
                array[...] = column

    return fill


def refuse_frames(storage: Any) -> None:
    """CheckpointMismatch for a storage whose rows cannot be written in any other order than that of time."""
    if storage._OF_FRAMES:
        raise CheckpointMismatch(
            f"a {type(storage).__name__} keeps frames in the order of time, and hooks and other checkpointers would give it "
            "rows in another: use a TensorStorageCheckpointer without hooks"
        )


class Ring:
    """How far saved rows fill their ring."""

    def __init__(self, fields: Fields) -> None:
        self.ndim = fields.whole("ndim", 1, 64)
        self.lanes = fields.wholes("lanes")
        self.capacity = fields.whole("capacity", 1)
        self.filled = fields.whole("filled", 0, self.capacity)
        self.written = fields.whole("written")
        self.end = fields.whole("end", 0, self.capacity)
        if len(self.lanes) != self.ndim - 1:
            raise fields.wrong("lanes", f"{self.ndim - 1} sizes", list(self.lanes))


class Plan:
    """How saved rows go into a storage: into new memory of its own where it has none, else over what it holds."""

    def __init__(self, storage: Any, layout: Layout, ring: Ring, options: LoadOptions, where: str) -> None:
        self._storage, self._saved, self._ring, self._where = storage, layout, ring, where
        self._fresh = storage.fixed_layout is None and not storage.takes(layout, ring.lanes)
        self._layout = layout if self._fresh else storage.layout
        differences = self._differences(options)
        if differences:
            raise CheckpointMismatch(f"{where} does not fit: " + "; ".join(differences))

    def _differences(self, options: LoadOptions) -> list[str]:
        storage, ring = self._storage, self._ring
        found = []
        if storage.ndim != ring.ndim:
            return [f"it has ndim={ring.ndim}, the storage ndim={storage.ndim}"]
        rows = -(-storage._max_size // max(math.prod(ring.lanes), 1))
        if rows != ring.capacity:
            found.append(
                f"it has a capacity of {ring.capacity} rows, the storage of {rows}: build it with the same max_size"
            )
        if self._fresh:
            return found
        if storage.lanes != ring.lanes:
            found.append(f"its rows have lanes {list(ring.lanes)}, those of the storage {list(storage.lanes)}")
        ours, theirs = _by_path(self._layout), _by_path(self._saved)
        if options.strict:
            found += [f"{spec.name} is only in the checkpoint" for path, spec in theirs.items() if path not in ours]
            found += [f"{spec.name} is only in the storage" for path, spec in ours.items() if path not in theirs]
        for path in ours.keys() & theirs.keys():
            one, other = theirs[path], ours[path]
            if one.shape != other.shape:
                found.append(f"{one.name} has shape {list(one.shape)}, in the storage {list(other.shape)}")
            if one.dtype != other.dtype and not options.cast:
                found.append(f"{one.name} is {one.dtype}, in the storage {other.dtype} (cast=True casts it)")
            if self._saved.varied.get(path) != self._layout.varied.get(path):
                found.append(f"{one.name} is text, ragged rows or a tensor, in the storage another of these")
        if not found and ours.keys() == theirs.keys() and not same_kinds(self._saved.root, self._layout.root):
            found.append("its items are made of other kinds of containers")
        return sorted(found)

    def filled_by(
        self, fill: Callable[[Sequence[np.ndarray | None]], None], values: np.ndarray | None = None
    ) -> "Restored":
        """Read the rows; `fill` is given an array [filled, *lanes, ...] for each saved leaf, None where it is not wanted.

        Varied entries are spans in `values`.
        """
        storage, ring = self._storage, self._ring
        lead = (ring.capacity, *ring.lanes)
        rows, device = None, storage.device
        try:
            if self._fresh:
                if device == "auto":
                    storage.device = torch.device("cpu")
                with uninterrupted(), torch.inference_mode(False), torch.device("cpu"):
                    storage.give_up_memory()
                    rows = storage._memory(self._layout, lead)
            self._layout = self._layout.keeping(storage.values_for(self._layout))
            held = self._read(rows, fill, values)
        except BaseException:
            storage.device = device
            if rows is not None:
                storage.release_memory()
            raise
        return Restored(storage, self._layout, rows, held, ring)

    def _read(
        self, rows: Any, fill: Callable[[Sequence[np.ndarray | None]], None], values: np.ndarray | None
    ) -> list[Tensor]:
        """The leaves of the target, filled; those that are rows already need not be written to them."""
        filled = self._ring.filled
        direct = rows is not None and rows.in_place
        places = self._layout.places
        arrays: list[np.ndarray | None] = []
        for spec in self._saved.leaves:
            place = places.get(spec.path)
            if place is None:
                arrays.append(None)
            elif direct and rows.tensors[place].is_contiguous():
                arrays.append(as_array(rows.tensors[place])[:filled])
            else:
                arrays.append(np.empty((filled, *self._ring.lanes, *spec.shape), _array_dtype(spec.dtype)))
        (self._storage.rows if rows is None else rows).reserve(filled)
        fill(arrays)
        if values is not None and self._layout.values is not None:
            wanted = [each for each in self._saved.spans(arrays).values() if each is not None]
            _check_spans(wanted, values.size, self._where)
            if rows is None and self._layout.values.due:
                self._layout.values.reclaim([each.reshape(-1, 2) for each in self._storage.spans().values()])
            address = self._layout.values.append_whole(values)
            for each in wanted:
                each[..., 0] += address
        if direct:
            return []
        held = dict(zip((spec.path for spec in self._saved.leaves), arrays, strict=True))
        dtypes = {spec.path: spec.dtype for spec in self._saved.leaves}
        found = []
        for spec in self._layout.leaves:
            array = held.get(spec.path)
            if array is None:
                shape = (filled, *self._ring.lanes, *spec.shape)
                found.append(torch.zeros(shape, dtype=spec.dtype, device="cpu"))
            else:
                found.append(as_tensor(array, dtypes[spec.path]).to(spec.dtype))
        return found


class Restored:
    """Rows that were read, to be put in, or to be abandoned."""

    def __init__(self, storage: Any, layout: Layout, rows: Any, held: list[Tensor], ring: Ring) -> None:
        self._storage, self._layout, self._rows, self._held, self._ring = storage, layout, rows, held, ring

    def __call__(self) -> None:
        storage, ring = self._storage, self._ring
        if storage.journal.active:
            self._keep(storage.journal)
        else:
            storage.clear()
        if self._rows is not None:
            storage.adopt(self._layout, self._rows)
        if self._held and ring.filled:
            storage.own_rows().write_run(0, self._held)
        storage.ring.size = ring.filled
        storage.ring.restored(ring.written, ring.end % ring.capacity)

    def _keep(self, journal: Any) -> None:
        """Have what is stored come back if this process is killed. It is empty then, where that is too much to be kept."""
        storage = self._storage
        stored = storage.filled_rows
        if journal.fits(stored):
            journal.reserve(stored)
            journal.save(range(stored))
            storage.clear()
        else:
            storage.clear()
            storage.ring.cursor = storage.ring.count = 0
            journal.cut()

    def abandon(self) -> None:
        """Give back memory that was taken."""
        if self._rows is not None:
            self._storage.release_memory()


# ---------------------------------------------------------------------- state dicts


def state_of(storage: Any) -> dict[str, Any]:
    """A `state_dict`: copies of the filled rows."""
    if storage.rows is None:
        return {"_storage": {}, "initialized": False, "_len": 0}
    leaves = [leaf.clone() for leaf in storage.rows.at(storage.filled_rows, slice(None))]
    layout, values = storage.layout, {}
    if layout.varied:
        spans = [as_array(leaf) for leaf in leaves]
        values["_values"] = torch.from_numpy(packed_leaves(layout, spans).copy())
        for path, each in layout.spans(spans).items():
            leaves[layout.places[path]] = torch.from_numpy(each)
    content: Any = leaves
    if layout.is_tensordict:
        content = {}
        for spec, leaf in zip(layout.leaves, leaves, strict=True):
            node = content
            for step in spec.path[:-1]:
                node = node.setdefault(step, {})
            node[spec.path[-1]] = leaf
    elif isinstance(layout.root, Leaf):
        content = leaves[0]
    return {
        "_storage": content,
        "initialized": True,
        "_len": len(storage),
        "_layout": saved_layout(layout),
        "_ring": saved_ring(storage),
        **values,
    }


def restoring_state(storage: Any, state: Any) -> Callable[[], None]:
    """Check a `state_dict`; what is returned puts a copy of it in."""
    where = f"the state_dict of a {type(storage).__name__}"
    fields = Fields(state, where)
    if not fields.flag("initialized"):
        empty: Callable[[], None] = storage.clear
        return empty
    content = fields.any("_storage")
    if "_layout" in state:
        layout, ring = layout_of(state["_layout"], where), fields.any("_ring")
        found = Ring(Fields(ring, where))
        leaves = content if isinstance(content, list) else [_at(content, leaf.path) for leaf in layout.leaves]
        shapes = [(found.filled, *found.lanes, *leaf.shape) for leaf in layout.leaves]
        dtypes = [leaf.dtype for leaf in layout.leaves]
        if [(getattr(leaf, "shape", None), getattr(leaf, "dtype", None)) for leaf in leaves] != list(
            zip(shapes, dtypes, strict=True)
        ):
            raise CheckpointCorrupt(f"{where}: the tensors in '_storage' are not those of the '_layout'")
        values = None
        if layout.varied:
            values = Fields({"_values": as_array(fields.any("_values"))}, where).array("_values", np.uint8, (None,))
        refuse_frames(storage)
        return Plan(storage, layout, found, EXACT, where).filled_by(copying(map(as_array, leaves)), values)
    data = _opened(content, storage.ndim, where)  # as others write it: all rows, filled or not
    lead = tuple(data.shape[: storage.ndim])
    per_row = math.prod(lead[1:])
    length = fields.whole("_len", 0, math.prod(lead))
    filled = length // max(per_row, 1)
    capacity = -(-storage._max_size // max(per_row, 1))
    ring = {"ndim": storage.ndim, "lanes": list(lead[1:]), "capacity": capacity, "filled": filled}
    return restoring_data(storage, data[:filled], {**ring, "written": filled, "end": filled % capacity})


def _check_spans(spans: Sequence[np.ndarray], size: int, where: str) -> None:
    """CheckpointCorrupt for spans that do not lie within so many bytes."""
    for each in spans:
        starts, lengths = each[..., 0], each[..., 1] >> 2
        if ((starts < 0) | (lengths < 0) | (starts > size) | (lengths > size - starts)).any():
            raise CheckpointCorrupt(f"{where}: text or ragged rows lie outside of what was saved")


def _at(content: Any, path: Sequence[Any]) -> Any:
    for step in path:
        content = content.get(step) if isinstance(content, dict) else None
    return content


def _opened(content: Any, ndim: int, where: str) -> Any:
    """The tensordict of a state with the keys "a" and "a.b", with `ndim` batch dims; a tensor as it is."""
    leaves = content.values() if isinstance(content, dict) else [content]
    leaves = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not leaves or any(leaf.ndim < ndim for leaf in leaves):
        raise TypeError(f"{where}: '_storage' must be a tensor or the state of a tensordict, with {ndim} dims of items")
    if isinstance(content, Tensor):
        return content
    entries = {tuple(key.split(".")): leaf for key, leaf in content.items() if isinstance(leaf, Tensor)}
    data = TensorDict({}, leaves[0].shape[:ndim])
    for path, leaf in entries.items():
        data.set(path, leaf)
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


def _by_path(layout: Layout) -> dict[Any, LeafSpec]:
    return {leaf.path: leaf for leaf in layout.leaves}
