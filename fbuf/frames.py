"""Observations whose frames are stored once. Reads rebuild stacks and next observations."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from fbuf import checks, storage, trajectories
from fbuf.fusion import computed_once, two_or_more
from fbuf.keywords import checked
from fbuf.paths import KeyPath, path_of, required_leaf
from fbuf.priority_tree import LARGEST
from fbuf.samplers.protocol import Draw
from fbuf.samplers.slices import Written
from fbuf.short_text import ShortText
from fbuf.trajectories import TrajectoryState
from fbuf.writers import RingState, backward, wrapped

_FOLLOWS, _LOST = -1, -2  # in place of a final: the next frame is in the ring; it is not stored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class FrameState(ShortText):
    """The frames of one pair of observations; lanes are folded into one dim.

    The table has four parts: a ring of capacity + stack rows, with the newest frame of each item and, behind the last row,
    its next frame; the finals, which are next frames that the following item does not have; one frame for writes that do
    not count; and one of zeros.

    Attributes:
        table: [(capacity + stack) * lanes + finals + 2, *frame].
        cursor: [] int32: the row of the ring behind the last one.
        owner: [finals + 1] int32: the slot of the item of each final.
        free: [] int32: the final that is written next.
        final: [capacity, lanes] int32: the final of each item, or _FOLLOWS, or _LOST.
        unlike: [] uint32: how many written items had observations that the rule does not make of their frames.

    Attributes:
        table: TODO.
        cursor: TODO.
        owner: TODO.
        free: TODO.
        final: TODO.
        unlike: TODO.
    """

    table: Array
    cursor: Array
    owner: Array
    free: Array
    final: Array
    unlike: Array


@checked
@dataclasses.dataclass(frozen=True)
class Frames:
    """Two leaves of an item, an observation and the next one, whose stacked frames are each stored once.

    The buffer stores the newest frame of `obs`, and that of `next_obs` for items at the end of trajectories. Reads take
    the other frames from neighbouring rows of the trajectory.

    Args:
        obs: path of the leaf, as in `Trajectories`: its newest frame is the last along `axis`.
        next_obs: path of the leaf with the observation after the step, of the same shape and dtype.
        stack: frames in an observation; with 1 it is one frame, and has no axis of frames.
        axis: of the stack, in one observation; frames of several entries along it are concatenated.
        padding: the frames before the first one of a trajectory: "first" for that frame again, "zero" for zeros.
        finals: for how many ends the next frame is kept; an eighth of the items by default, at least 8.

    Reads return the written bits. If they cannot, `draw.valid` is False, or with `Slices` `draw.mask` from that step on;
    the observations are zeros, and `Buffer.intact` is False. That happens to

    - an item that ended a trajectory, after `finals` later ones have ended; with as many finals as items, never. An item
      whose next observation is not the observation of the following item counts as an end here.
    - an item whose stacks are not those that the rule makes of the frames of its trajectory: one of the first `stack - 1`
      if a recording begins inside an episode, for example after `clear`. `FrameState.unlike` counts them.

    Reads and writes cost O(batch * stack) frames; a write reads the rows again to compare them.
    """

    obs: Any = "obs"
    next_obs: Any = "next_obs"
    stack: int = 4
    axis: int = -1
    padding: Literal["first", "zero"] = "first"
    finals: int | None = None

    def __post_init__(self) -> None:
        for name in ("obs", "next_obs"):
            object.__setattr__(self, name, path_of(name, getattr(self, name)))
        object.__setattr__(self, "stack", checks.as_int("stack", self.stack))
        object.__setattr__(self, "axis", checks.as_int("axis", self.axis, least=-(2**31)))
        if self.padding not in ("first", "zero"):
            raise ValueError(f"padding must be 'first' or 'zero', got {self.padding!r}")
        if self.finals is not None:
            object.__setattr__(self, "finals", checks.as_int("finals", self.finals))

    def init(self, capacity: int, lanes: int, obs: Any, next_obs: Any) -> FrameState:
        """An empty state for two leaves of an item. TypeError or ValueError for leaves that do not fit."""
        if (obs.shape, obs.dtype) != (next_obs.shape, next_obs.dtype):
            raise ValueError(
                f"obs={self.obs!r} is {obs.dtype}{list(obs.shape)}, next_obs={self.next_obs!r} is "
                f"{next_obs.dtype}{list(next_obs.shape)}: they need one shape and dtype"
            )
        if jnp.issubdtype(obs.dtype, jnp.complexfloating):
            raise TypeError(f"obs={self.obs!r} is {obs.dtype}: frames must be real numbers or bool")
        entries = self.entries(capacity * lanes)
        frames = (capacity + self.stack) * lanes + entries + 2
        if frames > LARGEST:
            raise ValueError(f"at most {LARGEST} frames, got {frames} of {capacity * lanes} items and {entries} finals")
        return FrameState(
            table=jnp.zeros((frames, *self._frame_shape(obs.shape)), obs.dtype),
            cursor=jnp.zeros((), jnp.int32),
            owner=jnp.full(entries + 1, -1, jnp.int32),
            free=jnp.zeros((), jnp.int32),
            final=jnp.full((capacity, lanes), _LOST, jnp.int32),
            unlike=jnp.zeros((), jnp.uint32),
        )

    def entries(self, items: int) -> int:
        """For how many ends the next frame is kept."""
        return min(max(items // 8, 8), items) if self.finals is None else self.finals

    def _frame_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.stack == 1:
            return shape
        if not -len(shape) <= self.axis < len(shape) or shape[self.axis] % self.stack or not shape[self.axis]:
            raise ValueError(
                f"obs={self.obs!r} has shape {list(shape)}: axis={self.axis} of it must be the {self.stack} frames of the "
                "stack"
            )
        axis = self.axis % len(shape)
        return (*shape[:axis], shape[axis] // self.stack, *shape[axis + 1 :])

    def leaf(self, state: FrameState) -> jax.ShapeDtypeStruct:
        """Shape and dtype of an observation."""
        shape = list(state.table.shape[1:])
        if self.stack > 1:
            shape[self.axis] *= self.stack
        return jax.ShapeDtypeStruct(tuple(shape), state.table.dtype)

    def frames(self, obs: Array, dims: int) -> Array:
        """The frames [..., stack, *frame] of observations with `dims` leading dims."""
        if self.stack == 1:
            return jnp.expand_dims(obs, dims)
        axis = self.axis % (obs.ndim - dims) + dims
        apart = obs.reshape(*obs.shape[:axis], self.stack, -1, *obs.shape[axis + 1 :])
        return jnp.moveaxis(apart, axis, dims)

    def stacked(self, frames: Array, dims: int) -> Array:
        """The inverse of `frames`."""
        if self.stack == 1:
            return jnp.squeeze(frames, dims)
        axis = self.axis % (frames.ndim - 1 - dims) + dims
        apart = jnp.moveaxis(frames, dims, axis)
        return apart.reshape(*apart.shape[:axis], -1, *apart.shape[axis + 2 :])


def init(rules: tuple[Frames, ...], capacity: int, lanes: int, item: Any) -> tuple[Any, tuple[FrameState, ...]]:
    """An item without the observations of the rules, and empty states. TypeError or ValueError if it has none."""
    rest, pairs = _apart(rules, item)
    return rest, tuple(rule.init(capacity, lanes, *pair) for rule, pair in zip(rules, pairs, strict=True))


def belong(rules: tuple[Frames, ...], states: tuple[FrameState, ...], capacity: int, lanes: int) -> None:
    """ValueError for states that were not made for these rules."""
    made = [(state.final.shape, state.owner.size, state.table.shape[0]) for state in states]
    entries = [rule.entries(capacity * lanes) for rule in rules]
    sizes = [(capacity + rule.stack) * lanes + count + 2 for rule, count in zip(rules, entries, strict=True)]
    if made != [((capacity, lanes), count + 1, size) for count, size in zip(entries, sizes, strict=True)]:
        raise ValueError("the state was made by a buffer with other frames")


def whole(rules: tuple[Frames, ...], states: tuple[FrameState, ...], rest: Any, lead: tuple[int, ...]) -> Any:
    """The stored items, with shape and dtype, [*lead, ...], in place of the observations."""
    wide = []
    for rule, state in zip(rules, states, strict=True):
        leaf = rule.leaf(state)
        wide.append(jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype))
    return _together(rules, rest, [(leaf, leaf) for leaf in wide])


def write(
    rules: tuple[Frames, ...], states: tuple[FrameState, ...], batch: Any, write: Written | None
) -> tuple[Any, tuple[FrameState, ...]]:
    """The batch without observations, and the states after the write; `write` is None without rows. O(rows * stack)."""
    rest, pairs = _apart(rules, batch)
    if write is not None:
        each = zip(rules, states, pairs, strict=True)
        states = tuple(_written(rule, state, *pair, write) for rule, state, pair in each)
    return rest, states


def read(
    rules: tuple[Frames, ...],
    states: tuple[FrameState, ...],
    rest: Any,
    index: TrajectoryState,
    ring: RingState,
    slots: Int[Array, "*shape"],
) -> Any:
    """The items at slots in range, with their observations. O(slots * stack)."""
    each = zip(rules, states, strict=True)
    slots = slots.astype(jnp.int32)
    return _together(rules, rest, [_read(rule, state, index, ring, slots) for rule, state in each])


def intact(states: tuple[FrameState, ...], slots: Int[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether reads of the items at slots in range return the written bits; otherwise they return zeros."""
    slots, found = slots.astype(jnp.int32), jnp.ones(slots.shape, jnp.bool_)
    for state in states:
        found &= _is_intact(state, slots, _final(state, slots))
    return found


def without(draw: Draw, lost: Bool[Array, "*shape"], burn_in: int) -> Draw:
    """The draw with lost items masked. A slice ends before the first of them."""
    if draw.mask is None:
        return dataclasses.replace(draw, valid=draw.valid & ~lost)
    mask = (draw.mask & ~lost).astype(jnp.int8)
    ahead = jax.lax.cummin(mask[:, burn_in:], axis=1)
    behind = jax.lax.cummin(jnp.concatenate([mask[:, :burn_in], ahead[:, :1]], 1), axis=1, reverse=True)
    mask = jnp.concatenate([behind[:, :burn_in], ahead], 1).astype(jnp.bool_)
    return dataclasses.replace(draw, valid=draw.valid & mask[:, burn_in], mask=mask)


def clear(states: tuple[FrameState, ...]) -> tuple[FrameState, ...]:
    """States of the same size without items."""
    return tuple(dataclasses.replace(state, unlike=jnp.zeros_like(state.unlike)) for state in states)


def resized(
    rules: tuple[Frames, ...], states: tuple[FrameState, ...], slots: np.ndarray, capacity: int
) -> tuple[FrameState, ...]:
    """States of a ring of `capacity` rows, of which the first are those of `slots` [rows, lanes], the newest ones in order.

    On the host: not inside jit. O(capacity) frames.
    """
    return tuple(_resized(rule, state, slots, capacity) for rule, state in zip(rules, states, strict=True))


def _resized(rule: Frames, state: FrameState, slots: np.ndarray, capacity: int) -> FrameState:
    (old, lanes), lane = state.final.shape, np.arange(state.final.shape[1])
    size, room = capacity + rule.stack, rule.entries(capacity * lanes)
    # The frames of a row and the next frame of the newest one, by age from -1 on; and of rows before the oldest one.
    ages = np.arange(-1, min(len(slots) + rule.stack - 2, old + rule.stack - 2) + 1)[:, None]
    source = np.full(size * lanes + room + 2, state.table.shape[0] - 1)  # the frame of zeros
    source[(-1 - ages) % size * lanes + lane] = (int(state.cursor) - 1 - ages) % (old + rule.stack) * lanes + lane

    owner, before = np.asarray(state.owner)[:-1], np.asarray(state.final).reshape(-1)
    finals = (int(state.free) + np.arange(owner.size)) % owner.size  # those taken first come first
    moved = np.full(before.size, -1)
    moved[slots.reshape(-1)] = np.arange(slots.size)
    used = (owner[finals] >= 0) & (before[owner[finals]] == finals) & (moved[owner[finals]] >= 0)
    finals = finals[used][-room:]
    source[size * lanes + np.arange(finals.size)] = (old + rule.stack) * lanes + finals
    numbered = np.full(owner.size + 1, _LOST)  # the new number of a final
    numbered[finals] = np.arange(finals.size)
    final = before[slots]
    after = np.full((capacity, lanes), _LOST, np.int32)
    after[: len(slots)] = np.where(final >= 0, numbered[np.maximum(final, 0)], final)
    owners = np.full(room + 1, -1, np.int32)
    owners[: finals.size] = moved[owner[finals]]
    return dataclasses.replace(
        state,
        table=state.table[source],
        cursor=jnp.zeros((), jnp.int32),
        owner=jnp.array(owners),
        free=jnp.asarray(finals.size % room, jnp.int32),
        final=jnp.array(after),
    )


def _written(rule: Frames, state: FrameState, obs: Array, next_obs: Array, write: Written) -> FrameState:
    """The state after rows of observations [n, *lanes, ...] were written, n at least 1."""
    capacity, lanes = state.final.shape
    size, spare = capacity + rule.stack, state.owner.size - 1
    kept, stored = min(write.count, capacity), min(write.count, size - 1)
    obs, next_obs = (jnp.asarray(leaf).reshape(-1, lanes, *rule.leaf(state).shape) for leaf in (obs, next_obs))
    newest, following = (rule.frames(leaf, 2)[:, :, -1] for leaf in (obs, next_obs))
    lane = jnp.arange(lanes, dtype=jnp.int32)[None]

    seen = min(kept + 1, capacity)  # the kept rows, and the previous row if it stays
    rows = _moved(write.ring.cursor, capacity - seen + jnp.arange(seen, dtype=jnp.uint32), capacity)
    number = write.after.number.at[rows].get(mode="promise_in_bounds")
    base = _moved(state.cursor, jnp.uint32((write.count - stored) % size), size)
    held = state.final.at[rows[:1]].get(mode="promise_in_bounds")
    last = following[write.count - kept :]
    if seen > kept:
        promised = state.table.at[state.cursor * lanes + lane[0]].get(mode="promise_in_bounds")
        base, promised, held = computed_once((base, promised, held))  # read before they are overwritten
        last = jnp.concatenate([promised[None], last])
    leaves = jnp.concatenate([number[1:] != number[:-1], ~write.after.is_open[None]])
    kind = trajectories.end_of(write.after, number, lane)
    # Rows whose next frame is not that of the following row, which may be known only when that row is written.
    ends = leaves.at[:-1].set(leaves[:-1] | ~_equal(last[:-1], newest[write.count - seen + 1 :], 2))
    if seen > kept:
        ends = ends.at[0].set(ends[0] & write.before.is_open)

    final, free = _claimed(state, ends, leaves & (kind != trajectories.CUT))
    into, cursor = _moved(base, jnp.arange(stored, dtype=jnp.uint32), size), _moved(base, jnp.uint32(stored), size)
    slots = rows[:, None] * lanes + lane
    table = _put(state.table, into[:, None] * lanes + lane, newest[write.count - stored :])
    table = _put(table, cursor[None, None] * lanes + lane, following[-1:])
    state = dataclasses.replace(
        state,
        table=_put(table, size * lanes + final, last),
        cursor=cursor,
        owner=_put(state.owner, final, jnp.where(final < spare, slots, -1)),
        free=free,
    )

    final = jnp.where(ends, jnp.where(final < spare, final, _LOST), _FOLLOWS)
    before, final = final[: seen - kept], final[seen - kept :]
    places = _places(rule, state, write.after, write.ring, slots[seen - kept :], final)
    like = _are_frames(rule, state, obs, places[..., :-1]) & _are_frames(rule, state, next_obs, places[..., 1:])
    before = jnp.where(ends[: seen - kept] & (held == _FOLLOWS), before, held[: seen - kept])
    settled = jnp.concatenate([before, jnp.where(like, final, _LOST)])
    unlike = state.unlike + jnp.sum(~like, dtype=jnp.uint32)
    return dataclasses.replace(state, final=storage.write(state.final, rows, settled), unlike=unlike)


@functools.partial(jax.jit, static_argnums=0)
def _read(
    rule: Frames, state: FrameState, index: TrajectoryState, ring: RingState, slots: Int[Array, "*shape"]
) -> tuple[Array, Array]:
    """The two observations of the items at slots; zeros if they are not intact."""
    final = _final(state, slots)
    places = _places(rule, state, index, ring, slots, final)
    places = computed_once(jnp.where(_is_intact(state, slots, final)[..., None], places, state.table.shape[0] - 1))
    return _taken(rule, state, places[..., :-1]), _taken(rule, state, places[..., 1:])


def _places(
    rule: Frames, state: FrameState, index: TrajectoryState, ring: RingState, slots: Array, final: Array
) -> Int[Array, "*shape frames"]:
    """The places in the table of the frames of items, the oldest first, and of their next frame."""
    (capacity, lanes), stack = state.final.shape, rule.stack
    size, zeros = capacity + stack, state.table.shape[0] - 1
    row, lane = slots // lanes, (slots % lanes)[..., None]
    age = (ring.written[0] - 1 - trajectories.time_of(ring, row, capacity)).astype(jnp.int32)[..., None]
    step = jnp.clip(trajectories.place(index, ring, slots).step, 0, stack)[..., None]
    back = jnp.arange(stack - 1, -1, -1, dtype=jnp.int32).reshape(*(1 for _ in slots.shape), stack)
    at = backward(state.cursor, 1 + age + jnp.minimum(back, step), size) * lanes + lane
    if rule.padding == "zero":
        at = jnp.where(back <= step, at, zeros)
    following = backward(state.cursor, age, size) * lanes + lane
    return jnp.concatenate([at, jnp.where(final[..., None] >= 0, size * lanes + final[..., None], following)], -1)


def _are_frames(rule: Frames, state: FrameState, obs: Array, places: Int[Array, "rows lanes stack"]) -> Array:
    """Which of the last observations equal the frames in the table. The newest frame is not compared."""
    older = rule.frames(obs[obs.shape[0] - places.shape[0] :], 2)[:, :, :-1]
    return _equal(state.table.at[places[..., :-1]].get(mode="promise_in_bounds"), older, 2)


def _taken(rule: Frames, state: FrameState, places: Int[Array, "*shape stack"]) -> Array:
    """Observations of frames in the table."""
    return rule.stacked(state.table.at[places].get(mode="promise_in_bounds"), places.ndim - 1)


def _final(state: FrameState, slots: Array) -> Array:
    lanes = state.final.shape[1]
    return state.final.at[slots // lanes, slots % lanes].get(mode="promise_in_bounds")


def _is_intact(state: FrameState, slots: Array, final: Array) -> Array:
    owner = state.owner.at[jnp.maximum(final, 0)].get(mode="promise_in_bounds")
    return (final != _LOST) & ((final < 0) | (owner == slots))


def _claimed(
    state: FrameState, ends: Bool[Array, "rows lanes"], at_once: Bool[Array, "rows lanes"]
) -> tuple[Int[Array, "rows lanes"], Int[Array, ""]]:
    """A final for each row that is an end, the spare one for other rows; and the next free final.

    Finals are taken in the order in which ends are known: with the row, or with the next one. If there are too few, the
    last ends get one.
    """
    room = state.owner.size - 1
    turns = jnp.stack([ends & at_once, ends & ~at_once], 1)
    order = jnp.cumsum(turns.reshape(-1), dtype=jnp.int32).reshape(turns.shape)  # from 1 on
    total, order = order[-1, -1, -1], jnp.where(at_once, order[:, 0], order[:, 1])
    final = _moved(state.free, ((order - 1) % room).astype(jnp.uint32), room)
    free = _moved(state.free, (total % room).astype(jnp.uint32), room)
    return jnp.where(ends & (order > total - room), final, room), free


def _put(table: Array, entry: Int[Array, "rows lanes"], values: Array) -> Array:
    """The table with values at entries. Values at repeated entries do not count."""
    at, values = two_or_more((entry.reshape(-1), values.reshape(entry.size, *values.shape[2:])))
    return table.at[at].set(values, mode="promise_in_bounds")


def _equal(left: Array, right: Array, dims: int) -> Array:
    """Which entries of the leading dims have the same bits."""
    if left.dtype == jnp.bool_:
        left, right = left.astype(jnp.uint8), right.astype(jnp.uint8)
    bits = (jnp.finfo if jnp.issubdtype(left.dtype, jnp.floating) else jnp.iinfo)(left.dtype).bits
    left, right = (jax.lax.bitcast_convert_type(each, f"uint{bits}") for each in (left, right))
    return jnp.max(left ^ right, axis=tuple(range(dims, left.ndim)), initial=0) == 0


def _moved(row: Array, steps: Array, size: int) -> Array:
    """Rows at most `size` steps on, around the ring. No sum overflows."""
    return wrapped(row.astype(jnp.uint32) + steps, size)


# ---------------------------------------------------------------------- leaves of items


def _apart(rules: tuple[Frames, ...], item: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """An item or batch with None in place of observations, and these, two for each rule. ValueError if one is missing."""
    if not rules:
        return item, []
    leaves, structure = jax.tree.flatten(item)
    pairs = []
    for places in _leaves(rules, structure):
        pairs.append((leaves[places[0]], leaves[places[1]]))
        leaves[places[0]] = leaves[places[1]] = None
    return jax.tree.unflatten(structure, leaves), pairs


def _together(rules: tuple[Frames, ...], rest: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """The inverse of `_apart`."""
    if not rules:
        return rest
    leaves, structure = jax.tree.flatten(rest, is_leaf=lambda leaf: leaf is None)
    for places, pair in zip(_leaves(rules, structure), pairs, strict=True):
        leaves[places[0]], leaves[places[1]] = pair
    return jax.tree.unflatten(structure, leaves)


def _leaves(rules: tuple[Frames, ...], structure: Any) -> list[tuple[int, int]]:
    """The numbers of the leaves of each rule, two each."""
    numbered: Any = jax.tree.unflatten(structure, range(structure.num_leaves))
    found = [(_leaf(numbered, "obs", rule.obs), _leaf(numbered, "next_obs", rule.next_obs)) for rule in rules]
    if len({place for pair in found for place in pair}) < 2 * len(found):
        raise ValueError(f"frames name a leaf twice: {rules}")
    return found


def _leaf(numbered: Any, name: str, path: KeyPath) -> int:
    place = required_leaf(name, numbered, path)
    if type(place) is not int:
        raise ValueError(f"{name}={path!r}: an item has no single array there")
    return place
