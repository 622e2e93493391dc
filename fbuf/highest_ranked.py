"""A writer that keeps the items of highest rank."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Shaped

from fbuf.fusion import computed_once, put_alone, two_or_more, zero_after
from fbuf.keywords import checked
from fbuf.paths import leaf_at, path_of, required_leaf
from fbuf.short_text import ShortText
from fbuf.writers import Writer, count_up

FANOUT = 128
_CLIP = "promise_in_bounds"  # every index below is made to be in bounds; JAX's default would test it again


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class HighestRankedState(ShortText):
    """The ranks of the stored items.

    Attributes:
        size: [] int32: rows in use, always 0 to size - 1.
        written: [2] uint32: how many items were ever accepted, low and high word.
        refused: [] uint32: how many items had rank NaN.
        ranks: by row, the highest value for empty rows; then the minima of each 128, and so on.

    Attributes:
        size: TODO.
        written: TODO.
        refused: TODO.
        ranks: TODO.
    """

    size: Array
    written: Array
    refused: Array
    ranks: tuple[Array, ...]


@checked
@dataclasses.dataclass(frozen=True)
class HighestRanked(Writer):
    """Rows in order until all are in use; then a new item replaces the item of lowest rank, if its own rank is higher.

    Of equal lowest ranks the lowest row is taken. An item of equal rank is not accepted, and one of rank NaN is refused
    (`state.refused`). A batch has the same result as its items one by one: `Buffer.extend` returns slot -1 for items that
    were not accepted, or were replaced by a later item of the batch.

    O(batch + log capacity for each item that displaces another), one after the other. Inside `vmap` each of these
    costs O(capacity).

    Args:
        rank: path of a leaf that holds one real number an item: a key, or a tuple of keys, fields and places.

    Args:
        rank: path of a leaf that holds one real number an item: a key, or a tuple of keys, fields and places.
    """

    keeps_order = takes_lanes = False

    rank: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", path_of("rank", self.rank, root=True))

    def init(self, capacity: int, item: Any) -> HighestRankedState:
        """State over `capacity` empty rows for items like `item`. ValueError or TypeError if it has no such rank."""
        leaf = required_leaf("rank", item, self.rank)
        if not hasattr(leaf, "dtype"):
            raise ValueError(f"rank={self.rank!r} must lead to a leaf, got {type(leaf).__name__}")
        if not jnp.issubdtype(leaf.dtype, jnp.floating) and not jnp.issubdtype(leaf.dtype, jnp.integer):
            raise TypeError(f"rank={self.rank!r} must be a real number, got {leaf.dtype}")
        if leaf.shape != ():
            raise ValueError(f"rank={self.rank!r} must be one number an item, got shape {list(leaf.shape)}")
        return _empty(capacity, leaf.dtype)

    def claim(
        self, state: HighestRankedState, batch: Any, count: int, capacity: int
    ) -> tuple[HighestRankedState, Int[Array, " count"]]:
        """The rows of `count` new items, -1 for those that are not stored."""
        if count == 0:
            return state, jnp.zeros(0, jnp.int32)
        ranks = jnp.asarray(leaf_at(batch, self.rank))
        number = ranks == ranks
        state, appended = _append(state, ranks, number, capacity)
        state, rows = _displace(state, ranks, number & (appended < 0))
        rows = jnp.where(appended < 0, rows, appended)
        # Ranks of a row only rise: if the row has another rank, a later item has replaced this one.
        held = state.ranks[0].at[jnp.maximum(rows, 0)].get(mode=_CLIP)
        refused = state.refused + jnp.sum(~number, dtype=jnp.uint32)
        return dataclasses.replace(state, refused=refused), jnp.where(held == ranks, rows, -1)

    def clear(self, state: HighestRankedState, capacity: int) -> HighestRankedState:
        """State over the same rows, all empty again."""
        return _empty(capacity, state.ranks[0].dtype)

    def resized(self, state: HighestRankedState, capacity: int) -> tuple[HighestRankedState, np.ndarray]:
        """The items of highest rank stay, in the order of their rows. Of equal ranks those of higher rows stay.

        O(size * log size).
        """
        ranks = np.asarray(state.ranks[0])[: int(state.size)]
        rows = np.sort(np.argsort(ranks, kind="stable")[max(ranks.size - capacity, 0) :])
        levels: list[np.ndarray] = []
        below = ranks[rows]
        for empty in _empty(capacity, ranks.dtype).ranks:
            level = np.array(empty)
            level[: below.size] = below
            levels.append(level)
            below = level.reshape(-1, FANOUT).min(1)
        size, held = jnp.asarray(rows.size, jnp.int32), tuple(map(jnp.array, levels))
        return dataclasses.replace(state, size=size, ranks=held), rows


def _empty(capacity: int, dtype: Any) -> HighestRankedState:
    widths = [-(-(capacity + 1) // FANOUT) * FANOUT]  # one more: the last takes writes that are to be ignored
    while widths[-1] > FANOUT:
        widths.append(-(-widths[-1] // FANOUT**2) * FANOUT)
    return HighestRankedState(
        size=jnp.zeros((), jnp.int32),
        written=jnp.zeros(2, jnp.uint32),
        refused=jnp.zeros((), jnp.uint32),
        ranks=tuple(jnp.full(width, _highest(dtype), dtype) for width in widths),
    )


def _highest(dtype: Any) -> Any:
    """The highest value of a rank. It fills entries without an item, which come last and are never found."""
    return np.asarray(np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max, dtype)


def _append(
    state: HighestRankedState, ranks: Shaped[Array, " count"], number: Bool[Array, " count"], capacity: int
) -> tuple[HighestRankedState, Int[Array, " count"]]:
    """Put the first items into free rows; returns the row of each item, -1 for none. O(count)."""
    count = ranks.shape[0]
    place = jnp.cumsum(number, dtype=jnp.int32) - 1
    free = capacity - state.size
    fits = number & (place < free)
    rows = jnp.where(fits, state.size + place, -1)
    leaves, *above = state.ranks
    target = jnp.where(fits, rows, leaves.size - 1)
    values = jnp.where(fits, ranks, _highest(ranks.dtype))
    below = leaves.at[two_or_more(target)].set(two_or_more(values), mode=_CLIP)
    levels, first, reach = [below], state.size, count
    for level in above:  # the rows follow each other, and so do their parents
        first, reach = first // FANOUT, min(reach // FANOUT + 2, below.size // FANOUT)
        first = jnp.minimum(first, below.size // FANOUT - reach)
        children = jax.lax.dynamic_slice(below, (first * FANOUT,), (reach * FANOUT,)).reshape(reach, FANOUT)
        below = jax.lax.dynamic_update_slice(level, jnp.min(children, axis=1), (first,))
        levels.append(below)
    return _accepting(state, jnp.sum(fits, dtype=jnp.int32), tuple(levels)), rows


@jax.jit
def _displace(
    state: HighestRankedState, ranks: Shaped[Array, " count"], asking: Bool[Array, " count"]
) -> tuple[HighestRankedState, Int[Array, " count"]]:
    """Replace items of lowest rank, one by one, by items of higher rank; returns the row of each item, -1 for none."""
    count = ranks.shape[0]
    lowest = jnp.min(state.ranks[-1])
    asking &= ranks > lowest  # the lowest rank only rises
    place = jnp.cumsum(asking, dtype=jnp.int32) - 1
    given = jnp.zeros(count + 1, ranks.dtype).at[jnp.where(asking, place, count)].set(ranks, mode=_CLIP)
    last = place[-1] + 1

    def next_above(step: Array, lowest: Array) -> Array:
        return jax.lax.while_loop(lambda k: (k < last) & (given.at[k].get(mode=_CLIP) <= lowest), lambda k: k + 1, step)

    def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, taken, accepted, levels = carry
        row, levels = _replace_lowest(levels, given.at[step].get(mode=_CLIP))
        taken = jax.lax.dynamic_update_slice(taken, row[None], (step,))
        return next_above(step + 1, jnp.min(levels[-1])), taken, accepted + 1, levels

    zero = zero_after(given)  # of the type of `given`, which may differ between the devices of a mesh
    start = (zero, zero + jnp.full(count, -1, jnp.int32), zero, state.ranks)
    _, taken, accepted, levels = jax.lax.while_loop(lambda carry: carry[0] < last, body, start)
    rows = jnp.where(asking, taken.at[jnp.maximum(place, 0)].get(mode=_CLIP), -1)
    return dataclasses.replace(_accepting(state, accepted, levels), size=state.size), rows


def _replace_lowest(levels: tuple[Array, ...], rank: Array) -> tuple[Int[Array, ""], tuple[Array, ...]]:
    """Replace the lowest rank, of equal ones the first; returns its row. O(log)."""
    node, families = jnp.int32(0), []
    for level in reversed(levels):
        family = jax.lax.dynamic_slice(level, (node * FANOUT,), (FANOUT,))
        child = jnp.argmin(family).astype(jnp.int32)
        node = node * FANOUT + child
        families.append((node, child, family))
    values, value = [], rank
    for _, child, family in reversed(families):
        values.append(value)
        value = jnp.min(jnp.where(jnp.arange(FANOUT) == child, value, family))
    # A barrier: all reads come before the writes, or XLA would copy each level.
    entries, values = computed_once(([entry for entry, _, _ in reversed(families)], values))
    changed = [put_alone(level, value, entry) for level, entry, value in zip(levels, entries, values, strict=True)]
    return node, tuple(changed)


def _accepting(state: HighestRankedState, accepted: Int[Array, ""], ranks: tuple[Array, ...]) -> HighestRankedState:
    return dataclasses.replace(
        state, size=state.size + accepted, written=count_up(state.written, accepted), ranks=ranks
    )
