"""A buffer whose rows are divided over the devices of a mesh axis, inside `jax.jit`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int

from fbuf import checks, memory_plan, priority_tree, row_words
from fbuf.buffer import Buffer, BufferState
from fbuf.fusion import computed_once
from fbuf.keywords import checked
from fbuf.samplers import Draw, Fifo, Prioritized, Slices, Uniform
from fbuf.samplers.prioritized import chance, placed_masses
from fbuf.samplers.protocol import equal_chances
from fbuf.samplers.uniform import below

# A draw of the whole batch, its slots counted on this device, and which rows are from this device.
_Found = tuple[Draw, Bool[Array, " batch"]]


@checked
@dataclasses.dataclass(frozen=True)
class Sharded:
    """A buffer in equal parts on the devices of a mesh axis. For use inside `jax.shard_map`; see `over`.

    Args:
        buffer: the rules. Its capacity is that of all devices together.
        axis: name of the mesh axis.
        law: "global" draws as one buffer with the items of all devices and the same key would (`Uniform` and
            `Prioritized`). "balanced" draws an equal share of the batch on each device, by any sampler, and corrects the
            probabilities, so that `importance_weights` are exact. Rows of a device without items are not valid.
        batches: "split": row k of a batch is on device k // (batch_size / devices). "replicated": every device
            has all rows. This holds for the batches of `sample` and `read` and for the slots of `update` and `read`.

    The state is a `BufferState` whose leaves have a leading dimension of devices: [1, ...] within `shard_map`, [devices,
    ...] outside, so `P(axis)` is its spec. Donated, it is written in place. A slot is device * items of a device + slot
    there. `check_vma` may be on or off. To anneal alpha, map the rule over the devices of the state:
    `dataclasses.replace(state, sampler=jax.vmap(rule.reweight, (0, None))(state.sampler, alpha))`.

    Global draws by priority have the slots of one buffer where a device has room for a power of 8 of items or sums of
    weights are exact; otherwise borders between items differ by a few 2^-24 of the total (float32). New items get the
    highest priority of any device; with "balanced", of their own. The weights of one device sum to at most 1e37
    (float32): items beyond are not drawn.

    Communication, for d devices and a batch of b rows of w 32-bit words, with the fields of the draw:

        sample    one all-reduce of n * d words, n = 1 for global uniform draws, 3 for others (5 with float64); and of
                  b * w words one reduce-scatter ("split") or all-reduce ("replicated"). Balanced draws of "split"
                  batches need only the first.
        update    one all-gather to 2 * b words (3 * b of float64), for "split" batches; one all-reduce of a word (2 of
                  float64), for global draws
        read      one all-gather to b words, for "split" batches; and b * w words as for `sample`
        size      one all-reduce of one word
        extend    none; nor do `init` and `clear`

    While it is traced, a method raises ValueError if the axis is not bound, if the devices do not divide the capacity or
    the batch, and, but for `size`, for the state of another buffer.
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

    def over(self, mesh: Mesh) -> "OnMesh":
        """The same methods on global arrays, for eager calls and `jax.jit`. ValueError if the mesh lacks the axis."""
        return OnMesh(self, mesh)

    def part(self, devices: int) -> Buffer:
        """The buffer of one device of `devices`."""
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
        batch = row_words.varying(jax.tree.map(jnp.asarray, checks.fits(batch)), self.axis)
        local, slots = part.extend(self._local(state), batch)
        return self._stacked(local), jnp.where(slots < 0, -1, slots + self._first(part))

    def sample(self, state: BufferState, key: Array, batch_size: int) -> tuple[BufferState, Any, Draw]:
        """Draw a batch on all devices together, and return this device's rows of it, [batch_size / devices, ...].

        With replicated batches it returns all rows. `draw.size` and `draw.smallest` are those of the whole buffer;
        `draw.valid` is False if nothing can be drawn. The key must be the same on all devices. With `check_vma` a
        global draw raises ValueError for a key of a varying type; without it, different keys give meaningless rows.
        O(batch_size * log capacity) on each device; balanced draws, O(batch_size / devices * log capacity).
        """
        checks.random_key(key)
        part, local = self._part(), self._local(state)
        devices = self.buffer.capacity // part.capacity
        least = devices * (part.sampler.length if isinstance(part.sampler, Slices) else 1)
        batch_size = checks.as_int("batch_size", batch_size)
        if batch_size % least:
            raise ValueError(f"batch_size={batch_size} must be a multiple of {least}: whole rows for {devices} devices")
        move: Callable[[Any], Any] = functools.partial(row_words.of_all, axis=self.axis)
        if self.law == "global":
            if row_words.differs(key, self.axis):
                raise ValueError(f"law='global' needs one key on all devices of {self.axis!r}: pass it with spec P()")
            draw, own = _drawn_globally(part, local, key, batch_size, self.axis)
            batch = part.read(local, draw.slots)
            move = functools.partial(row_words.delivered, own=own, axis=self.axis, split=self.batches == "split")
        else:
            key = jax.random.fold_in(key, jax.lax.axis_index(self.axis))
            local, batch, draw = part.sample(local, key, batch_size // devices)
            draw = _corrected(part, draw, self.axis)
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

        Slots are this device's part of the slots of the batch (with replicated batches all), in the order of the batch.
        O(batch * log capacity) on each device.
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
        """A copy of the items at slots in range of any device: leaves [*batch, ...]. O(batch).

        Slots are this device's part of the slots of the batch, or with replicated batches all.
        """
        part, slots = self._part(), checks.slots(slots)
        here, own = self._here(part, self._of_batch(slots.reshape(-1)))
        items = part.read(self._local(state), jnp.where(own, here, 0))
        found = row_words.delivered(items, own, self.axis, self.batches == "split")
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
        # Slots out of range belong to the first or last device, so each refusal counts once.
        nearest = jnp.clip(slots, 0, self.buffer.capacity * part.items_per_row - 1)
        return slots - first, (nearest >= first) & (nearest - first < size)

    def _of_batch(self, rows: Any) -> Any:
        """The rows of the whole batch on this device."""
        return row_words.gathered(rows, self.axis) if self.batches == "split" else rows

    def _local(self, state: BufferState) -> BufferState:
        """The state of this device's part."""
        _check_parts(state, 1, f"pass the state with spec P({self.axis!r}), or use over(mesh)")
        local: BufferState = jax.tree.map(lambda leaf: leaf[0], row_words.varying(state, self.axis))
        return local

    def _stacked(self, local: BufferState) -> BufferState:
        state: BufferState = jax.tree.map(lambda leaf: leaf[None], row_words.varying(local, self.axis))
        return state


@checked
@dataclasses.dataclass(frozen=True)
class OnMesh:
    """The methods of `Sharded` on global arrays: a state of leaves [devices, ...], batches and slots of all devices.

    Each may be called eagerly, or in `jax.jit`, which may donate the state: `jax.jit(on_mesh.extend, donate_argnums=0)`.
    Results are sharded by `P(axis)`; `size`, `draw.size`, `draw.smallest` and replicated batches are replicated. Batches
    and slots are moved to the devices that need them. Other axes of the mesh hold copies.

    Args:
        sharded: the buffer in parts.
        mesh: the devices; one of its axes is that of `sharded`.

    Args:
        sharded: the buffer in parts.
        mesh: the devices; one of its axes is that of `sharded`.
    """

    sharded: Sharded
    mesh: Mesh

    def __post_init__(self) -> None:
        axis, names = self.sharded.axis, self.mesh.axis_names
        if axis not in names:
            raise ValueError(f"axis {axis!r} is not in the mesh, whose axes are {', '.join(map(repr, names))}")
        self.sharded.part(self.devices)

    @property
    def devices(self) -> int:
        """The number of parts of the buffer."""
        return int(self.mesh.shape[self.sharded.axis])

    def init(self, example: Any) -> BufferState:
        """An empty buffer for items like `example`, which is as in `Buffer.init`."""
        item, buffer = checks.item_spec(example), self.sharded.buffer
        here = [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]
        together = len(here) if here and here[0].platform == "cpu" else 1  # parts in one memory
        rows = buffer.capacity * together // self.mesh.devices.size or 1
        some = dataclasses.replace(buffer, capacity=rows)
        memory_plan.refuse_large(lambda: some.init(item), item, rows * buffer.items_per_row)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), item)
        return _program(self, "init", P(), self._by_device, ())(zeros)

    def extend(self, state: BufferState, batch: Any) -> tuple[BufferState, Int[Array, "*batch"]]:
        """Write a batch of leaves [n, *lanes, ...]: the first n / devices rows to the first device, and so on.

        Returns the slots taken, [n, *lanes], -1 for none.
        """
        return self._run("extend", (state, checks.fits(batch)), self._by_device, (self._by_device,) * 2)

    def sample(self, state: BufferState, key: Array, batch_size: int) -> tuple[BufferState, Any, Draw]:
        """A copy of `batch_size` items, leaves [batch_size, ...], and their draw."""
        checks.random_key(key)
        rows = self._of_batch
        draw = Draw(rows, rows, rows, P(), P(), rows, rows)  # type: ignore[arg-type]  # specs in the place of arrays
        return self._run("sample", (state, key), P(), (self._by_device, rows, draw), batch_size)

    def update(
        self, state: BufferState, slots: Int[Array, "*batch"], priorities: Float[Array, "*batch"]
    ) -> BufferState:
        """Give items new priorities: one for each slot, or one for all. Of equal slots the last counts."""
        slots = checks.slots(slots)
        priorities = jnp.broadcast_to(checks.priorities(priorities, slots.shape), slots.shape)
        return self._run("update", (state, slots, priorities), self._of_batch, self._by_device)

    def read(self, state: BufferState, slots: Int[Array, "*batch"]) -> Any:
        """A copy of the items at slots in range: leaves [*batch, ...]."""
        return self._run("read", (state, checks.slots(slots)), self._of_batch, self._of_batch)

    def size(self, state: BufferState) -> Int[Array, ""]:
        """Items stored on all devices, over all lanes."""
        return self._run("size", (state,), P(), P())

    def clear(self, state: BufferState) -> BufferState:
        """The buffer without items; their memory is kept."""
        return self._run("clear", (state,), P(), self._by_device)

    def local_part(self, state: BufferState) -> BufferState:
        """The parts on the devices of this process, as NumPy arrays [own devices, ...].

        Each process saves its own parts by `save_state` in its own folder. A later run on the same mesh passes the result
        of `load_state` to `from_local_part`.
        """

        def parts(leaf: Array) -> np.ndarray:
            held = {shard.index[0].start or 0: shard.data for shard in leaf.addressable_shards}
            return np.concatenate([np.asarray(held[place]) for place in sorted(held)])

        return jax.tree.map(parts, state)

    def from_local_part(self, part: BufferState) -> BufferState:
        """The state of all devices from the `local_part` of each process. Each process calls it."""
        sharding = NamedSharding(self.mesh, self._by_device)
        return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), part)

    @property
    def _by_device(self) -> P:
        return P(self.sharded.axis)

    @property
    def _of_batch(self) -> P:
        return self._by_device if self.sharded.batches == "split" else P()

    def _run(self, method: str, arguments: tuple[Any, ...], given: P, returned: Any, *static: Any) -> Any:
        """Call a method of `sharded` on the state and arguments by the spec `given`; `static` are its last arguments."""
        state, *others = arguments
        _check_parts(state, self.devices)
        if given != P():  # replicated arguments are on all devices already
            for shape in map(jnp.shape, jax.tree.leaves(others)):
                if not shape or shape[0] % self.devices:
                    raise ValueError(
                        f"{method} needs a multiple of {self.devices} rows, as many for each device of axis "
                        f"{self.sharded.axis!r}, got shape {list(shape)}"
                    )
            others = jax.device_put(others, NamedSharding(self.mesh, given))
        return _program(self, method, (self._by_device, *(given for _ in others)), returned, static)(state, *others)


@functools.lru_cache(maxsize=256)  # JAX caches eager calls by function
def _program(on_mesh: OnMesh, method: str, given: Any, returned: Any, static: tuple[Any, ...]) -> Callable[..., Any]:
    def local(*arguments: Any) -> Any:
        return getattr(on_mesh.sharded, method)(*arguments, *static)

    return jax.jit(jax.shard_map(local, mesh=on_mesh.mesh, in_specs=given, out_specs=returned))


def _check_parts(state: Any, count: int, advice: str = "another buffer made it") -> None:
    """ValueError for a state whose leaves do not begin with a dimension of `count` devices, RuntimeError after donation."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        checks.in_memory(leaf)
        if jnp.shape(leaf)[:1] != (count,):
            name = f"state{jax.tree_util.keystr(path)}"
            raise ValueError(f"{name} has shape {list(jnp.shape(leaf))}, and needs [{count}, ...] here: {advice}")


# ---------------------------------------------------------------------- the two laws


def _drawn_globally(part: Buffer, state: BufferState, key: Array, count: int, axis: str) -> _Found:
    """The draw of one buffer with the items of all devices. One all-reduce of a few numbers a device.

    Every device computes the places of all `count` rows from the key, and looks up those in its part.
    """
    draw, own = (_by_priority if isinstance(part.sampler, Prioritized) else _uniformly)(part, state, key, count, axis)
    if part.frames:
        draw = dataclasses.replace(draw, valid=draw.valid & part.intact(state, draw.slots))
    return draw, own


def _uniformly(part: Buffer, state: BufferState, key: Array, count: int, axis: str) -> _Found:
    sizes = row_words.of_all(part.size(state), axis)
    ends, stored = jnp.cumsum(sizes, dtype=jnp.int32), jnp.sum(sizes, dtype=jnp.int32)
    places = below(key, count, jnp.maximum(stored, 1)) - (ends - sizes)[jax.lax.axis_index(axis)]
    own = (places >= 0) & (places < part.size(state))
    slots = computed_once(jnp.where(own, places, 0))
    return equal_chances(slots, jnp.broadcast_to(stored > 0, (count,)), stored), own


def _by_priority(part: Buffer, state: BufferState, key: Array, count: int, axis: str) -> _Found:
    """A tree over the totals of the devices has the levels that a tree over all items has above theirs."""
    assert isinstance(part.sampler, Prioritized)
    tree, rule = state.sampler.tree, part.sampler
    mine = part.size(state), priority_tree.total(tree), priority_tree.minimum(tree)
    sizes, totals, minima = row_words.of_all(mine, axis)
    above = priority_tree.fill(priority_tree.init(totals.shape[0], dtype=rule.dtype, minima=False), totals)
    total = priority_tree.total(above)
    device, *masses = priority_tree.find_rest(above, *placed_masses(key, count, total, rule.stratified))
    own = device == jax.lax.axis_index(axis)
    slots = priority_tree.find_placed(tree, *(jnp.where(own, each, 0) for each in masses))
    # Computed before later writes into the tree (see `computed_once`).
    slots, probability = computed_once((slots, chance(priority_tree.get(tree, slots), total)))
    valid, smallest = jnp.broadcast_to(total > 0, (count,)), chance(jnp.min(minima), total)
    return Draw(slots, probability, valid, smallest, jnp.sum(sizes, dtype=jnp.int32)), own


def _corrected(part: Buffer, draw: Draw, axis: str) -> Draw:
    """Correct the draw from one part to one from the whole buffer. One all-reduce of a few numbers a device.

    The probability of an item becomes that in a random row of the batch: the probability that the row is from this device,
    times that of the item there.
    """
    rows = jnp.sum(draw.valid, dtype=jnp.int32)
    if part.frames:  # single rows may be invalid; the other rows of the device still make its whole share
        rows = ((draw.size > 0) & jnp.isfinite(draw.smallest)).astype(jnp.int32)
    all_rows, sizes, smallest = row_words.of_all((rows, draw.size, draw.smallest), axis)
    size, kind = jnp.sum(sizes, dtype=jnp.int32), draw.probability.dtype
    share = all_rows.astype(kind) / jnp.maximum(jnp.sum(all_rows), 1).astype(kind)
    probability = draw.probability * share[jax.lax.axis_index(axis)]
    least = jnp.min(jnp.where(all_rows > 0, smallest * share, jnp.inf))
    if isinstance(part.sampler, Fifo):  # each item is returned once, wherever it is
        least = 1 / jnp.maximum(size, 1).astype(kind)
        probability = jnp.broadcast_to(least, probability.shape)
    return dataclasses.replace(draw, probability=probability, smallest=least, size=size)
