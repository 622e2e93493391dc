"""The same buffer with another capacity."""

import dataclasses
import functools
from operator import itemgetter
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fbuf import checks, frames, storage, trajectories
from fbuf.buffer import Buffer, BufferState
from fbuf.keywords import checked
from fbuf.mixture import Mixture, apportioned
from fbuf.samplers import Slices
from fbuf.sharded import Sharded
from fbuf.timeline import TrajectoryTimeline


@overload
def resize(buffer: Buffer, state: BufferState, capacity: int) -> tuple[Buffer, BufferState]: ...
@overload
def resize(buffer: Sharded, state: BufferState, capacity: int) -> tuple[Sharded, BufferState]: ...
@overload
def resize(
    buffer: Mixture, state: tuple[BufferState, ...], capacity: int | tuple[int, ...]
) -> tuple[Mixture, tuple[BufferState, ...]]: ...


@checked
def resize(
    buffer: Buffer | Sharded | Mixture, state: BufferState | tuple[BufferState, ...], capacity: int | tuple[int, ...]
) -> tuple[Buffer | Sharded | Mixture, BufferState | tuple[BufferState, ...]]:
    """The buffer with another number of rows, and its state: the newest rows stay, in their order.

    Priorities, trajectories, frames and epochs follow their items, and `written` counts on. The result behaves as a buffer
    of that capacity which was filled with the same newest rows: the oldest is row 0, and later writes overwrite it first.
    So items get other slots, unless the ring has not been full and all rows stay. With `HighestRanked` the items of highest
    rank stay instead.

    Of a `Mixture` each member keeps its newest rows; of `Sharded` each device does, and resizes its part. The devices of a
    mesh must be of one process.

    On the host, outside of jit: it waits for the state, and needs memory for both states. O(capacity).

    Args:
        buffer: the buffer. (A buffer `over` a mesh: pass its `sharded`, and call `over` again.)
        state: of this buffer. It is not changed.
        capacity: rows, as in `Buffer`; of `Sharded` on all devices together. Of a `Mixture` a tuple with the rows of each
            member; or one number, the rows of all members together, which keep their proportions (by largest remainders).
    """
    checks.on_host("resize", state)
    if isinstance(buffer, Mixture):
        rows = _of_members(buffer, capacity)
        states = _states_of(buffer, state)
        pairs = [_resized(*each) for each in zip(buffer.buffers, states, rows, strict=True)]
        return dataclasses.replace(buffer, buffers=tuple(member for member, _ in pairs)), tuple(own for _, own in pairs)
    if not isinstance(buffer, Buffer | Sharded):
        raise TypeError(_other_kind(buffer))
    if isinstance(capacity, tuple):
        raise TypeError(
            f"capacity must be one number of rows, got {capacity!r}: only a Mixture has one for each member"
        )
    whole = checks.as_int("capacity", capacity)
    if not isinstance(state, BufferState):
        raise TypeError(f"resize() needs the BufferState of the {type(buffer).__name__}, got {type(state).__name__}")
    return _resized_parts(buffer, state, whole) if isinstance(buffer, Sharded) else _resized(buffer, state, whole)


def _states_of(mixture: Mixture, states: BufferState | tuple[BufferState, ...]) -> tuple[BufferState, ...]:
    """The states of all members. TypeError or ValueError for others."""
    if not isinstance(states, tuple):
        raise TypeError(f"resize() needs a tuple with the states of a Mixture, got {type(states).__name__}")
    mixture.check(states)
    return states


def _of_members(mixture: Mixture, capacity: int | tuple[int, ...]) -> list[int]:
    """The rows of each member."""
    count = len(mixture.buffers)
    if isinstance(capacity, tuple):
        if len(capacity) != count:
            raise ValueError(f"capacity needs one number of rows for each of {count} buffers, got {capacity}")
        return [checks.as_int("capacity", each) for each in capacity]
    rows = apportioned([member.capacity for member in mixture.buffers], checks.as_int("capacity", capacity))
    if 0 in rows:
        raise ValueError(
            f"capacity={capacity} rows in the proportions of the members leave none for buffer {rows.index(0)}: pass a "
            f"tuple with the rows of each of {count} buffers"
        )
    return rows


def _resized_parts(sharded: Sharded, state: BufferState, capacity: int) -> tuple[Sharded, BufferState]:
    """A buffer in parts: each is resized on its device."""
    after = dataclasses.replace(sharded, buffer=dataclasses.replace(sharded.buffer, capacity=capacity))
    leaves = jax.tree.leaves(state)
    devices = len(leaves[0]) if jnp.ndim(leaves[0]) else 0
    if any(jnp.shape(leaf)[:1] != (devices,) for leaf in leaves):
        raise ValueError("the leaves of a state of Sharded are [devices, ...]: pass the state of all devices")
    part = sharded.part(devices)
    after.part(devices)

    sharding = _one_part_a_device(leaves)
    if sharding is None:
        local = (jax.tree.map(itemgetter(place), state) for place in range(devices))
        parts = [_resized(part, each, capacity // devices)[1] for each in local]
        return after, jax.tree.map(lambda *own: jnp.stack(own), *parts)
    on_devices = []
    for device in sharding.addressable_devices:
        local = jax.tree.map(functools.partial(_part_on, device), state)
        with jax.default_device(device):
            resized = _resized(part, local, capacity // devices)[1]
        on_devices.append(jax.tree.map(lambda leaf, to=device: jax.device_put(leaf[None], to), resized))

    def joined(*own: Array) -> Array:
        return jax.make_array_from_single_device_arrays((devices, *own[0].shape[1:]), sharding, own)

    return after, jax.tree.map(joined, *on_devices)


def _one_part_a_device(leaves: list[Array]) -> jax.sharding.NamedSharding | None:
    """The sharding of all leaves, if each device has one part; otherwise None."""
    first = getattr(leaves[0], "sharding", None)
    if not isinstance(first, jax.sharding.NamedSharding) or first.shard_shape(leaves[0].shape)[:1] != (1,):
        return None
    alike = (isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(first, leaf.ndim) for leaf in leaves)
    return first if all(alike) else None


def _part_on(device: jax.Device, leaf: Array) -> Array:
    """The part of a leaf on a device."""
    return next(shard.data for shard in leaf.addressable_shards if shard.device == device)[0]


def _resized(buffer: Buffer, state: BufferState, capacity: int) -> tuple[Buffer, BufferState]:
    """One ring with another number of rows."""
    buffer.check(state)
    after = dataclasses.replace(buffer, capacity=capacity)
    ring, rows = buffer.writer.resized(state.ring, after.capacity)
    rows, lanes = rows % buffer.capacity, buffer.items_per_row
    slots = rows[:, None] * lanes + np.arange(lanes)
    index, line = state.trajectories, None
    if index is not None:
        line = TrajectoryTimeline.of_index(state.ring, index)
        dropped = line.rows.size - rows.size
        index = trajectories.resized(index, line.number[dropped:], line.spans[dropped:], after.capacity)
    if isinstance(buffer.sampler, Slices):
        assert line is not None
        sampler = buffer.sampler.resized(state.sampler, line, rows.size, after.capacity)
    else:
        size, items = int(state.ring.size) * lanes, after.capacity * lanes
        sampler = buffer.sampler.resized(state.sampler, size, slots.reshape(-1), items)
    rules = after.frames if isinstance(after.frames, tuple) else (after.frames,)
    resized = BufferState(
        items=storage.moved(state.items, rows, after.capacity),
        ring=ring,
        sampler=sampler,
        trajectories=index,
        frames=frames.resized(rules, state.frames, slots, after.capacity),
    )
    # No array is in both states, so each may be donated.
    old = {id(leaf) for leaf in jax.tree.leaves(state)}
    return after, jax.tree.map(lambda leaf: jnp.copy(leaf) if id(leaf) in old else leaf, resized)


def _other_kind(buffer: object) -> str:
    """What to do for an object that is no `Buffer`."""
    kind = type(buffer).__name__
    advice = {
        "OnMesh": "pass on_mesh.sharded, and call over(mesh) of the result",
        "HashTable": "keys have no order of writing: insert the keys and items of the state into a new table",
    }.get(kind, "pass the fbuf.Buffer that made the state")
    return f"resize() needs an fbuf.Buffer, Mixture or Sharded, got {kind}: {advice}"
