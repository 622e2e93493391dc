"""Which stored rows follow each other in one trajectory: one index, kept as rows are written.

A lane's rows in the order of writing are cut into trajectories, which are numbered. For each row the index knows the number;
for each number that can be stored, when the trajectory began, when its latest row was written, and how it ended. So where
a stored row stands in its trajectory is two reads away, whatever the number of rows and trajectories.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, UInt8

from fbuf.paths import leaf_at, path_of
from fbuf.writers import RingState

OPEN, TERMINATED, TRUNCATED, CUT = 0, 1, 2, 3  # kinds of end; a cut one was followed by another without having ended


_LONGEST = np.uint32(2**31 - 1)  # steps that are counted; a trajectory may go on


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrajectoryState:
    """The index. Times count rows ever written, modulo 2^32; lanes are folded into one dim."""

    number: Array  # [capacity, lanes] int32: which trajectory of its lane a row belongs to, modulo `_turn`
    first: Array  # [capacity, lanes] uint32, at number % capacity: when the trajectory began
    last: Array  # [capacity, lanes] uint32, at number % capacity: when its latest row was written
    kind: Array  # [capacity, lanes] uint8, at number % capacity: OPEN, TERMINATED, TRUNCATED or CUT
    latest: Array  # [lanes] int32: the number of the latest trajectory
    is_open: Array  # [lanes] bool: whether its next row belongs to it
    id: Array | None  # [lanes]: the id of the latest row; None where items have none


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Place:
    """Where items stand in their trajectories. Each leaf has the shape of the slots."""

    lane: Array  # int32, over all dims of lanes, row-major
    number: Array  # int32: of the trajectory in its lane
    step: Array  # int32: rows of the trajectory before this one, stored or not; at most 2^31 - 1
    before: Array  # int32: how many of these are stored
    after: Array  # int32: stored rows of the trajectory behind this one
    kind: Array  # uint8: how the trajectory ended; OPEN while it goes on


@dataclasses.dataclass(frozen=True)
class Trajectories:
    """Where items say to which trajectory they belong: paths of leaves, as a key or a tuple of keys, fields and places.

    Args:
        terminated: bool, the trajectory ends with this item, in a terminal state.
        truncated: bool, the trajectory ends with this item, cut short.
        id: integer; another one than in the row before begins a trajectory.

    At least one is needed. A leaf holds one value an item: its shape is () or of ones only. With `lanes` each lane has
    trajectories of its own; within a lane the rows of one follow each other.
    """

    terminated: Any = None
    truncated: Any = None
    id: Any = None

    def __post_init__(self) -> None:
        for name in ("terminated", "truncated", "id"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, path_of(name, getattr(self, name)))
        if self.terminated is None and self.truncated is None and self.id is None:
            raise ValueError("trajectories need at least one of terminated, truncated and id: a path into an item")

    def init(self, capacity: int, lanes: int, item: Any) -> TrajectoryState:
        """The index of no rows, for items like `item`. TypeError or ValueError where its leaves are not as they must be."""
        for name in ("terminated", "truncated"):
            self._leaf(item, name, jnp.bool_)
        held = self._leaf(item, "id", jnp.integer)
        table = (capacity, lanes)
        return TrajectoryState(
            number=jnp.full(table, -1, jnp.int32),
            first=jnp.zeros(table, jnp.uint32),
            last=jnp.zeros(table, jnp.uint32),
            kind=jnp.zeros(table, jnp.uint8),
            latest=jnp.full(lanes, _turn(capacity) - 1, jnp.int32),
            is_open=jnp.zeros(lanes, jnp.bool_),
            id=None if held is None else jnp.zeros(lanes, held.dtype),
        )

    def ends(self, batch: Any, lanes: tuple[int, ...]) -> tuple[UInt8[Array, "n lanes"], Array | None]:
        """The kind of end of each item of a batch with leaves [n, *lanes, ...], 0 for none, and its id."""
        shape = (-1, math.prod(lanes))
        ended = jnp.zeros((jax.tree.leaves(batch)[0].shape[0], shape[1]), jnp.uint8)
        for path, kind in ((self.truncated, TRUNCATED), (self.terminated, TERMINATED)):
            if path is not None:
                ended = jnp.where(jnp.asarray(leaf_at(batch, path)).reshape(shape), jnp.uint8(kind), ended)
        return ended, None if self.id is None else jnp.asarray(leaf_at(batch, self.id)).reshape(shape)

    def _leaf(self, item: Any, name: str, kind: Any) -> Any:
        path = getattr(self, name)
        if path is None:
            return None
        try:
            leaf = leaf_at(item, path)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{name}={path!r}: an item has no such leaf") from error
        if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, kind)):
            raise TypeError(f"{name}={path!r} must be {kind.__name__}, got {getattr(leaf, 'dtype', type(leaf))}")
        if math.prod(leaf.shape) != 1:
            raise ValueError(f"{name}={path!r} must be one value an item, got shape {leaf.shape}")
        return leaf


def written(
    state: TrajectoryState, ring: RingState, ended: UInt8[Array, "n lanes"], ids: Array | None
) -> TrajectoryState:
    """The index after n rows were written; `ring` is how it stood before. O(n)."""
    capacity, count = state.number.shape[0], ended.shape[0]
    now, at = ring.written[0], jnp.arange(count, dtype=jnp.int32)[:, None]
    starts = jnp.concatenate([~state.is_open[None], ended[:-1] != OPEN])
    if (ids is None) != (state.id is None):
        raise ValueError("the state was made by a buffer with other trajectories: one with ids and one without")
    if ids is not None and state.id is not None:
        starts |= ids != jnp.concatenate([state.id[None], ids[:-1]])
    number = _wrapped(state.latest[None].astype(jnp.uint32) + jnp.cumsum(starts, 0, dtype=jnp.uint32), _turn(capacity))
    begun = jax.lax.cummax(jnp.where(starts, at, -1), axis=0)  # where in the batch its trajectory begins; -1: before it
    following = jnp.concatenate([starts[1:], jnp.zeros_like(starts[:1])])
    stop = jax.lax.cummin(jnp.where(following, at, count - 1), axis=0, reverse=True)
    cut = jnp.take_along_axis(following, stop, 0)
    kind = jnp.take_along_axis(ended, stop, 0)
    kind = jnp.where(cut & (kind == OPEN), jnp.uint8(CUT), kind)

    lane = jnp.arange(ended.shape[1], dtype=jnp.int32)
    held = (state.latest % capacity, lane)
    since = now - jnp.minimum(now - state.first[held], _LONGEST - np.uint32(count))
    first = jnp.where(begun < 0, since[None], now + begun.astype(jnp.uint32))
    # A trajectory that went on until here and is not continued.
    ending = state.is_open & starts[0]
    kinds = state.kind.at[held].set(jnp.where(ending, jnp.uint8(CUT), state.kind[held]), mode="promise_in_bounds")

    kept = slice(count - min(count, capacity), None)  # of more rows than there are the last stay
    rows = _wrapped(ring.cursor.astype(jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)[kept] % capacity, capacity)
    entry = (number[kept] % capacity, jnp.broadcast_to(lane, number[kept].shape))
    return TrajectoryState(
        number=state.number.at[rows].set(number[kept], mode="promise_in_bounds", unique_indices=True),
        first=_put(state.first, entry, first[kept]),
        last=_put(state.last, entry, now + stop[kept].astype(jnp.uint32)),
        kind=_put(kinds, entry, kind[kept]),
        latest=number[-1],
        is_open=ended[-1] == OPEN,
        id=None if ids is None or state.id is None else ids[-1].astype(state.id.dtype),
    )


def clear(state: TrajectoryState) -> TrajectoryState:
    """The index of no rows."""
    return dataclasses.replace(state, is_open=jnp.zeros_like(state.is_open))


def place(state: TrajectoryState, ring: RingState, slots: Int[Array, "*shape"]) -> Place:
    """Where the items at slots, which must hold one, stand in their trajectories. O(slots)."""
    lanes, slots = state.latest.size, slots.astype(jnp.int32)
    row, lane = (slots // lanes, slots % lanes) if lanes > 1 else (slots, jnp.zeros_like(slots))
    number = state.number.at[row, lane].get(mode="promise_in_bounds")
    entry = (number % state.number.shape[0], lane)
    first = state.first.at[entry].get(mode="promise_in_bounds")
    time = time_of(ring, row, state.number.shape[0])
    step = (time - first).astype(jnp.int32)
    return Place(
        lane=lane,
        number=number,
        step=step,
        before=jnp.minimum(step, stored_before(ring, row, state.number.shape[0])),
        after=(state.last.at[entry].get(mode="promise_in_bounds") - time).astype(jnp.int32),
        kind=state.kind.at[entry].get(mode="promise_in_bounds"),
    )


def time_of(ring: RingState, row: Array, capacity: int) -> Array:
    """When the item in a row was written."""
    return ring.written[0] - 1 - _age(ring, row, capacity).astype(jnp.uint32)


def stored_before(ring: RingState, row: Array, capacity: int) -> Array:
    """How many stored rows are older than a row."""
    return ring.size - 1 - _age(ring, row, capacity)


def _age(ring: RingState, row: Array, capacity: int) -> Array:
    """Rows written after this one."""
    return jnp.where(row < ring.cursor, ring.cursor - 1 - row, ring.cursor - 1 - row + capacity)


def _turn(capacity: int) -> int:
    """Where numbers begin again: a multiple of the capacity, so that no two that are stored share an entry."""
    return capacity * ((2**31 - 1) // capacity)


def _wrapped(value: Array, bound: int) -> Array:
    return jnp.where(value >= bound, value - jnp.uint32(bound), value).astype(jnp.int32)


def _put(table: Array, entry: tuple[Array, Array], values: Array) -> Array:
    """The table with values at entries; equal entries come with equal values."""
    if values.size == 1:  # XLA makes a slice of a scatter of one entry, and then copies the table
        entry, values = (jnp.repeat(entry[0], 2, 0), jnp.repeat(entry[1], 2, 0)), jnp.repeat(values, 2, 0)
    return table.at[entry].set(values, mode="promise_in_bounds")
