"""Which rows of the ring new items take."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingState:
    """Where the ring stands."""

    cursor: Array  # [] int32: the row that is written next
    size: Array  # [] int32: rows in use, always 0 to size - 1
    written: Array  # [2] uint32: low and high word of how many rows were ever written


@dataclasses.dataclass(frozen=True)
class RoundRobin:
    """The oldest row first. O(batch)."""

    def init(self) -> RingState:
        return RingState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32))

    def claim(self, state: RingState, count: int, capacity: int) -> tuple[RingState, Int[Array, " count"]]:
        """The rows that `count` new items take, one after the other; from `capacity` on they repeat."""
        # Unsigned: cursor + offset is below 2 * capacity, which may pass 2^31.
        offsets = (
            jnp.arange(count, dtype=jnp.uint32) % jnp.uint32(capacity)
            if count > capacity
            else (jnp.arange(count, dtype=jnp.uint32))
        )
        rows = _wrap(state.cursor.astype(jnp.uint32) + offsets, capacity)
        low = state.written[0] + jnp.uint32(count)
        carry = (low < state.written[0]).astype(jnp.uint32)
        after = RingState(
            cursor=_wrap(state.cursor.astype(jnp.uint32) + jnp.uint32(count % capacity), capacity),
            # size + count may pass 2^31, so it is compared before it is added
            size=jnp.where(state.size >= capacity - min(count, capacity), capacity, state.size + min(count, capacity)),
            written=jnp.stack([low, state.written[1] + carry]),
        )
        return after, rows


def _wrap(row: Array, capacity: int) -> Array:
    return jnp.where(row >= capacity, row - jnp.uint32(capacity), row).astype(jnp.int32)
