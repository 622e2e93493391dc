"""Every stored item equally often, nothing else ever."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fbuf import random_words
from fbuf.samplers.uniform import below

pytestmark = pytest.mark.usefixtures("device")

draw_below = jax.jit(below, static_argnums=1)


def drawn(size: int, count: int, seed: int = 0) -> np.ndarray:
    return np.asarray(draw_below(jax.random.key(seed), count, jnp.int32(size)))


@pytest.mark.parametrize("size", [2, 3, 7, 37, 1000])
def test_slots_in_use_are_drawn_equally_often(size: int) -> None:
    counts = np.bincount(drawn(size, 200_000, seed=size), minlength=size)
    assert len(counts) == size
    assert stats.chisquare(counts).pvalue > 1e-4


def test_draws_do_not_depend_on_each_other() -> None:
    slots = drawn(6, 200_000)
    pairs = np.bincount(slots[:-1:2] * 6 + slots[1::2], minlength=36)
    assert stats.chisquare(pairs).pvalue > 1e-4


def test_neighbours_are_told_apart_in_the_largest_buffer() -> None:
    slots = drawn(2**31 - 1, 200_000)
    assert (slots >= 0).all()
    assert stats.chisquare(np.bincount(slots % 128, minlength=128)).pvalue > 1e-4
    assert stats.chisquare(np.bincount(slots >> 24, minlength=128)).pvalue > 1e-4


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**16 - 1, 2**16, 2**16 + 1, 10**9 + 7, 2**30, 2**31 - 1])
def test_a_draw_is_64_random_bits_times_the_bound_without_rounding(bound: int) -> None:
    high, low = (np.asarray(words).astype(object) for words in random_words.pairs(jax.random.key(bound), 1000))
    expected = (high * 2**32 + low) * bound >> 64
    np.testing.assert_array_equal(drawn(bound, 1000, seed=bound), expected.astype(np.int32))
