"""Random words from a key in one kernel: Threefry-2x32 (Salmon et al., 2011) with its rounds written out.

`jax.random.bits` loops over the rounds on the CPU, seventeen kernels each: 75 microseconds for 512 words.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_ANOTHER = np.uint32(2**31)  # a counter that `jax.random` with the same key does not reach
_PARITY = np.uint32(0x1BD11BDA)


def pairs(key: Array, count: int, *, another: bool = False) -> tuple[UInt32[Array, " count"], UInt32[Array, " count"]]:
    """`count` pairs of independent words of 32 random bits. The key, typed or raw, is used once. O(count).

    With `another` they are different words, for a second use of the key.
    """
    return pairs_at(words_of(key), jnp.arange(count, dtype=jnp.uint32), another)


def words_of(key: Array) -> UInt32[Array, "2"]:
    """The two words of a Threefry key; for another generator two words that it draws."""
    if jax.random.key_impl(key) != "threefry2x32":
        return jax.random.bits(key, (2,), jnp.uint32)
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def pairs_at(words: UInt32[Array, "2"], places: UInt32[Array, " n"], another: bool) -> tuple[Array, Array]:
    """Some entries of `pairs`."""
    return threefry(words, places, jnp.full(places.shape, _ANOTHER if another else 0, jnp.uint32))


def threefry(key: UInt32[Array, "2"], first: UInt32[Array, "*n"], second: UInt32[Array, "*n"]) -> tuple[Array, Array]:
    """The block cipher: two counters to two words, in 20 rounds."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    first, second = first + schedule[0], second + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            first = first + second
            second = first ^ ((second << np.uint32(distance)) | (second >> np.uint32(32 - distance)))
        first, second = first + schedule[(group + 1) % 3], second + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return first, second
