"""Writers: rules that name the rows of new items. And places around a ring."""

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, PyTree

from fbuf import row_masks
from fbuf.keywords import checked
from fbuf.short_text import ShortText, numbers


@checked
@runtime_checkable
class Writer(Protocol):
    """A rule that names the rows of new items. It touches no stored item.

    A rule is frozen, hashable and holds plain values; all arrays are in the state. The first `size` rows of the state are
    in use. A rule of your own inherits from `Writer` and sets the two attributes below in its class.
    """

    keeps_order: ClassVar[bool]  # each item gets the next row of a ring; only then the state is a `RingState`
    takes_lanes: ClassVar[bool]  # a row may hold items of several lanes

    @abstractmethod
    def init(self, capacity: int, item: Any) -> Any:
        """State over `capacity` empty rows for items like `item`, a pytree of `jax.ShapeDtypeStruct`."""

    @abstractmethod
    def claim(self, state: Any, batch: Any, count: int, capacity: int) -> tuple[Any, Int[Array, " count"]]:
        """The rows of a batch of `count` new items.

        A rule that keeps the order returns a row for each item: from `capacity` on they repeat, and of equal rows the last
        item counts. Rows of other rules are all different, or -1 for an item that is not stored.
        """

    def claim_masked(
        self, state: PyTree, batch: PyTree, mask: Bool[Array, " n"], capacity: int
    ) -> tuple[PyTree, Int[Array, " n"]]:
        """The rows of those items of a batch where the mask is True, as `claim` of these; -1 for the others.

        TypeError by default.
        """
        raise TypeError(
            f"{type(self).__name__} does not say which rows a masked write takes: define "
            "claim_masked(state, batch, mask, capacity), see fbuf.Writer.claim_masked"
        )

    @abstractmethod
    def clear(self, state: Any, capacity: int) -> Any:
        """State over the same rows, all empty again."""

    def resized(self, state: PyTree, capacity: int) -> tuple[PyTree, np.ndarray]:
        """State over `capacity` rows, of which the first have the items of some old rows; and these, in their new order.

        On the host: not inside jit. TypeError by default.
        """
        raise TypeError(
            f"{type(self).__name__} does not say which rows stay: define resized(state, capacity), see fbuf.Writer.resized"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class RingState(ShortText):
    """Cursor and size of a ring: one array, since a call of a program costs a microsecond or more for each.

    Attributes:
        counters: [4] uint32: cursor, size, and the low and high word of `written`.
    """

    counters: Array

    def __repr__(self) -> str:
        """Its numbers, if they are known."""
        known = numbers(self.counters)
        if known is None or len(known) != 4:
            return super().__repr__()
        cursor, size, low, high = known
        return f"RingState(cursor={cursor}, size={size}, written={(high << 32) | low})"

    @classmethod
    @checked
    def of(cls, cursor: Array, size: Array, written: Array) -> "RingState":
        """The state with these counters."""
        parts = [cursor.astype(jnp.uint32)[None], size.astype(jnp.uint32)[None], written.astype(jnp.uint32)]
        return cls(jnp.concatenate(parts))

    @property
    def cursor(self) -> Array:
        """[] int32: the row that is written next."""
        return self.counters[..., 0].astype(jnp.int32)

    @property
    def size(self) -> Array:
        """[] int32: rows in use, always 0 to size - 1."""
        return self.counters[..., 1].astype(jnp.int32)

    @property
    def written(self) -> Array:
        """[2] uint32: low and high word of how many rows were ever written."""
        return self.counters[..., 2:]


@checked
@dataclasses.dataclass(frozen=True)
class RoundRobin(Writer):
    """The oldest row first. O(batch)."""

    keeps_order = takes_lanes = True

    def init(self, capacity: int, item: Any) -> RingState:
        return RingState(jnp.zeros(4, jnp.uint32))

    def claim(self, state: RingState, batch: Any, count: int, capacity: int) -> tuple[RingState, Int[Array, " count"]]:
        # Unsigned: cursor + offset is below 2 * capacity, which may pass 2^31.
        rows = self._rows_at(state, jnp.arange(count, dtype=jnp.uint32), capacity)
        return self._after(state, jnp.uint32(count), jnp.uint32(count % capacity), min(count, capacity), capacity), rows

    def claim_masked(
        self, state: RingState, batch: PyTree, mask: Bool[Array, " n"], capacity: int
    ) -> tuple[RingState, Int[Array, " n"]]:
        offsets, count = row_masks.ranks(mask).astype(jnp.uint32), row_masks.count(mask)
        rows = self._rows_at(state, offsets, capacity)
        kept, written = jnp.minimum(count, capacity), count.astype(jnp.uint32)
        after = self._after(state, written, written % jnp.uint32(capacity), kept, capacity)
        return after, jnp.where(mask, rows, -1)

    @staticmethod
    def _rows_at(state: RingState, offsets: Array, capacity: int) -> Int[Array, " n"]:
        """The rows of a batch of n items at these offsets from the cursor, uint32 [n] below n."""
        offsets = offsets % jnp.uint32(capacity) if offsets.shape[0] > capacity else offsets
        return wrapped(state.cursor.astype(jnp.uint32) + offsets, capacity)

    @staticmethod
    def _after(state: RingState, count: Array, steps: Array, kept: Array | int, capacity: int) -> RingState:
        """The state after `count` items: the cursor moves by `steps` modulo the capacity, `kept` of them stay."""
        return RingState.of(
            cursor=wrapped(state.cursor.astype(jnp.uint32) + steps, capacity),
            # size + count may pass 2^31, so it is compared before it is added
            size=jnp.where(state.size >= capacity - kept, capacity, state.size + kept),
            written=count_up(state.written, count),
        )

    def clear(self, state: RingState, capacity: int) -> RingState:
        return self.init(capacity, None)

    def resized(self, state: RingState, capacity: int) -> tuple[RingState, np.ndarray]:
        """The newest rows stay, the oldest of them first; `written` counts on. O(capacity).

        The rows are numbers modulo the old capacity: negative ones count from its end.
        """
        cursor, size, low, high = np.asarray(state.counters).tolist()
        kept = min(size, capacity)
        return RingState(jnp.asarray([kept % capacity, kept, low, high], jnp.uint32)), cursor - kept + np.arange(kept)


# -------------------------------------------------------------------- places around a ring; no sum overflows


def wrapped(place: Array, size: int) -> Array:
    """Places below 2 * size, uint32, as int32 places of a ring of that size."""
    return jnp.where(place >= size, place - jnp.uint32(size), place).astype(jnp.int32)


def count_up(written: Array, by: Array) -> Array:
    """A count of [2] uint32, low and high word, after it grew by less than 2^32."""
    low = written[0] + by.astype(jnp.uint32)
    return jnp.stack([low, written[1] + (low < written[0]).astype(jnp.uint32)])


def onward(place: Array, steps: Array, size: int) -> Array:
    """Places fewer than `size` steps on."""
    return jnp.where(steps >= size - place, steps - (size - place), place + steps)


def backward(place: Array, steps: Array | int, size: int) -> Array:
    """Places fewer than `size` steps back."""
    return jnp.where(place < steps, place - steps + size, place - steps)


def moved(place: Array, steps: Array, size: int) -> Array:
    """Places that many steps, fewer than `size` either way, on."""
    back = jnp.where(place + jnp.minimum(steps, 0) < 0, place + jnp.minimum(steps, 0) + size, place + steps)
    return jnp.where(steps >= 0, onward(place, steps, size), back)
