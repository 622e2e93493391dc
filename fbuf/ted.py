"""TED data flat, each observation once: where the rows of a ring go when trajectories are laid one after the other.

A row of TED data has what was seen before a step and, as its "next", what was seen after it. Within a trajectory the latter
is the former of the row that follows. Laid out lane by lane, the oldest row first, with one place more behind each row that
ends a trajectory, the observations of all rows and the last ones of all trajectories stand once each: half of the memory.
All functions run inside of any program; only `places` looks at more than one row at a time.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from fbuf import checks
from fbuf.writers import RingState

_GROUP = 64  # words


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of rows. Leaves are [rows, *lanes] except for the last one."""

    places: Array  # int32: of a row; those of all rows and of what came after ends are 0 to used - 1
    after: Array  # int32: of what came after a row: the place behind; at a lane's last row without an end its own
    ends: Array  # bool: whether a trajectory ends with a row, so that the place behind is for what came after it
    used: Array  # [] int32: how many places there are


def layout(done: Bool[Array, "*rows"], ring: RingState, *, closed: Any = False) -> Layout:
    """The places of the rows of a ring. O(rows).

    A trajectory ends where it is done, [rows, *lanes], and with the row that was written last, whether or not it is done.
    Rows of a ring that is not full come behind that one, as if they were a trajectory that goes on; `closed` ends it with
    the last row.
    """
    if jnp.result_type(done) != jnp.bool_ or jnp.ndim(done) == 0:
        raise TypeError(f"done must be bool, [rows, *lanes], got {jnp.result_type(done)} {list(jnp.shape(done))}")
    shape, items = done.shape, math.prod(done.shape)
    if not items:
        raise ValueError(f"done has no rows: {list(shape)}")
    if 2 * items > np.iinfo(np.int32).max:
        raise ValueError(f"{items} rows may take {2 * items} places, more than int32 can count")
    full = ring.size == shape[0]
    row = jnp.arange(shape[0], dtype=jnp.int32)[:, None]
    last = (row == shape[0] - 1) & ~full
    ends = done.reshape(shape[0], -1) | (row == (ring.cursor - 1) % shape[0]) | (last & closed)
    # In the order of storage first: a ring that begins elsewhere is the same circle of places, turned.
    found = places(ends.T.reshape(-1)).reshape(-1, shape[0]).T
    begin, stop = found[:1], found[-1:] + 1 + ends[-1:]
    turned = found - jnp.where(full, found[ring.cursor % shape[0]][None] - begin, 0)
    found = jnp.where(turned < begin, turned + (stop - begin), turned)
    after = found + 1 - (last & ~ends)
    return Layout(found.reshape(shape), after.reshape(shape), ends.reshape(shape), stop[0, -1])


def places(ends: Bool[Array, " rows"], dtype: Any = jnp.int32) -> Int[Array, " rows"]:
    """The place of each row: one behind the row before, or two where a trajectory ends with that. O(rows).

    What comes behind changes nothing, so that rows may be padded.
    """
    # Words of flags, a byte each: a multiplication adds up the bytes of a word. XLA:CPU takes ten times as long for a
    # cumsum of all flags.
    count, dtype = ends.shape[0], jnp.dtype(dtype)
    wide, word = (8, np.uint64) if dtype.itemsize == 8 else (4, np.uint32)
    padded = jnp.pad(ends, (0, -count % (wide * _GROUP))).astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(padded.reshape(-1, wide), word)
    sums = words * np.frombuffer(bytes([1] * wide), word)[0]
    of_words = (sums >> word(8 * wide - 8)).astype(dtype).reshape(-1, _GROUP)
    of_groups = jnp.cumsum(of_words, 1)
    before = jnp.cumsum(of_groups[:, -1]) - of_groups[:, -1]
    before = (of_groups - of_words + before[:, None]).reshape(-1, 1)
    within = (sums - words)[:, None] >> np.arange(0, 8 * wide, 8, dtype=word)[None]
    rows = jnp.arange(padded.size, dtype=dtype).reshape(-1, wide)
    return (rows + before + (within & word(255)).astype(dtype)).reshape(-1)[:count]


def flatten(layout: Layout, observations: Any, following: Any, ends: int | None = None) -> Any:
    """Observations at their places, [rows and `ends`, ...], zeros from `layout.used` on. O(that).

    Args:
        layout: where rows go.
        observations: what was seen before steps: arrays, [rows, *lanes, ...], of any structure.
        following: what was seen after them, alike. All but the values at ends is dropped.
        ends: how many ends there is room for; as many as rows if None. Of more, what is behind is lost: where there may
            be, look whether `layout.used` is more than the rows and these.
    """
    items = layout.places.size
    length = items + (items if ends is None else checks.as_int("ends", ends, 0))
    structure: Any = jax.tree.structure(observations)
    if structure != jax.tree.structure(following):
        raise ValueError(f"observations have the structure {structure}, following has {jax.tree.structure(following)}")
    _refuse_other_rows("observations", observations, layout.places.shape)
    kept = layout.places.reshape(-1)
    added = jnp.where(layout.ends, layout.after, length).reshape(-1)

    def put(path: Any, before: Array, after: Array) -> Array:
        if before.shape != after.shape or before.dtype != after.dtype:
            raise ValueError(
                f"observations{jax.tree_util.keystr(path)} are {before.dtype} {list(before.shape)}, following"
                f"{jax.tree_util.keystr(path)} are {after.dtype} {list(after.shape)}"
            )
        item = before.shape[layout.places.ndim :]
        flat = jnp.zeros((length, *item), before.dtype)
        flat = flat.at[kept].set(before.reshape(items, *item), mode="drop", unique_indices=True)
        return flat.at[added].set(after.reshape(items, *item), mode="drop")

    return jax.tree_util.tree_map_with_path(put, observations, following)


def unflatten(layout: Layout, flat: Any) -> tuple[Any, Any]:
    """The observations before and after each step, [rows, *lanes, ...], from observations at their places.

    After a lane's last row, where no trajectory ends with that, it is the observation of the row itself.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(flat):
        if not leaf.ndim or leaf.shape[0] < layout.places.size:
            raise ValueError(
                f"flat{jax.tree_util.keystr(path)} has shape {list(leaf.shape)}: there are {layout.places.size} rows"
            )

    def at(places: Array) -> Any:
        return jax.tree.map(lambda leaf: leaf.at[places].get(mode="clip"), flat)

    return at(layout.places), at(layout.after)


def lay_out(rows: Any, ring: RingState, lanes: int = 0) -> Any:
    """Leaves with one entry a row, lane after lane and the oldest row first: [rows * lanes, ...] from [rows, *lanes, ...].

    `lanes` is the number of their dims.
    """

    def one(leaf: Array) -> Array:
        if leaf.ndim <= lanes:
            raise ValueError(
                f"leaves need the shape [rows, *lanes, ...] with {lanes} lane dims, got {list(leaf.shape)}"
            )
        turned = jnp.roll(leaf, -_oldest(ring, leaf.shape[0]), 0)
        return jnp.moveaxis(turned, 0, lanes).reshape(-1, *leaf.shape[lanes + 1 :])

    return jax.tree.map(one, rows)


def take_back(flat: Any, ring: RingState, shape: tuple[int, ...]) -> Any:
    """The rows, [*shape, ...], of what `lay_out` has laid out; `shape` is that of rows and lanes."""

    def one(path: Any, leaf: Array) -> Array:
        if not leaf.ndim or leaf.shape[0] != math.prod(shape):
            raise ValueError(
                f"flat{jax.tree_util.keystr(path)} has shape {list(leaf.shape)}, the rows have {list(shape)}"
            )
        turned = jnp.moveaxis(leaf.reshape(*shape[1:], shape[0], *leaf.shape[1:]), len(shape) - 1, 0)
        return jnp.roll(turned, _oldest(ring, shape[0]), 0)

    return jax.tree_util.tree_map_with_path(one, flat)


def _oldest(ring: RingState, rows: int) -> Array:
    """The row that comes first."""
    return jnp.where(ring.size == rows, ring.cursor % rows, 0)


def _refuse_other_rows(name: str, data: Any, shape: tuple[int, ...]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        if leaf.shape[: len(shape)] != shape:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} has shape {list(leaf.shape)}, the rows have {list(shape)}"
            )
