"""The same buffer with another capacity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from fbuf import checks, frames, storage, trajectories
from fbuf.buffer import Buffer, BufferState
from fbuf.keywords import checked
from fbuf.samplers import Slices
from fbuf.timeline import TrajectoryTimeline


@checked
def resize(buffer: Buffer, state: BufferState, capacity: int) -> tuple[Buffer, BufferState]:
    """The buffer with another number of rows, and its state: the newest rows stay, in their order.

    Priorities, trajectories, frames and epochs follow their items, and `written` counts on. The result behaves as a buffer
    of that capacity which was filled with the same newest rows: the oldest is row 0, and later writes overwrite it first.
    So items get other slots, unless the ring has not been full and all rows stay. With `HighestRanked` the items of highest
    rank stay instead.

    On the host, outside of jit: it waits for the state, and needs memory for both states. O(capacity).

    Args:
        buffer: of one device. For a `Mixture` resize its members; for `Sharded` write the rows to a new buffer.
        state: of this buffer. It is not changed.
        capacity: rows, as in `Buffer`.
    """
    if not isinstance(buffer, Buffer):
        raise TypeError(_other_kind(buffer))
    checks.on_host("resize", state)
    buffer.check(state)
    after = dataclasses.replace(buffer, capacity=checks.as_int("capacity", capacity))
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
        "Mixture": "resize the members: fbuf.resize(mixture.buffers[0], states[0], capacity), and build a mixture of them",
        "Sharded": "each device has its own ring: build a Sharded with the new capacity, and extend it with the rows",
        "OnMesh": "each device has its own ring: build a Sharded with the new capacity, and extend it with the rows",
        "HashTable": "keys have no order of writing: insert the keys and items of the state into a new table",
    }.get(kind, "pass the fbuf.Buffer that made the state")
    return f"resize() needs an fbuf.Buffer, got {kind}: {advice}"
