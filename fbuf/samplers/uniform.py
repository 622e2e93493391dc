"""Every stored item equally often."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int, UInt32

from fbuf.fusion import computed_once
from fbuf.samplers.protocol import Draw


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Independent draws with replacement, each stored item equally likely (to 2^-32 of its chance). O(batch)."""

    def init(self, capacity: int) -> tuple[()]:
        return ()

    def written(self, state: tuple[()], slots: Int[Array, " batch"]) -> tuple[()]:
        return state

    def sample(self, state: tuple[()], key: Array, batch_size: int, size: Int[Array, ""]) -> tuple[tuple[()], Draw]:
        stored = jnp.maximum(size, 1)
        chance = 1 / stored.astype(jnp.float32)
        draw = Draw(
            slots=computed_once(below(key, batch_size, stored)),
            probability=jnp.broadcast_to(chance, (batch_size,)),
            valid=jnp.broadcast_to(size > 0, (batch_size,)),
            smallest=chance,
            size=size,
        )
        return state, draw

    def update(self, state: tuple[()], slots: Int[Array, " batch"], priorities: Float[Array, " batch"]) -> tuple[()]:
        raise TypeError("Uniform keeps no priorities: build the buffer with sampler=fbuf.Prioritized(...)")

    def clear(self, state: tuple[()]) -> tuple[()]:
        return state


def below(key: Array, count: int, bound: Int[Array, ""] | Int[Array, " count"]) -> Int[Array, " count"]:
    """Random integers in [0, bound), bound >= 1: the high word of 64 random bits times `bound`, in 32-bit arithmetic."""
    high, low = jax.random.bits(key, (2, count), jnp.uint32)
    limit = bound.astype(jnp.uint32)
    carried = high * limit + _high_word(low, limit)
    overflow = (carried < high * limit).astype(jnp.uint32)
    return (_high_word(high, limit) + overflow).astype(jnp.int32)


def _high_word(a: UInt32[Array, " n"], b: UInt32[Array, "*n"]) -> UInt32[Array, " n"]:
    """The upper 32 bits of a * b."""
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    return a_high * b_high + (middle >> 16) + ((a_low * b_high + (middle & 0xFFFF)) >> 16)
