"""A buffer whose rows are spread over the devices of a mesh axis."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from fbuf import checks
from fbuf.buffer import Buffer, BufferState
from fbuf.samplers import Draw, Prioritized, Slices, Uniform
from fbuf.sharded import exchange, laws
from fbuf.sharded.on_mesh import OnMesh


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A buffer of which each device of a mesh axis holds an equal part. For use inside `jax.shard_map`; see `over`.

    Args:
        buffer: the rules. Its capacity is that of all devices together.
        axis: name of the mesh axis.
        law: "global" draws what one buffer with the items of all devices draws with the same key (`Uniform` and
            `Prioritized`). "balanced" draws an equal share of the batch on each device, by any sampler, and corrects the
            probabilities, so that `importance_weights` are exact. Rows of a device that holds nothing are not valid.
        batches: "split": row k of a batch is on device k // (batch_size / devices). "replicated": every device
            has all rows. This holds for the batches of `sample` and `read` and for the slots of `update` and `read`.

    The state is a `BufferState` whose leaves have a leading dimension of devices: [1, ...] within `shard_map`, [devices,
    ...] outside, so `P(axis)` is the spec of all of it. Donated, it is written in place. Slots are numbered over all
    devices: device * items of a device + slot there. `check_vma` may be on or off; if it is on, replicated results have
    replicated types. To anneal alpha, map the rule over the devices of the state, inside `shard_map` or outside, with
    the same alpha for all: `dataclasses.replace(state, sampler=jax.vmap(rule.reweight, (0, None))(state.sampler, alpha))`.

    Global draws are those of one buffer with the items in the order of their slots. Draws by priority are equal bit for
    bit, and have the same slots, where a device has room for a power of 8 of items or sums of weights are exact;
    otherwise borders between items differ by a few 2^-24 of the total (float32). New items get the highest priority that
    was given on any device; with "balanced", on their own device. The weights of one device sum to at most 1e37
    (float32): items beyond are not drawn.

    Communication, for d devices, a batch of b rows, and w words of 32 bits in a row of the batch and the fields of the
    draw about it (each leaf rounded up to whole words):

        sample    one all-reduce of n * d words, n = 1 for global uniform draws, 3 for others (5 with float64); and of
                  b * w words one reduce-scatter (to "split" batches) or all-reduce (to "replicated" ones). Balanced
                  draws of "split" batches need only the first.
        update    one all-gather to 2 * b words (3 * b of float64), for "split" batches; one all-reduce of a word (2 of
                  float64), for global draws
        read      one all-gather to b words, for "split" batches; and b * w words as for `sample`
        size      one all-reduce of one word
        extend    none; nor do `init` and `clear`

    Every method raises ValueError, while it is traced, where the axis is not bound, where the devices do not divide the
    capacity or the batch, and, but for `size`, for a state of another buffer.
    """

    buffer: Buffer
    axis: str = "data"
    law: Literal["global", "balanced"] = "global"
    batches: Literal["split", "replicated"] = dataclasses.field(default="split", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.buffer, Buffer):
            raise TypeError(f"buffer must be an fbuf.Buffer, got {self.buffer!r}")
        if not isinstance(self.axis, str):
            raise TypeError(f"axis must be the name of one mesh axis, got {self.axis!r}")
        if self.law not in ("global", "balanced"):
            raise ValueError(f"law must be 'global' or 'balanced', got {self.law!r}")
        if self.batches not in ("split", "replicated"):
            raise ValueError(f"batches must be 'split' or 'replicated', got {self.batches!r}")
        sampler, only = self.buffer.sampler, self.law == "global"
        if only and not isinstance(sampler, Uniform | Prioritized):
            raise ValueError(f"law='global' draws by Uniform or Prioritized, got {sampler!r}: use law='balanced'")
        if only and isinstance(sampler, Prioritized) and sampler.new_items == "highest_stored":
            raise ValueError(
                "law='global' would have to look for the highest stored priority on all devices in each write, and writes "
                "are local: use new_items='highest_ever', or law='balanced'"
            )

    def over(self, mesh: jax.sharding.Mesh) -> OnMesh:
        """The same methods on global arrays, for eager calls and `jax.jit`. ValueError if the mesh lacks the axis."""
        return OnMesh(self, mesh)

    def part(self, devices: int) -> Buffer:
        """The buffer of one of so many devices."""
        rows, rest = divmod(self.buffer.capacity, devices)
        if rest or not rows:
            below = f"{rows * devices} or " if rows else ""
            raise ValueError(
                f"capacity={self.buffer.capacity} is not a multiple of the {devices} devices of axis {self.axis!r}: "
                f"use {below}{(rows + 1) * devices}"
            )
        return dataclasses.replace(self.buffer, capacity=rows)

    def init(self, example: Any) -> BufferState:
        """This device's part of an empty buffer for items like `example`, as `Buffer.init`. Leaves are [1, ...]."""
        return self._stacked(self._part().init(example))

    def extend(self, state: BufferState, batch: Any) -> tuple[BufferState, Int[Array, "*batch"]]:
        """Write this device's rows, leaves [n, *lanes, ...], into its part. Returns their slots, -1 for none. O(n)."""
        part = self._part()
        local, slots = part.extend(self._local(state), exchange.varying(checks.arrays(batch), self.axis))
        return self._stacked(local), jnp.where(slots < 0, -1, slots + self._first(part))

    def sample(self, state: BufferState, key: Array, batch_size: int) -> tuple[BufferState, Any, Draw]:
        """Draw a batch on all devices together, and return this device's rows of it, [batch_size / devices, ...].

        All rows, where batches are replicated. `draw.size` and `draw.smallest` are those of the whole buffer;
        `draw.valid` is False where nothing can be drawn. The key must be the same on all devices. With `check_vma` a
        global draw raises ValueError for a key of a varying type; without, a key that differs gives meaningless rows.
        O(batch_size * log capacity) on each device; balanced draws, O(batch_size / devices * log capacity).
        """
        part, local = self._part(), self._local(state)
        devices = self.buffer.capacity // part.capacity
        least = devices * (part.sampler.length if isinstance(part.sampler, Slices) else 1)
        if checks.as_int("batch_size", batch_size) % least:
            raise ValueError(f"batch_size={batch_size} must be a multiple of {least}: whole rows for {devices} devices")
        move: Callable[[Any], Any] = functools.partial(exchange.of_all, axis=self.axis)
        if self.law == "global":
            if exchange.differs(key, self.axis):
                raise ValueError(f"law='global' needs one key on all devices of {self.axis!r}: pass it with spec P()")
            draw, own = laws.drawn_globally(part, local, key, batch_size, self.axis)
            batch = part.read(local, draw.slots)
            move = functools.partial(exchange.delivered, own=own, axis=self.axis, split=self.batches == "split")
        else:
            key = jax.random.fold_in(key, jax.lax.axis_index(self.axis))
            local, batch, draw = part.sample(local, key, batch_size // devices)
            draw = laws.corrected(part, draw, self.axis)
        first = self._first(part)
        starts = None if draw.starts is None else draw.starts + first
        rows = batch, (draw.slots + first, draw.probability, draw.valid, draw.mask, starts)
        moves = self.law == "global" or self.batches == "replicated"
        batch, (slots, probability, valid, mask, starts) = move(rows) if moves else rows
        draw = Draw(slots, probability, valid, draw.smallest, draw.size, mask, starts)
        return self._stacked(local), batch, draw

    def update(
        self, state: BufferState, slots: Int[Array, "*batch"], priorities: Float[Array, "*batch"]
    ) -> BufferState:
        """Give items of any device new priorities: one for each slot, or one for all. Of equal slots the last counts.

        Slots are this device's part of those of the batch (all of them where batches are replicated), and the order is
        that of the batch. O(batch * log capacity) on each device.
        """
        part, slots = self._part(), checks.slots(slots)
        priorities = jnp.broadcast_to(checks.priorities(priorities, slots.shape), slots.shape)
        slots, priorities = self._of_batch((slots.reshape(-1), priorities.reshape(-1)))
        here, own = self._here(part, slots)
        local = part.update(self._local(state), jnp.where(own, here, -1), jnp.where(own, priorities, 0))
        if self.law == "global":  # a sampler that keeps no priorities has raised
            highest = jax.lax.pmax(local.sampler.highest, self.axis)
            local = dataclasses.replace(local, sampler=dataclasses.replace(local.sampler, highest=highest))
        return self._stacked(local)

    def read(self, state: BufferState, slots: Int[Array, "*batch"]) -> Any:
        """A copy of the items at slots of any device, which must be in range: leaves [*batch, ...]. O(batch).

        Slots are this device's part of those of the batch, or all of them where batches are replicated.
        """
        part, slots = self._part(), checks.slots(slots)
        here, own = self._here(part, self._of_batch(slots.reshape(-1)))
        items = part.read(self._local(state), jnp.where(own, here, 0))
        found = exchange.delivered(items, own, self.axis, self.batches == "split")
        return jax.tree.map(lambda leaf: leaf.reshape(*slots.shape, *leaf.shape[1:]), found)

    def size(self, state: BufferState) -> Int[Array, ""]:
        """Items stored on all devices, over all lanes."""
        return jax.lax.psum(self._part().size(self._local(state)), self.axis)

    def clear(self, state: BufferState) -> BufferState:
        """The buffer without items; their memory is kept."""
        return self._stacked(self._part().clear(self._local(state)))

    def _part(self) -> Buffer:
        try:
            return self.part(jax.lax.axis_size(self.axis))
        except NameError as error:
            bound = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes)) or "none"
            raise ValueError(
                f"axis {self.axis!r} is not bound here (bound: {bound}): call this within jax.shard_map over a mesh that "
                "has the axis, or use over(mesh)"
            ) from error

    def _first(self, part: Buffer) -> Array:
        """The first slot of this device."""
        return jax.lax.axis_index(self.axis).astype(jnp.int32) * (part.capacity * part.items_per_row)

    def _here(self, part: Buffer, slots: Int[Array, " n"]) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
        """Slots counted from the first of this device, and which of them it has."""
        first, size = self._first(part), part.capacity * part.items_per_row
        # Slots out of range belong to the first and last device, so that each refusal is counted once.
        nearest = jnp.clip(slots, 0, self.buffer.capacity * part.items_per_row - 1)
        return slots - first, (nearest >= first) & (nearest - first < size)

    def _of_batch(self, rows: Any) -> Any:
        """Rows of the whole batch, from those that the caller has of it."""
        return exchange.gathered(rows, self.axis) if self.batches == "split" else rows

    def _local(self, state: BufferState) -> BufferState:
        """The state of this device's part."""
        checks.parts(state, 1, f"pass the state with spec P({self.axis!r}), or use over(mesh)")
        local: BufferState = jax.tree.map(lambda leaf: leaf[0], exchange.varying(state, self.axis))
        return local

    def _stacked(self, local: BufferState) -> BufferState:
        state: BufferState = jax.tree.map(lambda leaf: leaf[None], exchange.varying(local, self.axis))
        return state
