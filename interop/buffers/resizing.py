"""The content of a buffer with another capacity: the newest rows, in the order of time, and what samplers know of them.

The rows are written again, oldest first, into components that are built alike. So a resized buffer is one of that capacity
that got the same newest rows; what a fresh buffer would not know (priorities, epochs, uses, counts of writes) is
taken over from the old slots to the new ones.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fbuf import priority_tree
from fbuf.checkpoint import Fields
from interop.buffers.recipes import CLASSES, Arguments, any_length, arguments_of, built, called, has_given_trajectories
from interop.checkpoint.state import LoadOptions, described, state_for
from interop.data.arguments import class_of
from interop.engine.saved_rows import SavedRing
from interop.samplers import (
    ConsumingSampler,
    PrioritizedSampler,
    PromptGroupSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from interop.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, Storage, TensorStorage
from interop.writers import RoundRobinWriter, TensorDictMaxValueWriter, Writer

_PIECE = 64 << 20  # bytes of rows that are copied at once, about
_REMEDY = "build a buffer of that capacity, and extend it with the rows of this one"


@dataclass
class Resized:
    """A storage and a writer with the newest rows, and the state of the sampler for them."""

    storage: Storage
    writer: Writer
    sampler: dict[str, Any] | None  # None to start over


def resized(
    storage: Storage,
    sampler: Sampler,
    writer: Writer,
    capacity: int,
    scratch_dir: str | os.PathLike[str] | None = None,
) -> Resized:
    """The newest rows of a storage in one of another capacity. Nothing that was passed changes. The lock is held.

    Args:
        capacity: in items; with several item dims it is rounded up to whole rows.
        scratch_dir: the folder of the new rows, for rows in files; None for memory.

    TypeError for a component that is not of this library, or takes no rows; it says what to do.
    """
    refuse(storage, sampler, writer, capacity)
    new = alike(storage, capacity, scratch_dir)
    new_writer: Writer = called(type(writer), arguments_of(writer) or {}, "the writer")
    try:
        with new.lock.held():
            new_writer.register_storage(new)
            source = _copy(storage, writer, new, new_writer)
            if isinstance(new_writer, RoundRobinWriter):
                new.ring.count = storage.ring.count
                _raise_generations(storage, new)
        state = _sampler_state(sampler, source, len(storage))
    except BaseException:
        discard(new)
        raise
    return Resized(new, new_writer, state)


def refuse(storage: Storage, sampler: Sampler, writer: Writer, capacity: int) -> None:
    """TypeError, or RuntimeError, for components that cannot be resized."""
    for role, component in (("storage", storage), ("sampler", sampler), ("writer", writer)):
        if CLASSES.get(type(component).__name__) is not type(component) and not getattr(component, "stateless", False):
            raise TypeError(f"a {role} of the class {class_of(component)} cannot be resized: {_REMEDY}")
    if not isinstance(writer, RoundRobinWriter | TensorDictMaxValueWriter):
        raise TypeError(f"a buffer with a {type(writer).__name__} takes no rows, and is not resized: {_REMEDY}")
    if isinstance(sampler, PrioritizedSampler) and capacity > priority_tree.LARGEST:
        raise ValueError(f"a {type(sampler).__name__} takes {priority_tree.LARGEST} items at most, got {capacity}")
    if has_given_trajectories(sampler.draws):
        raise TypeError(f"ends and trajectories that were given are for all rows of a storage: {_REMEDY}")
    if storage.guard.is_shared:
        raise RuntimeError(
            "a buffer that processes share cannot be resized, for the others would keep the old rows: stop them, and resize "
            "it before they start"
        )


def alike(storage: Storage, capacity: int, scratch_dir: str | os.PathLike[str] | None = None) -> Storage:
    """An empty storage like another one, of another capacity."""
    arguments: Arguments = {**(arguments_of(storage) or {}), "max_size": capacity}
    kind = type(storage)
    if isinstance(storage, LazyMemmapStorage):
        arguments = {**any_length(storage), "max_size": capacity, "ndim": storage.ndim, "scratch_dir": scratch_dir}
    elif scratch_dir is not None:
        raise ValueError(f"scratch_dir is for rows in files, and a {kind.__name__} has none: leave it out")
    elif kind is TensorStorage:  # whose memory is the user's
        kind = LazyTensorStorage
    if isinstance(storage, LazyTensorStorage) and storage.table.fill:
        arguments["fill"] = dict(storage.table.fill)
    new: Storage = called(kind, arguments, "the storage")
    return new


def discard(storage: Storage) -> None:
    """Remove the files of a storage that nobody got."""
    if isinstance(storage, LazyMemmapStorage):
        storage.cleanup()
        storage.close()


# ------------------------------------------------------------------ checkpoints of another capacity


def fitted(storage: Storage, sampler: Sampler, writer: Writer, fields: Fields, options: LoadOptions) -> dict[str, Any]:
    """The entries of a saved buffer that change where it had another capacity than a storage, as trees in memory.

    None of the components changes; {} where the capacity is the same, or the rows went through hooks.
    """
    saved = _saved_items(fields, storage)
    if saved is None or options.source is None:
        return {}
    refuse(storage, sampler, writer, storage.max_size)
    where = f"{fields.where}, as it was saved"
    twin = alike(storage, saved)
    try:
        writes: Writer = called(type(writer), arguments_of(writer) or {}, where)
        draws = built(Sampler, fields.fields("sampler"), type(sampler))
        make_room(draws, twin)
        rows = storage.checkpointer.read(twin, fields.any("storage"), options.source, options)
        with twin.lock.held():
            twin.guard.replace(rows)
            writes.register_storage(twin)
            writes.with_state(state_for(writes, fields.any("writer"), where), options)()
            draws.with_state(state_for(draws, fields.any("sampler"), where), options)()
            made = resized(twin, draws, writes, _items_of(storage))
        if made.sampler is None:
            draws.clear()
        return {
            "storage": made.storage.state(),
            "sampler": described(draws, draws.state() if made.sampler is None else made.sampler),
            "writer": described(made.writer, made.writer.state()),
        }
    finally:
        discard(twin)


def _saved_items(fields: Fields, storage: Storage) -> int | None:
    """The capacity of a saved buffer in items, if it is another one than that of a storage, and is known."""
    content = fields.fields("storage").fields("content")
    if "rows" not in content:
        capacity = content.whole("capacity", 1) if "capacity" in content else storage.max_size
        return None if capacity == storage.max_size else capacity
    rows = content.fields("rows")
    if "ring" not in rows:
        return None
    ring = SavedRing.parsed(rows.fields("ring"))
    here = -(-_items_of(storage) // max(ring.per_row, 1))
    return None if ring.capacity == here else ring.items


# ------------------------------------------------------------------ rows


def rows_in_order(storage: Storage, writer: Writer) -> np.ndarray:
    """The numbers of the stored rows, int64, the oldest one first; in the order of slots where the writer keeps none."""
    return storage.contents.rows_in_order() if writer.keeps_order else np.arange(storage.contents.filled_rows)


def pieces_in_order(storage: Storage, rows: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """Rows in pieces of at most `most`, each without a discontinuity inside."""
    breaks = {row for row in storage.ring.discontinuities() if row < storage.contents.filled_rows}
    starts = np.flatnonzero(np.isin(rows, list(breaks)))
    for part in np.split(rows, starts):
        for at in range(0, len(part), most):
            yield part[at : at + most]


def _copy(storage: Storage, writer: Writer, new: Storage, new_writer: Writer) -> np.ndarray:
    """Write the newest rows into a new storage. Returns the old slot of each new one, int64 [items]."""
    rows = rows_in_order(storage, writer)
    if not len(rows):
        return np.zeros(0, np.int64)
    per_row = storage.contents.items_per_row
    row_capacity = new.max_size // per_row if isinstance(new, ListStorage) else -(-new.max_size // per_row)
    if writer.keeps_order:
        rows = rows[-row_capacity:]
    breaks = set(storage.ring.discontinuities())
    source = np.full(min(row_capacity, len(rows)) * per_row, -1)
    lanes = np.arange(per_row)
    for part in pieces_in_order(storage, rows, _rows_at_once(storage)):
        data = storage.get(torch.from_numpy(part))
        if int(part[0]) in breaks and new.contents.filled_rows:
            new.ring.close()
        at = _flat(new_writer.extend(data), new)
        old = (part[:, None] * per_row + lanes).reshape(-1)
        source[at[at >= 0]] = old[at >= 0]
    return source


def _flat(slots: Tensor, storage: Storage) -> np.ndarray:
    """Flat slots of what a writer returns."""
    if slots.ndim == 1:
        return slots.cpu().numpy()
    shape = storage.shape
    assert shape is not None
    return np.ravel_multi_index(tuple(slots.cpu().numpy().T), (storage.row_capacity(None), *shape[1:]))


def _rows_at_once(storage: Storage) -> int:
    layout = storage.contents.layout
    if layout is None:
        return 1024
    item = sum(leaf.dtype.itemsize * int(np.prod(leaf.shape, dtype=np.int64)) for leaf in layout.leaves)
    return int(max(1, _PIECE // max(item * storage.contents.items_per_row, 1)))


def _raise_generations(storage: Storage, new: Storage) -> None:
    """Give rows generations that they never had: a slot and a generation from before name no row."""
    if storage.generations is None or new.generations is None:
        return
    most = int(storage.generations.state().max(initial=0)) + 1
    new.generations.with_state(np.full(new.row_capacity(None), most, np.int64), new)()


# ------------------------------------------------------------------ samplers


def make_room(sampler: Sampler, storage: Storage) -> None:
    """Let a sampler take as many items as a storage may hold."""
    if isinstance(sampler, PrioritizedSampler):
        sampler.max_size = max(sampler.max_size, _items_of(storage))


def _items_of(storage: Storage) -> int:
    return storage.table.max_items if isinstance(storage, TensorStorage) else storage.max_size


def _sampler_state(sampler: Sampler, source: np.ndarray, length: int) -> dict[str, Any] | None:
    """The state of a sampler for rows that moved; None to start over. `source` has the old slot of each new one."""
    if isinstance(sampler, PrioritizedSampler):
        return _priorities(sampler.state(), source)
    if isinstance(sampler, SliceSampler):
        return None
    state = sampler.state()
    target = np.full(length, -1)
    target[source] = np.arange(source.size)
    if isinstance(sampler, ConsumingSampler):
        return _uses(state, source)
    if isinstance(sampler, SamplerWithoutReplacement):
        return _epoch(state, source, target)
    if isinstance(sampler, PromptGroupSampler):
        return _groups(state, target)
    return state


def _priorities(state: dict[str, Any], source: np.ndarray) -> dict[str, Any]:
    values = state["_priorities"][source[source < state["_priorities"].size]]
    highest, _ = state["_max_priority"]
    slot = None
    if state["_new_items"] == "highest_stored" and values.size:
        slot = int(values.argmax())
        highest = float(values[slot])
    return {**state, "_priorities": values, "_max_priority": [highest, slot]}


def _uses(state: dict[str, Any], source: np.ndarray) -> dict[str, Any]:
    drawn = state["drawn"][source]
    is_live = drawn < state["max_sample_count"]
    order = np.concatenate((np.flatnonzero(is_live), np.flatnonzero(~is_live)))
    live = int(is_live.sum())
    return {**state, "order": order, "drawn": drawn, "live": live, "ran_out": state["ran_out"] and not live}


def _epoch(state: dict[str, Any], source: np.ndarray, target: np.ndarray) -> dict[str, Any]:
    """The rest of an epoch: what was drawn of the rows that stay counts as drawn."""
    length, position = state["len_storage"], state["position"]
    if length != target.size or not length:  # a draw would begin an epoch
        return {**state, "len_storage": 0, "position": 0, "order": None, "over": True}
    order = np.arange(length) if state["order"] is None else np.asarray(state["order"])
    kept = target[order]
    drawn, left = kept[:position], kept[position:]
    drawn, left = drawn[drawn >= 0], left[left >= 0]
    over = state["over"] or not left.size
    new = np.concatenate((drawn, left))
    if state["order"] is None and not np.array_equal(new, np.arange(new.size)):
        return {**state, "len_storage": 0, "position": 0, "over": True}  # in order of slots: from the first one again
    return {
        **state,
        "len_storage": int(source.size),
        "position": int(drawn.size),
        "over": bool(over),
        "order": None if state["order"] is None else new,
    }


def _groups(state: dict[str, Any], target: np.ndarray) -> dict[str, Any]:
    """The groups with their rows at the new slots; a group that has lost a row has been overwritten."""
    groups = state["groups"]
    slots = target[groups["slots"]]
    ends = np.cumsum(groups["rows"])
    stays = np.array([bool((part >= 0).all()) for part in np.split(slots, ends[:-1])] if len(ends) else [], bool)
    place = np.cumsum(stays) - 1
    ids = groups["ids"]
    new = {
        **groups,
        "numbers": groups["numbers"][stays],
        "ids": [each for each, stay in zip(ids, stays, strict=True) if stay] if isinstance(ids, list) else ids[stays],
        "rows": groups["rows"][stays],
        "slots": slots[np.repeat(stays, groups["rows"])],
        "uses": groups["uses"][stays],
        **({"sizes": groups["sizes"][stays]} if "sizes" in groups else {}),
        "open": place[groups["open"][stays[groups["open"]]]],
        "ready": np.sort(place[groups["ready"][stays[groups["ready"]]]]),
    }
    pending = target[state["pending"]] if len(state["pending"]) else state["pending"]
    return {**state, "groups": new, "pending": pending[pending >= 0]}
