"""An index of the trajectories in a ring of rows, updated as rows are written.

The trajectories of a lane are numbered. The index has the number of each row, and for each number a span: when the
trajectory began, when its latest row was written, and how it ended. So two reads find the place of a row in its trajectory,
whatever the number of rows and trajectories.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, UInt8

from fbuf.fusion import (
    computed_once,
    divmod_unsigned,
    entry,
    loop_variant,
    map_entries,
    part,
    put,
    two_or_more,
    zero_after,
)
from fbuf.keywords import checked
from fbuf.paths import KeyPath, leaf_at, path_of, required_leaf
from fbuf.short_text import ShortText
from fbuf.writers import RingState, backward, onward, wrapped

OPEN, TERMINATED, TRUNCATED, CUT = 0, 1, 2, 3  # kinds of end; CUT: another trajectory followed without an end
_BEGAN, _LAST, _KIND = 0, 1, 2  # the words of a span
_FIRST = 4  # in the marks of a written item, beside its kind of end: a trajectory begins with it

Ids = Array | tuple[Array, ...]  # of items, or of each of several leaves
Queued = tuple[Array, Array, Array]  # a ring of slots [items + 1], the place of the oldest, and how many there are

_FEW = 256  # slots up to which a loop over them is faster on the CPU than kernels over all
_LONGEST = np.uint32(2**31 - 1)  # the largest step; a longer trajectory repeats it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class TrajectoryState(ShortText):
    """The index. Times count rows ever written, modulo 2^32; lanes are folded into one dim.

    Attributes:
        number: [capacity, lanes] int32: the number of the trajectory of a row in its lane, modulo `_modulus`.
        spans: [capacity, lanes, 3] uint32, at number % capacity: when the trajectory began, when its latest row was written,
            and how it ended. Side by side: what reads or writes one of them needs the others.
        latest: [lanes] int32: the number of the latest trajectory.
        is_open: [lanes] bool: whether the next row continues it.
        id: [lanes]: the id of the latest row, or each of several; None if items have none.

    Attributes:
        number: TODO.
        spans: [capacity, lanes, 3] uint32, at number % capacity: when the trajectory began, when its latest row was written,
            and how it ended. Side by side: what reads or writes one of them needs the others.
        latest: TODO.
        is_open: TODO.
        id: [lanes]: the id of the latest row, or each of several; None if items have none.
    """

    number: Array
    spans: Array
    latest: Array
    is_open: Array
    id: Array | tuple[Array, ...] | None

    @property
    def first(self) -> Array:
        """[capacity, lanes] uint32, at number % capacity: when the trajectory began."""
        return self.spans[..., _BEGAN]

    @property
    def last(self) -> Array:
        """[capacity, lanes] uint32, at number % capacity: when its latest row was written."""
        return self.spans[..., _LAST]

    @property
    def kind(self) -> Array:
        """[capacity, lanes] uint8, at number % capacity: OPEN, TERMINATED, TRUNCATED or CUT."""
        return self.spans[..., _KIND].astype(jnp.uint8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrajectoryPlace:
    """Positions of items in their trajectories. Each leaf has the shape of the slots.

    Attributes:
        lane: int32, over all dims of lanes, row-major.
        number: int32: the number of the trajectory in its lane.
        step: int32: how many rows of the trajectory came before, stored or not; at most 2^31 - 1.
        before: int32: how many of them are stored.
        after: int32: how many stored rows of the trajectory follow.
        kind: uint8: how the trajectory ended; OPEN while it goes on.

    Attributes:
        lane: TODO.
        number: TODO.
        step: TODO.
        before: TODO.
        after: TODO.
        kind: TODO.
    """

    lane: Array
    number: Array
    step: Array
    before: Array
    after: Array
    kind: Array


@checked
@dataclasses.dataclass(frozen=True)
class Trajectories:
    """The leaves that mark trajectories: paths into an item, as a key or a tuple of keys, fields and places.

    Args:
        terminated: bool or float; not zero: the trajectory ends with this item, in a terminal state.
        truncated: bool or float; not zero: the trajectory ends with this item, cut short.
        id: integer, bool or float; a trajectory begins where it differs from that of the previous row.
        discount: float; zero: the trajectory ends with this item, in a terminal state.
        first: bool or float; not zero: the trajectory begins with this item.
        endless: without paths: each lane is one trajectory, which never ends.

    Instead of one path a list of paths is taken: each of these leaves counts. At least one is needed. A leaf holds one value
    an item: its shape is () or of ones only. Each lane has trajectories of its own; within a lane the rows of a trajectory
    follow each other.
    """

    terminated: Any = None
    truncated: Any = None
    id: Any = None
    discount: Any = None
    endless: bool = dataclasses.field(default=False, kw_only=True)
    first: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        names = ("terminated", "truncated", "id", "discount", "first")
        paths = [name for name in names if getattr(self, name) is not None]
        for name in paths:
            given = getattr(self, name)
            # Several paths are kept as a tuple of tuples, which no single path is.
            several = isinstance(given, list) or (isinstance(given, tuple) and given and isinstance(given[0], tuple))
            if several and not given:
                raise ValueError(f"{name} must be a path or a list of at least one path, got {given!r}")
            path = tuple(path_of(name, one) for one in given) if several else path_of(name, given)
            object.__setattr__(self, name, path[0] if several and len(path) == 1 else path)
        if self.endless is not (not paths):
            raise ValueError(
                "trajectories need at least one of terminated, truncated, id, discount and first: a path into an item; "
                f"or endless=True without any, got endless={self.endless!r} and {paths}"
            )

    def paths(self, name: str) -> tuple[KeyPath, ...]:
        """The paths of an argument; () for none."""
        given = getattr(self, name)
        if given is None:
            return ()
        return given if isinstance(given[0], tuple) else (given,)

    def init(self, capacity: int, lanes: int, item: Any) -> TrajectoryState:
        """An empty index for items like `item`. TypeError or ValueError for leaves of a wrong kind."""
        for name in ("terminated", "truncated", "first"):
            self._leaves(item, name, jnp.bool_, jnp.floating)
        self._leaves(item, "discount", jnp.floating)
        held = self._leaves(item, "id", jnp.integer, jnp.bool_, jnp.floating)
        table = (capacity, lanes)
        return TrajectoryState(
            number=jnp.full(table, -1, jnp.int32),
            spans=jnp.zeros((*table, 3), jnp.uint32),
            latest=jnp.full(lanes, _modulus(capacity) - 1, jnp.int32),
            is_open=jnp.zeros(lanes, jnp.bool_),
            id=_one_or_several([jnp.zeros(lanes, leaf.dtype) for leaf in held]),
        )

    def marks(self, batch: Any, lanes: tuple[int, ...]) -> tuple[UInt8[Array, "n lanes"], Ids | None]:
        """The marks and the ids of each item of a batch with leaves [n, *lanes, ...]: see `kind_of`."""
        shape = (-1, math.prod(lanes))
        marks = jnp.zeros((jax.tree.leaves(batch)[0].shape[0], shape[1]), jnp.uint8)
        kinds = (("truncated", TRUNCATED, True), ("terminated", TERMINATED, True), ("discount", TERMINATED, False))
        for name, kind, mark in kinds:
            for path in self.paths(name):
                found = jnp.asarray(leaf_at(batch, path), jnp.bool_).reshape(shape)  # of a float: not zero
                marks = jnp.where(found if mark else ~found, jnp.uint8(kind), marks)
        for path in self.paths("first"):
            marks |= jnp.asarray(leaf_at(batch, path), jnp.bool_).reshape(shape).astype(jnp.uint8) * np.uint8(_FIRST)
        return marks, _one_or_several([jnp.asarray(leaf_at(batch, path)).reshape(shape) for path in self.paths("id")])

    def _leaves(self, item: Any, name: str, *kinds: Any) -> list[Any]:
        found = []
        for path in self.paths(name):
            leaf = required_leaf(name, item, path)
            if not (hasattr(leaf, "dtype") and any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{name}={path!r} must be {wanted}, got {getattr(leaf, 'dtype', type(leaf))}")
            if math.prod(leaf.shape) != 1:
                raise ValueError(f"{name}={path!r} must be one value an item, got shape {leaf.shape}")
            found.append(leaf)
        return found


def _one_or_several(leaves: list[Array]) -> Ids | None:
    """None, the only leaf, or a tuple of several."""
    return None if not leaves else leaves[0] if len(leaves) == 1 else tuple(leaves)


@checked
def kind_of(marks: Array) -> Array:
    """How items end their trajectory, of the marks that `Trajectories.marks` returns."""
    return marks & np.uint8(_FIRST - 1)


def _begin(marks: Array) -> Array:
    """Whether a trajectory begins with items, of their marks."""
    return marks >= np.uint8(_FIRST)


def _differ(one: Ids, other: Ids) -> Array:
    """Whether one of the ids differs."""
    differing = []
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        differs = a != b
        if jnp.issubdtype(a.dtype, jnp.floating):
            differs &= ~(jnp.isnan(a) & jnp.isnan(b))  # one id
        differing.append(differs)
    return functools.reduce(jnp.logical_or, differing)


@checked
def written(
    state: TrajectoryState, ring: RingState, marks: UInt8[Array, "n lanes"], ids: Ids | None
) -> TrajectoryState:
    """The index after n rows with these marks and ids were written; `ring` is the ring before that. O(n)."""
    capacity, count = state.number.shape[0], marks.shape[0]
    now, at = ring.written[0], jnp.arange(count, dtype=jnp.int32)[:, None]
    ended = kind_of(marks)
    starts = jnp.concatenate([~state.is_open[None], ended[:-1] != OPEN]) | _begin(marks)
    check_ids(state, ids)
    if ids is not None:
        before = jax.tree.map(lambda last, new: jnp.concatenate([last[None], new[:-1]]), state.id, ids)
        starts |= _differ(ids, before)
    number = wrapped(
        state.latest[None].astype(jnp.uint32) + jnp.cumsum(starts, 0, dtype=jnp.uint32), _modulus(capacity)
    )
    begun = jax.lax.cummax(jnp.where(starts, at, -1), axis=0)  # first row of the trajectory in the batch; -1: before it
    following = jnp.concatenate([starts[1:], jnp.zeros_like(starts[:1])])
    stop = jax.lax.cummin(jnp.where(following, at, count - 1), axis=0, reverse=True)
    cut = jnp.take_along_axis(following, stop, 0)
    kind = jnp.take_along_axis(ended, stop, 0)
    kind = jnp.where(cut & (kind == OPEN), jnp.uint8(CUT), kind)

    lane = jnp.arange(ended.shape[1], dtype=jnp.int32)
    # Read before they are written: a read that is fused into the write comes after it, so XLA would copy all spans.
    held = computed_once(state.spans.at[divmod_unsigned(state.latest, capacity)[1], lane].get(mode="promise_in_bounds"))
    since = now - jnp.minimum(now - held[:, _BEGAN], _LONGEST - np.uint32(count))
    first = jnp.where(begun < 0, since[None], now + begun.astype(jnp.uint32))
    spans = jnp.stack([first, now + stop.astype(jnp.uint32), kind.astype(jnp.uint32)], -1)

    kept = slice(count - min(count, capacity), None)  # of more rows than there are the last stay
    rows = wrapped(ring.cursor.astype(jnp.uint32) + jnp.arange(count, dtype=jnp.uint32)[kept] % capacity, capacity)
    numbers, changed = number[kept], spans[kept]
    if count < capacity:  # and the trajectory before them, which is cut if it was open and is not continued
        closed = held.at[:, _KIND].set(jnp.where(state.is_open, np.uint32(CUT), held[:, _KIND]))
        numbers = jnp.concatenate([state.latest[None], numbers])
        changed = jnp.concatenate([jnp.where(starts[0][:, None], closed, spans[0])[None], changed])
    entries = (divmod_unsigned(numbers, capacity)[1], jnp.broadcast_to(lane, numbers.shape))
    return TrajectoryState(
        number=state.number.at[rows].set(number[kept], mode="promise_in_bounds", unique_indices=True),
        spans=_put(state.spans, entries, changed),
        latest=number[-1],
        is_open=ended[-1] == OPEN,
        id=jax.tree.map(lambda last, new: new[-1].astype(last.dtype), state.id, ids),
    )


@checked
def check_ids(state: TrajectoryState, ids: Ids | None) -> None:
    """ValueError if the state keeps ids and items have none, or the other way round."""
    if len(jax.tree.leaves(ids)) != len(jax.tree.leaves(state.id)):
        raise ValueError(
            "the state was made by a buffer with other trajectories: one with ids and one without, or with more"
        )


@checked
def written_one_by_one(
    reach: int | None,
    only_closed: bool,
    state: TrajectoryState,
    ring: RingState,
    marks: UInt8[Array, "n lanes"],
    ids: Ids | None,
    queued: Queued | None,
    _after: RingState,
) -> tuple[TrajectoryState, Array, Queued | None]:
    """`written` for fewer than `capacity - reach` rows, in a loop that is one kernel on the CPU. It also updates a queue.

    A start is a row that begins `reach` + 1 stored rows of one trajectory; with `only_closed` they must be the last rows
    of an ended trajectory. Returns the index, the number of overwritten starts, and the queue, if there is one: without
    these starts, and with the rows that become starts.
    """
    capacity, lanes = state.number.shape
    count = marks.shape[0]
    before = ring

    def body(step: Array, held: Any) -> Any:
        state, seen, lost, queued = held
        ring = loop_variant(before, step)
        at, lane = divmod_unsigned(step, lanes)
        now, row = ring.written[0] + at.astype(jnp.uint32), onward(ring.cursor, at, capacity)
        latest, was_open, mark = entry(state.latest, lane), entry(state.is_open, lane), cell(marks, at, lane)
        kind, starts = kind_of(mark), ~was_open | _begin(mark)
        if ids is not None:
            starts |= _differ(
                jax.tree.map(lambda new: cell(new, at, lane), ids),
                jax.tree.map(lambda last: entry(last, lane), state.id),
            )
        number = wrapped(latest.astype(jnp.uint32) + starts, _modulus(capacity))
        there, cut = (divmod_unsigned(each, capacity)[1] for each in (number, latest))
        age = jnp.minimum(now - _span(state, there, lane)[_BEGAN], _LONGEST - (count - at).astype(jnp.uint32))
        how = jnp.where(starts & was_open, np.uint32(CUT), _span(state, cut, lane)[_KIND])
        left, entered = jnp.bool_(False), jnp.bool_(False)
        if reach is not None:
            ahead = onward(row, jnp.int32(reach), capacity)
            held_by = cell(state.number, ahead, lane)
            left = (row < ring.size) & (cell(state.number, row, lane) == held_by)
            if only_closed:
                since = ring.written[0] - 1 - _age(ring, ahead, capacity).astype(jnp.uint32)
                left &= _span(state, divmod_unsigned(held_by, capacity)[1], lane)[_LAST] == since
                left &= ~(was_open & (held_by == latest))
            back = backward(row, reach, capacity)
            if queued is not None:
                entered = (ring.size >= reach - at) & (cell(state.number, back, lane) == number)
        # These values are stored, read back, and used in what is written: otherwise XLA would read the tables again after
        # it wrote to them, and copy them for that. No age is above `_LONGEST`, which XLA does not know.
        read = jnp.stack([left.astype(jnp.uint32), entered.astype(jnp.uint32), age, how])
        seen = jax.lax.dynamic_update_slice(seen, read, (at & 1,))
        left, entered, age, how = part(seen, at & 1, 4)
        if reach is not None:
            left, entered = left.astype(jnp.int32), entered.astype(jnp.int32)
            lost = lost + left
            if queued is not None:
                queued = queue_moved(queued, left, entered, back * lanes + lane)
        spans = _set(state.spans, how, cut, lane, jnp.uint32(_KIND))
        span = jnp.stack([jnp.where(starts, now, now - age), now, kind.astype(jnp.uint32)])
        state = TrajectoryState(
            number=_set(state.number, jnp.where(age > _LONGEST, 0, number), row, lane),
            spans=_set(spans, span, there, lane, jnp.uint32(0)),
            latest=put(state.latest, number, lane),
            is_open=put(state.is_open, (kind == OPEN) & (age <= _LONGEST), lane),
            id=jax.tree.map(lambda last, new: put(last, cell(new, at, lane), lane), state.id, ids),
        )
        return state, seen, lost, queued

    zero = zero_after(marks)
    held = jax.lax.fori_loop(zero, count * lanes, body, (state, jnp.full(5, zero.astype(jnp.uint32)), zero, queued))
    return held[0], held[2], held[3]


@checked
def queue_moved(queued: Queued, left: Array, entered: Array, slot: Array) -> Queued:
    """The queue after `left` of its oldest entries left, and a slot entered behind the last one if `entered`."""
    queue, head, count = queued
    room = queue.size - 1
    last = jnp.where(count >= room - head, count - (room - head), head + count)
    queue = put(queue, jnp.where(entered > 0, slot, 0), jnp.where(entered > 0, last, room))
    head = wrapped(head.astype(jnp.uint32) + left.astype(jnp.uint32), room)
    return queue, head, count - left + entered


@checked
def clear(state: TrajectoryState) -> TrajectoryState:
    """The index without rows."""
    return dataclasses.replace(state, is_open=jnp.zeros_like(state.is_open))


@checked
def resized(state: TrajectoryState, number: np.ndarray, spans: np.ndarray, capacity: int) -> TrajectoryState:
    """The index of a ring of `capacity` rows, of which the first are some newest rows, the oldest first. O(capacity).

    `number` [rows, lanes] are the numbers of their trajectories, and `spans` [rows, lanes, 3] the spans of these.
    """
    old, new = _modulus(state.number.shape[0]), _modulus(capacity)
    count, lanes = number.shape
    latest = np.asarray(state.latest).astype(np.int64)
    if not count:
        latest = np.where(latest == old - 1, new - 1, latest)  # the next number is 0
    first = number[0] if count else latest
    number, latest = ((first % new + (each - first) % old) % new for each in (number, latest))  # they follow each other
    numbers, held = np.full((capacity, lanes), -1, np.int32), np.zeros((capacity, lanes, 3), np.uint32)
    numbers[:count] = number
    held[number % capacity, np.arange(lanes)] = spans  # equal entries have equal spans
    return dataclasses.replace(
        state, number=jnp.array(numbers), spans=jnp.array(held), latest=jnp.array(latest.astype(np.int32))
    )


@jax.jit
@checked
def place(state: TrajectoryState, ring: RingState, slots: Int[Array, "*shape"]) -> TrajectoryPlace:
    """Positions in their trajectories of the items at slots, each of which must hold one. O(slots)."""
    found = map_entries(_place_of, slots.size, state, ring, slots.astype(jnp.int32).reshape(-1), most=_FEW)
    return jax.tree.map(lambda leaf: leaf.reshape(slots.shape), found)


def _place_of(state: TrajectoryState, ring: RingState, _k: Array, slot: Array) -> TrajectoryPlace:
    return place_of_one(state, ring, *divmod_unsigned(slot, state.latest.size))


@checked
def place_of_one(state: TrajectoryState, ring: RingState, row: Array, lane: Array) -> TrajectoryPlace:
    """The place of the item in a row and lane: scalars."""
    capacity = state.number.shape[0]
    number, time = cell(state.number, row, lane), time_of(ring, row, capacity)
    span = _span(state, divmod_unsigned(number, capacity)[1], lane)
    step = (time - span[_BEGAN]).astype(jnp.int32)
    return TrajectoryPlace(
        lane=lane,
        number=number,
        step=step,
        before=jnp.minimum(step, stored_before(ring, row, capacity)),
        after=(span[_LAST] - time).astype(jnp.int32),
        kind=span[_KIND].astype(jnp.uint8),
    )


@checked
def began(state: TrajectoryState, number: Array, lane: Array) -> Array:
    """When trajectories began, uint32, by their numbers and lanes."""
    return _word(state, number, lane, _BEGAN)


@checked
def latest_row(state: TrajectoryState, number: Array, lane: Array) -> Array:
    """When the latest rows of trajectories were written, uint32, by their numbers and lanes."""
    return _word(state, number, lane, _LAST)


@checked
def end_of(state: TrajectoryState, number: Array, lane: Array) -> Array:
    """How trajectories ended, uint8, by their numbers and lanes."""
    return _word(state, number, lane, _KIND).astype(jnp.uint8)


def _word(state: TrajectoryState, number: Array, lane: Array, word: int) -> Array:
    """A word of spans; a slice of all spans would be a copy."""
    capacity = state.number.shape[0]
    return state.spans.at[divmod_unsigned(number, capacity)[1], lane, word].get(mode="promise_in_bounds")


@checked
def time_of(ring: RingState, row: Array, capacity: int) -> Array:
    """The time at which a row was written."""
    return ring.written[0] - 1 - _age(ring, row, capacity).astype(jnp.uint32)


@checked
def stored_before(ring: RingState, row: Array, capacity: int) -> Array:
    """How many stored rows are older than a row."""
    return ring.size - 1 - _age(ring, row, capacity)


def _age(ring: RingState, row: Array, capacity: int) -> Array:
    """How many rows were written after this one."""
    return jnp.where(row < ring.cursor, ring.cursor - 1 - row, ring.cursor - 1 - row + capacity)


def _modulus(capacity: int) -> int:
    """The modulus of trajectory numbers: a multiple of the capacity, so that stored ones do not share entries."""
    return capacity * ((2**31 - 1) // capacity)


@checked
def cell(table: Array, row: Array, lane: Array) -> Array:
    """One entry of a table [capacity, lanes], as a slice."""
    at = row.astype(jnp.uint32), lane.astype(jnp.uint32)
    return jax.lax.dynamic_slice(table, at, (1, 1)).reshape(())


def _span(state: TrajectoryState, at: Array, lane: Array) -> Array:
    """One span, [3], as a slice."""
    return jax.lax.dynamic_slice(
        state.spans, (at.astype(jnp.uint32), lane.astype(jnp.uint32), jnp.uint32(0)), (1, 1, 3)
    )[0, 0]


def _set(table: Array, value: Array, *place: Array) -> Array:
    """The table with a value, or some in the last dim, from a place on, as a slice."""
    value = value.astype(table.dtype).reshape((1,) * (table.ndim - value.ndim) + value.shape)
    return jax.lax.dynamic_update_slice(table, value, [each.astype(jnp.uint32) for each in place])


def _put(table: Array, entry: tuple[Array, Array], values: Array) -> Array:
    """The table with values at entries; equal entries have equal values."""
    if values.size == 1:
        entry, values = two_or_more((entry, values))
    return table.at[entry].set(values, mode="promise_in_bounds")
