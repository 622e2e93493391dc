"""A replay buffer: storage, writer and sampler joined by slots."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, PyTree

from fbuf import checks, frames, memory_plan, row_masks, storage, trajectories
from fbuf.frames import Frames, FrameState
from fbuf.fusion import computed_once
from fbuf.keywords import checked
from fbuf.priority_tree import LARGEST
from fbuf.samplers import Draw, Sampler, Slices, Uniform, slices
from fbuf.samplers.chances import Chances, says_its_chances
from fbuf.samplers.slices import Written
from fbuf.short_text import ShortText, numbers
from fbuf.shown import Shown
from fbuf.timeline import TrajectoryTimeline
from fbuf.trajectories import Trajectories, TrajectoryPlace, TrajectoryState
from fbuf.writers import RingState, RoundRobin, Writer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class BufferState(ShortText):
    """All arrays of a buffer.

    Attributes:
        items: pytree of [capacity, *lanes, ...]; None in place of the observations of `frames`.
        ring: state of the writer: a `RingState`, with `HighestRanked` a `HighestRankedState`.
        sampler: state of the sampler.
        trajectories: index of the trajectories; None if the buffer has no `Trajectories`.
        frames: a state for each of the rules of `frames`.
    """

    items: Any
    ring: Any
    sampler: Any
    trajectories: TrajectoryState | None = None
    frames: tuple[FrameState, ...] = ()

    def __repr__(self) -> str:
        """How full it is, if that is known, and the shapes and dtypes of the arrays."""
        rows = [leaf.shape[0] for leaf in jax.tree.leaves(self.items) if getattr(leaf, "ndim", 0)]
        held = numbers(self.ring.counters if isinstance(self.ring, RingState) else getattr(self.ring, "size", None))
        if not rows or not held:
            return super().__repr__()
        stored = held[1] if len(held) == 4 else held[0]
        return super().__repr__().replace("(", f"({stored} of {rows[0]} rows, ", 1)


@checked
@dataclasses.dataclass(frozen=True)
class Buffer(Shown):
    """A ring of `capacity` rows. Every method is a pure function of its state, for use inside `jax.jit`.

    Args:
        capacity: rows.
        sampler: the rule that names the slots of batches.
        lanes: shape of the parallel environments in a row; () for single items.
        writer: the rule that names the rows of new items: the oldest, or those of lowest rank (`HighestRanked`).
        trajectories: the leaves that mark trajectories, for `frames` and `Slices`.
        frames: the observations whose frames are each stored once; a rule or a tuple of rules.
        batch_size: of `sample` without one. It is static, so `jax.pmap(buffer.sample)` needs no static arguments.

    With `lanes`, a row holds one item of each of several parallel environments: leaves are [capacity, *lanes, ...], and
    the slot of an item is row * prod(lanes) + lane. At most 2^31 - 9 items.
    Donate the state (`jax.jit(step, donate_argnums=0)`, or the carry of a `scan`) and it is written in place. The earlier
    state is then gone: JAX says "Array has been deleted" if it is used again.
    Equal arguments make equal buffers, so a jitted function with a static buffer is traced once.
    """

    capacity: int
    sampler: Sampler | Slices = Uniform()
    lanes: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    writer: Writer = dataclasses.field(default=RoundRobin(), kw_only=True)
    trajectories: Trajectories | None = dataclasses.field(default=None, kw_only=True)
    frames: tuple[Frames, ...] | Frames = dataclasses.field(default=(), kw_only=True)
    batch_size: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.lanes, tuple):
            raise TypeError(f"lanes must be a tuple of int, got {self.lanes!r}")
        object.__setattr__(self, "capacity", checks.as_int("capacity", self.capacity))
        object.__setattr__(self, "lanes", tuple(checks.as_int("lanes", lane) for lane in self.lanes))
        if self.items_per_row * self.capacity > LARGEST:
            raise ValueError(f"at most {LARGEST} items, got {self.capacity} rows of {self.items_per_row}")
        if self.trajectories is not None:
            checks.rule("trajectories", self.trajectories, Trajectories)
        if isinstance(self.sampler, Slices):
            self.sampler.check(self.capacity)
            self._require_trajectories("Slices")
        else:
            checks.rule("sampler", self.sampler, Sampler)
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", checks.as_int("batch_size", self.batch_size))
            if isinstance(self.sampler, Slices):
                self.sampler.check_batch_size(self.batch_size)
        checks.rule("writer", self.writer, Writer)
        self._check_writer()
        object.__setattr__(self, "frames", self._frames)
        for rule in self._frames:
            checks.rule("frames", rule, Frames)
            self._require_trajectories("frames")

    def _require_trajectories(self, what: str) -> None:
        if self.trajectories is None:
            raise ValueError(
                f"{what} need to know where trajectories end: build the buffer with trajectories=fbuf.Trajectories(...)"
            )

    def _check_writer(self) -> None:
        """ValueError for rules that need the order of writing, or lanes, with a writer that supports neither."""
        if not self.writer.keeps_order and (self.trajectories is not None or self.sampler.needs_order):
            what = f"{type(self.sampler).__name__} needs" if self.trajectories is None else "trajectories need"
            raise ValueError(f"{what} the order of writing in a ring, which {self.writer!r} does not keep")
        if self.lanes and not self.writer.takes_lanes:
            raise ValueError(f"{self.writer!r} ranks single items: it takes no lanes, got lanes={self.lanes}")

    @property
    def items_per_row(self) -> int:
        """Items in a row: one for each lane."""
        return math.prod(self.lanes)

    @property
    def _frames(self) -> tuple[Frames, ...]:
        return self.frames if isinstance(self.frames, tuple) else (self.frames,)

    def init(self, example: Any) -> BufferState:
        """An empty buffer for items like `example`: one item without lanes, arrays or `jax.ShapeDtypeStruct`.

        NumPy's 64-bit arrays become 32-bit items if JAX's 64-bit types are off. NotEnoughMemoryError if the buffer does not
        fit into free memory (see `plan`); not inside jit, which may ask only for shapes.
        """
        memory_plan.refuse_large(lambda: self._init(example), example, self.capacity * self.items_per_row)
        return self._init(example)

    def _init(self, example: Any) -> BufferState:
        item = checks.item_spec(example)
        known = None
        if self.trajectories is not None:
            known = self.trajectories.init(self.capacity, self.items_per_row, item)
        rest, kept = frames.init(self._frames, self.capacity, self.items_per_row, item)
        return BufferState(
            items=storage.init(self.capacity, self.lanes, rest),
            ring=self.writer.init(self.capacity, item),
            sampler=self.sampler.init(*self._sampled),
            trajectories=known,
            frames=kept,
        )

    def add(self, state: BufferState, item: Any) -> tuple[BufferState, Int[Array, "*lanes"]]:
        """Write one row of leaves [*lanes, ...]: one item, or one of each lane. As `extend` with one row. O(1)."""
        rows = jax.tree.map(_one_row, item)
        state, slots = self.extend(state, rows)
        return state, slots[0]

    def extend(
        self,
        state: BufferState,
        batch: PyTree,
        *,
        lanes_first: bool = False,
        mask: Bool[Array, " n"] | Bool[Array, "runs time"] | None = None,
    ) -> tuple[BufferState, Int[Array, "n *lanes"] | Int[Array, "*lanes n"] | Int[Array, "runs time"]]:
        """Write a batch of leaves [n, *lanes, ...] over the oldest rows. Returns the slots, -1 for items not stored.

        With `lanes_first` leaves are [*lanes, n, ...], and slots [*lanes, n]. The result is that of n writes of one row: of
        more than `capacity` rows the last stay. (Except for priorities with `new_items="highest_stored"`.) O(n).

        With `mask`, bool [n], only the rows where it is True are written, as if the batch had no others. Slots of the others
        are -1. Without `lanes` the mask may be [runs, time], and leaves [runs, time, ...]: padded rollouts, which are
        written one run behind the other. A trajectory does not go on from one run to the next, nor from earlier writes into
        the first. TypeError or ValueError, while tracing, for other masks. Inside `vmap` a masked write costs O(capacity).
        """
        self.check(state)
        at = len(self.lanes) if lanes_first else 0
        if mask is not None:
            return self._extend_masked(state, batch, checks.mask(mask), at)
        count = checks.batch_length(self._whole(state), batch, self.lanes, at)
        if not at:
            return self._extend(state, batch, count)
        state, slots = self._extend(state, jax.tree.map(lambda leaf: jnp.moveaxis(leaf, at, 0), batch), count)
        return state, jnp.moveaxis(slots, 0, at)

    def _extend_masked(self, state: BufferState, batch: PyTree, mask: Array, at: int) -> tuple[BufferState, Array]:
        shape, begins = mask.shape, None
        if mask.ndim == 2 and not self.lanes:
            batch = checks.runs_as_rows(batch, shape)
            if self.trajectories is not None:
                begins = row_masks.first_of_each_run(mask).reshape(-1)
        count = checks.batch_length(self._whole(state), batch, self.lanes, at)
        checks.mask_fits(shape, count, self.lanes)
        if at:
            batch = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, at, 0), batch)
        if not count:
            state, slots = self._extend(state, batch, 0)
        else:
            state, slots = self._write_masked(state, batch, mask.reshape(-1), begins)
        return state, jnp.moveaxis(slots, 0, at) if at else slots.reshape(*shape, *self.lanes)

    @functools.partial(jax.jit, static_argnums=0)
    def _write_masked(
        self, state: BufferState, batch: PyTree, mask: Bool[Array, " n"], begins: Bool[Array, " n"] | None
    ) -> tuple[BufferState, Array]:
        """The state after a write of the rows where the mask is True, and the slots of all rows: -1 for the others."""
        if self.trajectories is None and not self.sampler.needs_order:
            ring, rows = self.writer.claim_masked(state.ring, batch, mask, self.capacity)
            slots = jnp.where(row_masks.over(rows >= 0, 1 + len(self.lanes)), self.slots_of(rows), -1)
            if self.writer.keeps_order:  # of more rows than there are the last stay
                rows = jnp.where(row_masks.last_true(mask, self.capacity), rows, -1)
            return _store_some(self, state, ring, rows, batch), slots
        # Trajectories, frames, and samplers that need the order take a number of rows that is known while tracing. So the
        # rows are written in parts of such numbers: as many of each as the mask needs.
        count, written = mask.shape[0], row_masks.count(mask)
        order = row_masks.order(mask)
        first = jnp.zeros_like(written)
        # Of the varying type of the state on a mesh, and of the mask.
        slots = jnp.zeros((count, *self.lanes), jnp.int32) + (state.ring.cursor + written) * 0

        def write_part(size: int, _: Array, held: tuple[BufferState, Array, Array]) -> tuple[BufferState, Array, Array]:
            state, first, slots = held
            rows = jax.lax.dynamic_slice(order, (first,), (size,))
            part = jax.tree.map(lambda leaf: jnp.asarray(leaf).at[rows].get(mode="promise_in_bounds"), batch)
            begin = None if begins is None else begins.at[rows].get(mode="promise_in_bounds")
            state, taken = self._extend(state, part, size, begin)
            slots = jax.lax.dynamic_update_slice(slots, taken, (first, *(jnp.zeros_like(first) for _ in self.lanes)))
            return state, first + size, slots

        for size in row_masks.part_sizes(count):
            parts = (written - first) // size
            state, first, slots = jax.lax.fori_loop(
                jnp.zeros_like(parts), parts, functools.partial(write_part, size), (state, first, slots)
            )
        return state, row_masks.spread(slots, mask)

    def _extend(
        self, state: BufferState, batch: PyTree, count: int, begins: Array | None = None
    ) -> tuple[BufferState, Array]:
        """Write rows; a trajectory begins with those where `begins` is True, too."""
        ring, rows = self.writer.claim(state.ring, batch, count, self.capacity)
        if not self.writer.keeps_order:
            return _store_some(self, state, ring, rows, batch), self.slots_of(rows)
        kept = min(count, self.capacity)  # a static cut: no row is written twice
        slots = self.slots_of(rows)
        index, write = state.trajectories, None
        if self.trajectories is not None and index is not None and count:
            marks, ids = self.trajectories.marks(batch, self.lanes)
            if begins is not None:
                marks = trajectories.beginning(marks, begins[:, None])
            write = slices.write(self.sampler, state.sampler, index, state.ring, ring, marks, ids)
        rest, stored = frames.write(self._frames, state.frames, batch, write)
        return BufferState(
            items=storage.write_around(
                state.items,
                state.ring.cursor if kept == count else rows[count - kept],
                jax.tree.map(lambda leaf: leaf[count - kept :], rest),
            ),
            ring=ring,
            sampler=self._sampler_written(state, slots, write),
            trajectories=index if write is None else write.after,
            frames=stored,
        ), slots

    def _sampler_written(self, state: BufferState, slots: Array, write: Written | None) -> Any:
        """The sampler's state after a write; `write` is None without rows or without trajectories."""
        latest = slots[-self.capacity :].reshape(-1)
        if not isinstance(self.sampler, Slices):
            return self.sampler.written(state.sampler, slots.reshape(-1) if self.sampler.needs_order else latest)
        return state.sampler if write is None else self.sampler.written(state.sampler, latest, write)

    def sample(self, state: BufferState, key: Array, batch_size: int | None = None) -> tuple[BufferState, Any, Draw]:
        """A copy of `batch_size` items with leaves [batch_size, ...], and their draw. By default that of the buffer.

        With `Slices` leaves are [slices, time, ...]. If nothing can be drawn, `draw.valid` is False and the items mean
        nothing. `key` may be typed or raw. O(batch); but a program that returns the state without donating it copies all
        items.
        """
        self.check(state)
        checks.random_key(key)
        batch_size = checks.batch_size(batch_size, self.batch_size)
        size = state.ring.size * self.items_per_row  # not self.size, which would wait for it
        if isinstance(self.sampler, Slices):
            assert state.trajectories is not None
            index, ring = state.trajectories, state.ring
            sampler, draw = self.sampler.sample(state.sampler, key, batch_size, size, index, ring)
        else:
            sampler, draw = self.sampler.sample(state.sampler, key, batch_size, size)
        if self._frames:
            burn_in = self.sampler.burn_in if isinstance(self.sampler, Slices) else 0
            draw = frames.without(draw, ~frames.intact(state.frames, draw.slots), burn_in)
        return dataclasses.replace(state, sampler=sampler), self._read(state, draw.slots), draw

    def update(
        self, state: BufferState, slots: Int[Array, "*batch"], priorities: Float[Array, "*batch"]
    ) -> BufferState:
        """Give items new priorities: one for each slot, or one for all. The sampler refuses bad ones."""
        self.check(state)
        slots = checks.slots(slots)
        priorities = checks.priorities(priorities, slots.shape)
        flat = jnp.broadcast_to(priorities, slots.shape).reshape(-1)
        return dataclasses.replace(state, sampler=self.sampler.update(state.sampler, slots.reshape(-1), flat))

    def read(self, state: BufferState, slots: Int[Array, " batch"]) -> Any:
        """A copy of the items at slots in range. O(batch). Observations that `frames` cannot rebuild are zeros."""
        self.check(state)
        return self._read(state, checks.slots(slots))

    def _read(self, state: BufferState, slots: Array) -> Any:
        items = storage.read(state.items, slots, self.lanes)
        if not self._frames:
            return items
        assert state.trajectories is not None
        return frames.read(self._frames, state.frames, items, state.trajectories, state.ring, slots)

    def intact(self, state: BufferState, slots: Int[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """Whether reads of the items at slots in range return the written bits; False only with `frames`."""
        self.check(state)
        return frames.intact(state.frames, checks.slots(slots))

    def place(self, state: BufferState, slots: Int[Array, "*shape"]) -> TrajectoryPlace:
        """Positions in their trajectories of the items at slots in use. O(slots)."""
        self.check(state)
        if state.trajectories is None:
            raise ValueError("this buffer has no trajectories: build it with trajectories=fbuf.Trajectories(...)")
        return trajectories.place(state.trajectories, state.ring, checks.slots(slots))

    def chances(self, state: BufferState) -> Chances:
        """The law of the next draw, over all slots, with the reason where a slot cannot be drawn.

        On the host, in NumPy: not inside jit. It waits for the state. O(slots), of `Slices` times burn_in + length.
        """
        checks.on_host("chances", state)
        self.check(state)
        slots = self.capacity * self.items_per_row
        intact = None
        if self._frames:
            intact = np.asarray(frames.intact(state.frames, jnp.arange(slots, dtype=jnp.int32)))
        if isinstance(self.sampler, Slices):
            assert state.trajectories is not None
            line = TrajectoryTimeline.of_index(state.ring, state.trajectories)
            return self.sampler.chances(state.sampler, line, intact)
        size = int(state.ring.size) * self.items_per_row
        if says_its_chances(self.sampler):
            found = self.sampler.chances(state.sampler, size)
        else:
            found = Chances.unknown(size)
        found = found.over(slots)
        return found if intact is None else found.without(~intact)

    def slots_of(self, rows: Int[Array, " n"]) -> Int[Array, "n *lanes"]:
        """The slots of the items in rows."""
        lane = jnp.arange(self.items_per_row, dtype=jnp.int32).reshape(1, *self.lanes)
        return row_masks.over(rows, 1 + len(self.lanes)) * self.items_per_row + lane

    def size(self, state: BufferState) -> Int[Array | np.generic, ""]:
        """Items stored, over all lanes: an int32, inside jit an array, else a NumPy scalar, for which it waits."""
        ring = state.ring
        if isinstance(ring, RingState) and _is_here(ring.counters):
            try:
                counters = np.asarray(ring.counters)  # no program is dispatched
            except RuntimeError:
                checks.in_memory(ring.counters)
                raise
            return np.int32(counters[1] * self.items_per_row)
        return ring.size * self.items_per_row

    def clear(self, state: BufferState) -> BufferState:
        """The buffer without items; their memory is kept."""
        self.check(state)
        known = state.trajectories
        return BufferState(
            items=state.items,
            ring=self.writer.clear(state.ring, self.capacity),
            sampler=self.sampler.clear(state.sampler),
            trajectories=None if known is None else trajectories.clear(known),
            frames=frames.clear(state.frames),
        )

    def _whole(self, state: BufferState) -> Any:
        """The items with the shapes and dtypes of the leaves of a batch."""
        return frames.whole(self._frames, state.frames, state.items, (self.capacity, *self.lanes))

    @property
    def _sampled(self) -> tuple[int, ...]:
        """The arguments of the sampler's `init`: items, or rows and the items in each."""
        if isinstance(self.sampler, Slices):
            return self.capacity, self.items_per_row
        return (self.capacity * self.items_per_row,)

    def check(self, state: BufferState) -> None:
        """ValueError for the state of another buffer, RuntimeError for one that was donated, TypeError for anything else.

        No cost inside jit.
        """
        given: object = state
        if not isinstance(given, BufferState):
            more = ": a call returns more than the state, state, slots = buffer.extend(state, batch)"
            raise TypeError(
                f"the first argument is the BufferState that init() returned, got {type(given).__name__}"
                f"{more if isinstance(given, tuple) else ''}"
            )
        checks.in_memory(state.ring.counters if isinstance(state.ring, RingState) else state.ring.size)
        checks.belongs(state.items, state.sampler, (self.capacity, *self.lanes), self.sampler, *self._sampled)
        if isinstance(state.ring, RingState) != self.writer.keeps_order:
            raise ValueError("the state was made by a buffer with another writer")
        if (state.trajectories is None) != (self.trajectories is None):
            raise ValueError("the state was made by a buffer with other trajectories")
        frames.belong(self._frames, state.frames, self.capacity, self.items_per_row)


def _one_row(leaf: object) -> Array | np.ndarray:
    """A leaf of one item as a batch of one row."""
    if isinstance(leaf, jax.Array):
        return leaf[None]
    checks.refuse_tensor("the item", leaf)
    return np.asarray(leaf)[None]


def _is_here(counters: object) -> bool:
    """Whether the counters of one ring have values that this process can read."""
    if isinstance(counters, np.ndarray):
        return counters.ndim == 1
    if isinstance(counters, jax.core.Tracer):
        return False
    # isinstance(counters, jax.Array) would take longer than all that is asked here
    return getattr(counters, "is_fully_addressable", False) and counters.ndim == 1  # type: ignore[attr-defined]


@functools.partial(jax.jit, static_argnums=0)
def _store_some(buffer: Buffer, state: BufferState, ring: Any, rows: Int[Array, " n"], batch: Any) -> BufferState:
    """The state after a write of the items whose row is not negative."""
    if rows.shape[0] == 0:
        return dataclasses.replace(state, ring=ring)
    kept = rows >= 0
    own = jnp.arange(rows.shape[0], dtype=jnp.int32)
    source = jnp.where(kept, own, jnp.argmax(kept).astype(jnp.int32))  # other items repeat one that is kept
    target = rows.at[source].get(mode="promise_in_bounds")
    source, target, some = computed_once((source, target, jnp.any(kept).astype(jnp.int32)))
    slots, sampler = buffer.slots_of(target).reshape(-1), buffer.sampler
    assert not isinstance(sampler, Slices)  # these need a ring

    def store(_: int, held: tuple[Any, Any]) -> tuple[Any, Any]:
        new = jax.tree.map(lambda leaf: jnp.asarray(leaf).at[source].get(mode="promise_in_bounds"), batch)
        return storage.write(held[0], target, new, repeating=True), sampler.written(held[1], slots)

    # One iteration or none: a condition would copy all items.
    items, after = jax.lax.fori_loop(0, some, store, (state.items, state.sampler))
    return dataclasses.replace(state, items=items, sampler=after, ring=ring)
