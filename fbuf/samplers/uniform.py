"""Every stored item equally often."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, UInt32

from fbuf import random_words
from fbuf.fusion import map_entries
from fbuf.keywords import checked
from fbuf.samplers.chances import Chances, Reason
from fbuf.samplers.protocol import Draw, Sampler, equal_chances


@checked
@dataclasses.dataclass(frozen=True)
class Uniform(Sampler):
    """Independent draws with replacement, each stored item equally likely (to 2^-32 of its chance). O(batch)."""

    keeps_priorities = needs_order = without_replacement = False

    def init(self, capacity: int) -> tuple[()]:
        return ()

    def written(self, state: tuple[()], slots: Int[Array, " batch"]) -> tuple[()]:
        return state

    def sample(self, state: tuple[()], key: Array, batch_size: int, size: Int[Array, ""]) -> tuple[tuple[()], Draw]:
        slots = below(key, batch_size, jnp.maximum(size, 1))
        return state, equal_chances(slots, jnp.broadcast_to(size > 0, (batch_size,)), size)

    def clear(self, state: tuple[()]) -> tuple[()]:
        return state

    def chances(self, state: tuple[()], size: int) -> Chances:
        """Each stored item alike. O(size)."""
        return Chances.of(np.ones(size), Reason.NONE)


@functools.partial(jax.jit, static_argnums=1, static_argnames="another")
def below(
    key: Array, count: int, bound: Int[Array, ""] | Int[Array, " count"], *, another: bool = False
) -> Int[Array, " count"]:
    """Random integers in [0, bound), bound >= 1: the high word of 64 random bits times `bound`, in 32-bit arithmetic.

    Pass `another` for a second draw with the same key.
    """
    words, of_each = random_words.words_of(key), (bound,) if bound.ndim else ()

    def draw(_tables: Any, shared: tuple[Array, Array], place: Array, *own: Array) -> Array:
        words, bound = shared
        return scaled(*random_words.pairs_at(words, place, another), own[0] if own else bound)

    return map_entries(draw, count, (), (words, jnp.int32(0) if bound.ndim else bound), *of_each)


def scaled(high: UInt32[Array, " n"], low: UInt32[Array, " n"], bound: Array) -> Int[Array, " n"]:
    """The high word of 64 random bits times `bound`."""
    limit = bound.astype(jnp.uint32)
    carried = high * limit + _high_word(low, limit)
    overflow = (carried < high * limit).astype(jnp.uint32)
    return (_high_word(high, limit) + overflow).astype(jnp.int32)


def _high_word(a: UInt32[Array, " n"], b: UInt32[Array, "*n"]) -> UInt32[Array, " n"]:
    """The upper 32 bits of a * b."""
    a_high, a_low, b_high, b_low = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    return a_high * b_high + (middle >> 16) + ((a_low * b_high + (middle & 0xFFFF)) >> 16)
