"""The content of a `LazyFrameStorage` as a saved tree, and back: each frame once, as in memory."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch, Columns, Fields
from interop.checkpoint.layouts import layout_of, saved_layout
from interop.checkpoint.rule import Rule
from interop.checkpoint.tensor_states import Ring, as_array, saved_ring

_NEXT, _STORED, _CURSOR, _FREE, _USED = range(5)


def saved_frames(storage: Any) -> dict[str, Any]:
    """What is kept of the rows, views of memory."""
    rows = storage.rows
    if rows is None:
        return {"layout": None}
    parts = _parts(rows, [int(count) for count in rows._counts])
    return {
        "layout": saved_layout(storage.layout),
        "ring": saved_ring(storage),
        "scheme": _described(rows.scheme),
        "counts": rows._counts,
        "latest": rows._latest,
        **{name: Columns(arrays) for name, arrays in parts.items()},
    }


def restoring_frames(storage: Any, saved: Any, rule: Rule) -> Callable[[], None]:
    """Check what was saved against a storage, and read it; what is returned puts it in."""
    where = f"the checkpoint of a {type(storage).__name__}"
    fields = Fields(saved, where)
    if fields.any("layout") is None:
        empty: Callable[[], None] = storage.clear
        return empty
    layout, ring = layout_of(fields.any("layout"), where), Ring(fields.fields("ring"))
    fixed = storage.fixed_layout
    if storage.ndim != ring.ndim or (fixed is not None and fixed.leaves != layout.leaves):
        raise CheckpointMismatch(
            f"{where} does not fit: its items, or their dims, are others than those of the storage"
        )
    fresh = fixed is None
    rows = storage._allocate(layout, (ring.capacity, *ring.lanes))
    ours, theirs = _described(rows.scheme if fresh else storage.rows.scheme), fields.any("scheme")
    if not isinstance(theirs, dict) or ours != theirs or storage._max_size > ring.capacity * rows.scheme.per_row:
        named = [name for name in ours if not isinstance(theirs, dict) or theirs.get(name) != ours[name]] or [
            "max_size"
        ]
        raise CheckpointMismatch(f"{where} does not fit: it was built with another {', '.join(named)}")
    rows._counts[:] = np.asarray(fields.array("counts", np.int64, rows._counts.shape))
    rows._latest[:] = np.asarray(fields.array("latest", np.int64, rows._latest.shape))
    counts = [int(count) for count in rows._counts]
    most = (ring.capacity - 1, ring.capacity, rows.scheme.frame_rows - 1, rows.scheme.finals, rows.scheme.finals)
    if (
        any(not 0 <= count <= limit for count, limit in zip(counts, most, strict=True))
        or counts[_STORED] != ring.filled
    ):
        raise CheckpointCorrupt(f"{where}: its counts are not those of {ring.filled} rows")
    parts = _parts(rows, counts)
    for name, arrays in parts.items():
        _read(fields.any(name), arrays, f"{where}, {name}")
    step, final, free = parts["items"][0], parts["items"][1], parts["free"][0]
    sound = _within(step, rows.scheme.stack) and _within(final, counts[_USED]) and _within(free, counts[_USED] - 1)
    if not sound:
        raise CheckpointCorrupt(f"{where}: items name frames that there are not")
    return _Restored(storage, layout, rows, ring, fresh)


class _Restored:
    def __init__(self, storage: Any, layout: Any, rows: Any, ring: Ring, fresh: bool) -> None:
        self._storage, self._layout, self._rows, self._ring, self._fresh = storage, layout, rows, ring, fresh

    def __call__(self) -> None:
        storage, ring = self._storage, self._ring
        storage.clear()
        if self._fresh:
            storage.adopt(self._layout, self._rows)
        else:
            counts = [int(count) for count in self._rows._counts]
            held, found = _parts(storage.rows, counts), _parts(self._rows, counts)
            for name, arrays in held.items():
                for target, array in zip(arrays, found[name], strict=True):
                    target[...] = array
            storage.rows._latest[:] = self._rows._latest
            storage.rows._counts[:] = self._rows._counts
        storage.ring.size = ring.filled
        storage.ring.restored(ring.written, ring.end % ring.capacity)


def _parts(rows: Any, counts: Sequence[int]) -> dict[str, list[np.ndarray]]:
    """The memory that is in use: rows, what is known of items, frames of the ring, finals, and finals that are free."""
    scheme = rows.scheme
    rest, tables = rows.memory[: len(scheme.rest)], rows._tables
    stored, cursor = counts[_STORED], counts[_CURSOR]
    ring = scheme.frame_rows * scheme.per_row
    taken = (cursor + 1) * scheme.per_row if cursor >= stored + scheme.stack or cursor == stored else ring
    items = stored * scheme.per_row
    return {
        "rows": [as_array(each)[:stored] for each in rest],
        "items": [rows._step[:items], rows._final[:items]],
        "frames": [table[:taken] for table in tables],
        "finals": [table[ring : ring + counts[_USED]] for table in tables],
        "free": [rows._free[: counts[_FREE]]],
    }


def _read(columns: Any, arrays: list[np.ndarray], where: str) -> None:
    expected = [(each.dtype, each.shape[1:]) for each in arrays]
    found = list(zip(getattr(columns, "dtypes", []), getattr(columns, "shapes", []), strict=True))
    if found != expected or (arrays and columns.rows != arrays[0].shape[0]):
        raise CheckpointCorrupt(f"{where}: the files do not hold what they should")
    columns.read_into(arrays)


def _within(array: np.ndarray, most: int) -> bool:
    return not array.size or (array.min() >= 0 and array.max() <= most)


def _described(scheme: Any) -> dict[str, Any]:
    """What rows were kept by, but for the leaves."""
    told = {field.name: getattr(scheme, field.name) for field in dataclasses.fields(scheme) if field.name != "leaves"}
    return {
        name: [list(each) if isinstance(each, tuple) else each for each in value] if isinstance(value, tuple) else value
        for name, value in told.items()
    }


def frames_of(storage: Any) -> dict[str, Any]:
    """A `state_dict`: copies as tensors."""
    saved = saved_frames(storage)
    if saved["layout"] is None:
        return {"_storage": {}, "initialized": False, "_len": 0}
    names = ("rows", "items", "frames", "finals", "free")
    content: dict[str, Any] = {name: [torch.from_numpy(array.copy()) for array in saved[name].arrays] for name in names}
    content |= {name: torch.from_numpy(saved[name].copy()) for name in ("counts", "latest")}
    described = {name: saved[name] for name in ("layout", "ring", "scheme")}
    return {"_storage": content, "initialized": True, "_len": len(storage), "_described": described}


def restoring_frames_of(storage: Any, state: Any) -> Callable[[], None]:
    """Check a `state_dict`; what is returned puts a copy of it in."""
    fields = Fields(state, f"the state_dict of a {type(storage).__name__}")
    if not fields.flag("initialized"):
        empty: Callable[[], None] = storage.clear
        return empty
    content, described = fields.fields("_storage"), fields.fields("_described")
    saved: dict[str, Any] = {name: described.any(name) for name in ("layout", "ring", "scheme")}
    for name in ("counts", "latest"):
        saved[name] = np.asarray(content.any(name))
    for name in ("rows", "items", "frames", "finals", "free"):
        saved[name] = _Held([np.asarray(each) for each in content.items(name)])
    return restoring_frames(storage, saved, Rule())


class _Held:
    """Arrays in memory, to be read like those of a file."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays
        self.dtypes = [each.dtype for each in arrays]
        self.shapes = [each.shape[1:] for each in arrays]
        self.rows = arrays[0].shape[0] if arrays else 0

    def read_into(self, arrays: list[np.ndarray]) -> None:
        for target, array in zip(arrays, self._arrays, strict=True):
            target[...] = array
