"""Conversion of a torch-side storage, sampler and writer to a functional buffer and its state."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from torch import Tensor

import fbuf
from fbuf import trajectories
from fbuf.samplers import slices
from interop import samplers as torch_side
from interop.data import bridge
from interop.data.arguments import class_of
from interop.data.layout import KeyPath
from interop.host import compiled
from interop.host.trajectories import Trajectories
from interop.samplers.boundary_keys import BoundaryKeys
from interop.samplers.epoch_draws import EpochDraws
from interop.samplers.item_priorities import ItemPriorities
from interop.samplers.slice_draws import SliceDraws
from interop.storages import LazyFrameStorage, Storage, TensorStorage
from interop.writers import ImmutableDatasetWriter, RoundRobinWriter, TensorDictRoundRobinWriter, Writer

_SLICING = (torch_side.SliceSampler, torch_side.SliceSamplerWithoutReplacement, torch_side.PrioritizedSliceSampler)
_WRITERS = (RoundRobinWriter, TensorDictRoundRobinWriter, ImmutableDatasetWriter)


def to_fbuf(
    storage: Storage, sampler: torch_side.Sampler, writer: Writer, batch_size: int | None, narrow: bool
) -> tuple[fbuf.Buffer, fbuf.BufferState]:
    """The functional buffer of these components, and a state with a copy of their content. See `ReplayBuffer.to_fbuf`.

    The lock of the storage is held. All checks run before rows are copied.
    """
    if (
        not isinstance(storage, TensorStorage)
        or isinstance(storage, LazyFrameStorage)
        or type(storage).get is not TensorStorage.get
    ):
        raise _no_twin(storage, "use a LazyTensorStorage, TensorStorage or LazyMemmapStorage")
    if type(writer) not in _WRITERS or writer.tracks_generations:
        raise _no_twin(writer, "use a RoundRobinWriter without track_generations")
    layout = storage.table.fixed_layout
    if layout is None or storage.shape is None:
        raise RuntimeError("nothing was written yet, which fixes what an item is: call extend() or allocate() first")
    if layout.varied:
        raise TypeError(f"{_names(layout.varied)}: text and ragged rows are no arrays: store tensors of one shape")
    stamp = ("index",) if type(writer) is TensorDictRoundRobinWriter else None  # the slot, which draws return anyway
    columns = {path: column for path, column in storage.table.columns().items() if path != stamp}
    dtypes = _dtypes(columns, narrow)
    rule = _rule(sampler, batch_size, narrow)
    keys = None
    index = None
    draws = sampler.draws
    if isinstance(draws, SliceDraws):
        keys = draws.boundary_keys
        assert keys is not None  # a sampler of given trajectories has no rule
        keys.find(storage)
        index = draws.trajectories(storage) if len(storage) else None
    buffer = fbuf.Buffer(
        storage.row_capacity(None),
        rule,
        lanes=tuple(storage.shape[1:]),
        trajectories=None if keys is None else _trajectories(keys, index),
    )
    device = next(iter(columns.values())).device
    with bridge.on(device):
        shapes = [jax.ShapeDtypeStruct(column.shape[storage.ndim :], dtypes[path]) for path, column in columns.items()]
        item = _nested(columns, shapes)
        fbuf.plan(buffer, item).check()
        ring = _ring(buffer, writer, storage.shape[0], index)
        with bridge.exact():
            shared = [bridge.to_jax(column, copy=False) for column in columns.values()]
            items = _nested(columns, _own(shared, buffer.capacity, tuple(dtypes.values())))
        drawn, table = _indexed(buffer, item, items, ring, index)
        state = fbuf.BufferState(items, ring, _resumed(buffer.sampler, drawn, sampler, storage), table)
        return buffer, jax.block_until_ready(jax.device_put(state, bridge.jax_device(device)))


def _no_twin(part: object, cure: str) -> TypeError:
    return TypeError(f"this {class_of(part)} cannot become part of a functional buffer: {cure}")


# ------------------------------------------------------------------ items


def _dtypes(columns: Mapping[KeyPath, Tensor], narrow: bool) -> dict[KeyPath, np.dtype]:
    """The dtype of each column in JAX. TypeError for 64 bits where JAX has 32, ValueError for integers that do not fit."""
    dtypes = {path: jax.dtypes.canonicalize_dtype(bridge.DTYPES[column.dtype]) for path, column in columns.items()}
    wide = [path for path, column in columns.items() if dtypes[path] != bridge.DTYPES[column.dtype]]
    if wide and not narrow:
        raise TypeError(
            f"{_names(wide)}: 64-bit columns, and JAX's 64-bit types are off: set jax_enable_x64, or pass narrow=True to "
            "store integers in 32 bits if all values fit, and floats rounded"
        )
    for path in wide:
        column = columns[path]
        if column.dtype == torch.int64 and not column.to(torch.int32).eq(column).all():
            raise ValueError(f"{_names([path])}: values do not fit in 32 bits: set jax_enable_x64")
    return dtypes


def _names(paths: Iterable[KeyPath]) -> str:
    return ", ".join(repr(path[0] if len(path) == 1 else path) for path in paths)


def _nested(paths: Iterable[KeyPath], leaves: Iterable[Any]) -> Any:
    """Nested dicts of leaves by path; the leaf itself if an item is one tensor."""
    items: dict[Any, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not path:
            return leaf
        functools.reduce(lambda node, key: node.setdefault(key, {}), path[:-1], items)[path[-1]] = leaf
    return items


@functools.partial(jax.jit, static_argnums=(1, 2))
def _own(leaves: list[Array], capacity: int, dtypes: tuple[np.dtype, ...]) -> list[Array]:
    """A copy in JAX's own memory: memory of torch cannot be donated, and would be copied once more."""
    return [
        jnp.zeros((capacity, *leaf.shape[1:]), dtype).at[: leaf.shape[0]].set(leaf.astype(dtype))
        for leaf, dtype in zip(leaves, dtypes, strict=True)
    ]


# ------------------------------------------------------------------ rules


def _rule(sampler: torch_side.Sampler, batch_size: int | None, narrow: bool) -> fbuf.Sampler | fbuf.Slices:
    """The functional rule with the same distribution. TypeError for a sampler without one."""
    if isinstance(sampler, torch_side.SliceSampler):
        return _slices(sampler, batch_size, narrow)
    if type(sampler) is torch_side.RandomSampler:
        return fbuf.Uniform()
    if type(sampler) is torch_side.SamplerWithoutReplacement:
        return fbuf.Shuffled(sampler.drop_last, sampler.shuffle)
    values = sampler.item_values
    if type(sampler) is torch_side.PrioritizedSampler and isinstance(values, ItemPriorities):
        return _prioritized(values, narrow)
    raise _no_twin(sampler, "use a RandomSampler, or one of those without replacement, by priority or of slices")


def _prioritized(priorities: ItemPriorities, narrow: bool) -> fbuf.Prioritized:
    dtype = _dtypes({("priorities",): priorities.given}, narrow)["priorities",]
    return dataclasses.replace(
        priorities.rule, alpha=priorities.alpha, dtype="float64" if dtype == np.float64 else "float32"
    )


def _slices(sampler: torch_side.SliceSampler, batch_size: int | None, narrow: bool) -> fbuf.Slices:
    starts: fbuf.Sampler | fbuf.PerTrajectory = fbuf.PerTrajectory()
    least = None if sampler.strict_length else 1
    is_marked = isinstance(sampler.draws, SliceDraws) and sampler.draws.boundary_keys is not None
    if type(sampler) not in _SLICING or not is_marked or sampler.span != (False, False):
        raise _no_twin(sampler, "use one of the library without ends, trajectories and span")
    draws = sampler.draws
    values = sampler.item_values
    if isinstance(draws, EpochDraws):
        if not draws.epoch.shuffle:
            raise _no_twin(sampler, "use shuffle=True")
        starts = fbuf.PerTrajectory(fbuf.Shuffled(draws.epoch.drop_last))
    if isinstance(values, ItemPriorities):
        if least:
            raise _no_twin(sampler, "use strict_length=True")
        starts = _prioritized(values, narrow)
    if sampler.slice_len is not None:
        return fbuf.Slices(sampler.slice_len, starts, least=least)
    if batch_size is None:
        raise ValueError(f"num_slices={sampler.num_slices} is no length of slices: pass to_fbuf(batch_size=...)")
    return fbuf.Slices.by_count(sampler.num_slices, batch_size, starts=starts, least=least)  # type: ignore[arg-type]


def _trajectories(keys: BoundaryKeys, index: Trajectories | None) -> fbuf.Trajectories:
    """The leaves that mark trajectories. ValueError for interleaved ones, which functional trajectories cannot be."""
    paths = keys.stored_keys
    if index is not None and index.is_interleaved:
        raise ValueError(
            f"{_names(paths.ids)}: trajectories are interleaved: in a functional buffer their rows follow each other"
        )
    ended = tuple(path for path in paths.ends if path[-1] == "terminated")
    cut = tuple(path for path in paths.ends if path not in ended)
    # A mask divides steps and padding as ids do.
    return fbuf.Trajectories(
        terminated=list(ended) or None,
        truncated=list(cut) or None,
        id=[*paths.ids, *paths.masks] or None,
        first=list(paths.firsts) or None,
    )


# ------------------------------------------------------------------ states


def _ring(buffer: fbuf.Buffer, writer: Writer, filled: int, index: Trajectories | None) -> fbuf.RingState:
    """The state of the writer. ValueError for rows that are not in the order of a ring with this cursor."""
    cursor = writer.cursor if isinstance(writer, RoundRobinWriter) else filled % buffer.capacity
    end = cursor if index is None else index.now % index.capacity
    if end != cursor or cursor != (filled if filled < buffer.capacity else cursor):
        raise ValueError(
            f"{filled} rows are stored, the newest one before row {end}, and the next write is at {cursor}: a functional "
            "ring goes on behind its newest row. Write all rows by extend()"
        )
    return _ring_at(cursor, filled, writer.write_count)


def _ring_at(cursor: int, size: int, written: int) -> fbuf.RingState:
    counters = np.array([cursor, size, written % 2**32, (written >> 32) % 2**32], np.uint32)
    return fbuf.RingState(jnp.array(counters))


def _indexed(
    buffer: fbuf.Buffer, item: Any, items: Any, ring: fbuf.RingState, index: Trajectories | None
) -> tuple[Any, Any]:
    """The states of the sampler and of the trajectories, as if all stored rows had been written in one batch."""
    rule = buffer.sampler
    trajectory_rule = buffer.trajectories
    capacity = buffer.capacity
    lanes = buffer.items_per_row
    if not isinstance(rule, fbuf.Slices):
        return rule.init(capacity * lanes), None
    assert trajectory_rule is not None
    state = rule.init(capacity, lanes)
    table = trajectory_rule.init(capacity, lanes, item)
    filled = int(ring.size)
    if index is None:
        return state, table
    rows = (int(ring.cursor) - filled + np.arange(filled)) % capacity
    before = _ring_at(rows[0], 0, int(ring.written[0]) - filled)  # times are modulo 2^32
    marks, ids = trajectory_rule.marks(items, buffer.lanes)
    # At a new id or a discontinuity, the flags of the rows do not mark the end of the trajectory.
    is_cut = index.ends() & (trajectories.kind_of(marks[rows]) == trajectories.OPEN)
    marks = jnp.where(is_cut, marks[rows] | np.uint8(trajectories.CUT), marks[rows])
    slots = (rows[:, None] * lanes + np.arange(lanes)).reshape(-1).astype(np.int32)
    return _after_writing(
        rule, state, table, (before, ring), marks, jax.tree.map(lambda id_column: id_column[rows], ids), slots
    )


@functools.partial(jax.jit, static_argnums=0)
def _after_writing(
    rule: fbuf.Slices, state: Any, table: Any, rings: Any, marks: Array, ids: Any, slots: Array
) -> tuple[Any, Any]:
    """The states of slices and trajectories after a first write of rows with these marks and ids."""
    after = trajectories.written(table, rings[0], marks, ids)
    write = slices.Written(table, after, rings[1], jnp.zeros((), jnp.int32), None, marks.shape[0])
    return rule.written(state, slots, write), after


def _resumed(rule: Any, state: Any, sampler: torch_side.Sampler, storage: Storage) -> Any:
    """The state of a functional sampler with the priorities of the torch-side one, or its position in the epoch."""
    if isinstance(rule, fbuf.Slices):
        starts = rule.starts.trajectories if isinstance(rule.starts, fbuf.PerTrajectory) else rule.starts
        return dataclasses.replace(state, starts=_resumed(starts, state.starts, sampler, storage))
    if isinstance(sampler, torch_side.PrioritizedSampler):
        return _weighed(rule, state, sampler)
    if isinstance(sampler.draws, EpochDraws):
        return _under_way(state, *sampler.draws.remaining(storage))
    return state


def _weighed(
    rule: fbuf.Prioritized, state: fbuf.PrioritizedState, sampler: torch_side.PrioritizedSampler
) -> fbuf.PrioritizedState:
    stored = sampler.priorities.cpu().numpy()
    drawn = sampler.functional_state
    if drawn is None:  # no item is stored
        return state
    priorities = np.full(state.tree.capacity, -1, rule.dtype)
    priorities[: stored.size] = stored
    with bridge.exact():
        state = compiled.refill(rule, state, priorities, np.asarray(sampler.alpha, rule.dtype))
    highest = np.asarray(sampler.default_priority, rule.dtype)
    rest = {"highest": highest, "highest_slot": np.array(drawn.highest_slot), "refused": np.array(drawn.refused)}
    return dataclasses.replace(state, **jax.tree.map(jnp.array, rest))


def _under_way(state: fbuf.ShuffledState, length: int, left: np.ndarray) -> fbuf.ShuffledState:
    """The state of an epoch over `length` positions, with the positions that are left to be drawn."""
    drawn = length - left.size
    moved = state.moved
    if moved is not None:
        order = np.array(moved)
        order[:length, 0] = np.concatenate([np.setdiff1d(np.arange(length), left), left])
        order[:length, 1] = np.asarray(state.epoch)
        moved = jnp.array(order)
    elif left.size and not np.array_equal(left, np.arange(drawn, length)):
        raise RuntimeError("batches drawn ahead were given out of order: finish the epoch first")
    position, length_ = (jnp.array(np.int32(number)) for number in (drawn, length))
    return dataclasses.replace(state, moved=moved, position=position, length=length_)
