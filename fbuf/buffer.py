"""A replay buffer: storage, writer and sampler joined by slots."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from fbuf import checks, storage, trajectories
from fbuf.priority_tree import LARGEST
from fbuf.samplers import Draw, Sampler, Slices, Uniform
from fbuf.samplers.slices import Written
from fbuf.trajectories import Place, Trajectories, TrajectoryState
from fbuf.writers import RingState, RoundRobin


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BufferState:
    """All arrays of a buffer."""

    items: Any  # pytree of [capacity, *lanes, ...]
    ring: RingState
    sampler: Any
    trajectories: TrajectoryState | None = None


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A ring of `capacity` rows. Every method is a pure function of its state, for use inside `jax.jit`.

    Args:
        capacity: rows.
        sampler: the rule that names slots, an instance.
        lanes: shape of the parallel environments in a row; () for single items.
        writer: the rule that names the rows of new items.
        trajectories: where items say to which trajectory they belong, for samplers of several rows like `Slices`.

    With `lanes`, a row holds one item of each of several parallel environments: leaves are [capacity, *lanes, ...], and
    the slot of an item is row * prod(lanes) + lane, so samplers need not know. At most 2^31 - 9 items.
    Donate the state (`jax.jit(step, donate_argnums=0)`, or the carry of a `scan`) and it is written in place.
    Two buffers built alike are equal, so a jitted function that takes one as a static argument is traced once.
    """

    capacity: int
    sampler: Sampler | Slices = Uniform()
    lanes: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    writer: RoundRobin = dataclasses.field(default=RoundRobin(), kw_only=True)
    trajectories: Trajectories | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.lanes, tuple):
            raise TypeError(f"lanes must be a tuple of int, got {self.lanes!r}")
        object.__setattr__(self, "capacity", checks.whole("capacity", self.capacity))
        object.__setattr__(self, "lanes", tuple(checks.whole("lanes", lane) for lane in self.lanes))
        if self.items_per_row * self.capacity > LARGEST:
            raise ValueError(f"at most {LARGEST} items, got {self.capacity} rows of {self.items_per_row}")
        if self.trajectories is not None:
            checks.rule("trajectories", self.trajectories, Trajectories)
        if isinstance(self.sampler, Slices):
            self.sampler.check(self.capacity)
            if self.trajectories is None:
                raise ValueError(
                    "Slices need to know where trajectories end: build the buffer with trajectories=fbuf.Trajectories(...)"
                )
        else:
            checks.rule("sampler", self.sampler, Sampler)
        checks.rule("writer", self.writer, RoundRobin)

    @property
    def items_per_row(self) -> int:
        return math.prod(self.lanes)

    def init(self, example: Any) -> BufferState:
        """An empty buffer for items like `example`: one item without lanes, arrays or `jax.ShapeDtypeStruct`.

        NumPy's 64-bit arrays become 32-bit items where JAX's 64-bit types are off.
        """
        item = checks.item_spec(example)
        known = None
        if self.trajectories is not None:
            known = self.trajectories.init(self.capacity, self.items_per_row, item)
        return BufferState(
            items=storage.init(self.capacity, self.lanes, item),
            ring=self.writer.init(),
            sampler=self.sampler.init(*self._sampled),
            trajectories=known,
        )

    def extend(self, state: BufferState, batch: Any) -> tuple[BufferState, Int[Array, "n *lanes"]]:
        """Write a batch of leaves [n, *lanes, ...]; the oldest rows make place. Returns the slots taken.

        Any n gives what n writes of one row would: of more than `capacity` rows the last stay. (But for priorities under
        `new_items="highest_stored"`.) O(n).
        """
        self._check(state)
        count = checks.batch_length(state.items, batch, self.lanes)
        ring, rows = self.writer.claim(state.ring, count, self.capacity)
        kept = min(count, self.capacity)  # a static cut: no row is written twice
        slots = self._slots(rows)
        known = state.trajectories
        if self.trajectories is not None and known is not None and count:
            known = trajectories.written(known, state.ring, *self.trajectories.ends(batch, self.lanes))
        return BufferState(
            items=storage.write(
                state.items, rows[count - kept :], jax.tree.map(lambda leaf: leaf[count - kept :], batch)
            ),
            ring=ring,
            sampler=self._told(state, slots[count - kept :].reshape(-1), ring, known, count),
            trajectories=known,
        ), slots

    def _told(
        self, state: BufferState, slots: Array, ring: RingState, known: TrajectoryState | None, count: int
    ) -> Any:
        """The sampler's state after a write."""
        if not isinstance(self.sampler, Slices):
            return self.sampler.written(state.sampler, slots)
        assert state.trajectories is not None and known is not None
        write = Written(state.trajectories, state.ring, known, ring, count)
        return self.sampler.written(state.sampler, slots, write) if count else state.sampler

    def sample(self, state: BufferState, key: Array, batch_size: int) -> tuple[BufferState, Any, Draw]:
        """A copy of `batch_size` items with leaves [batch_size, ...], and how they were drawn.

        With `Slices` leaves are [slices, time, ...]. Where nothing can be drawn `draw.valid` is False and the items mean
        nothing. `key` may be typed or raw. O(batch) inside a program that keeps the state; one that returns it without
        having it donated copies all items.
        """
        self._check(state)
        batch_size = checks.whole("batch_size", batch_size)
        size = self.size(state)
        if isinstance(self.sampler, Slices):
            assert state.trajectories is not None
            index, ring = state.trajectories, state.ring
            sampler, draw = self.sampler.sample(state.sampler, key, batch_size, size, index, ring)
        else:
            sampler, draw = self.sampler.sample(state.sampler, key, batch_size, size)
        return dataclasses.replace(state, sampler=sampler), storage.read(state.items, draw.slots, self.lanes), draw

    def update(
        self, state: BufferState, slots: Int[Array, "*batch"], priorities: Float[Array, "*batch"]
    ) -> BufferState:
        """Give items new priorities: one for each slot, or one for all. The sampler says which are refused."""
        self._check(state)
        slots = checks.slots(slots)
        priorities = jnp.asarray(priorities)
        if not jnp.issubdtype(priorities.dtype, jnp.floating) and not jnp.issubdtype(priorities.dtype, jnp.integer):
            raise TypeError(f"priorities must be real numbers, got {priorities.dtype}")
        if priorities.shape not in ((), slots.shape):
            raise ValueError(f"priorities need the shape of slots, {slots.shape}, or (), got {priorities.shape}")
        flat = jnp.broadcast_to(priorities, slots.shape).reshape(-1)
        return dataclasses.replace(state, sampler=self.sampler.update(state.sampler, slots.reshape(-1), flat))

    def read(self, state: BufferState, slots: Int[Array, " batch"]) -> Any:
        """A copy of the items at slots, which must be in range. O(batch)."""
        self._check(state)
        return storage.read(state.items, checks.slots(slots), self.lanes)

    def place(self, state: BufferState, slots: Int[Array, "*shape"]) -> Place:
        """Where the items at slots, which must hold one, stand in their trajectories. O(slots)."""
        self._check(state)
        if state.trajectories is None:
            raise ValueError("this buffer knows no trajectories: build it with trajectories=fbuf.Trajectories(...)")
        return trajectories.place(state.trajectories, state.ring, checks.slots(slots))

    def size(self, state: BufferState) -> Int[Array, ""]:
        """Items stored, over all lanes."""
        return state.ring.size * self.items_per_row

    def clear(self, state: BufferState) -> BufferState:
        """The same buffer with nothing in it; the memory of items is kept."""
        self._check(state)
        known = state.trajectories
        return BufferState(
            items=state.items,
            ring=self.writer.init(),
            sampler=self.sampler.clear(state.sampler),
            trajectories=None if known is None else trajectories.clear(known),
        )

    @property
    def _sampled(self) -> tuple[int, ...]:
        """What the sampler is made for: items, or rows and the items in each."""
        if isinstance(self.sampler, Slices):
            return self.capacity, self.items_per_row
        return (self.capacity * self.items_per_row,)

    def _check(self, state: BufferState) -> None:
        """Raise for a state that another buffer made; while tracing, so at no cost to what runs."""
        checks.belongs(state.items, state.sampler, (self.capacity, *self.lanes), self.sampler, *self._sampled)
        if (state.trajectories is None) != (self.trajectories is None):
            raise ValueError("the state was made by a buffer with other trajectories")

    def _slots(self, rows: Int[Array, " n"]) -> Int[Array, "n *lanes"]:
        lane = jnp.arange(self.items_per_row, dtype=jnp.int32).reshape(1, *self.lanes)
        return rows.reshape(-1, *(1 for _ in self.lanes)) * self.items_per_row + lane
