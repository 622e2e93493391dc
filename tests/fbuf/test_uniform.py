"""Every stored item equally often, nothing else ever."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fbuf import Uniform, random_words
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


def test_counts_over_ten_million_slots_vary_as_independent_draws_do() -> None:
    size, count = 10_000_000, 4_000_000
    counts, mean = np.bincount(drawn(size, count), minlength=size), count / size
    dispersion = np.mean((counts - mean) ** 2) / mean
    assert abs(dispersion - 1) < 5 * np.sqrt((1 / mean + 2) / size)


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**16 - 1, 2**16, 2**16 + 1, 10**9 + 7, 2**30, 2**31 - 1])
def test_a_draw_is_64_random_bits_times_the_bound_without_rounding(bound: int) -> None:
    high, low = (np.asarray(words).astype(object) for words in random_words.pairs(jax.random.key(bound), 1000))
    expected = (high * 2**32 + low) * bound >> 64
    np.testing.assert_array_equal(drawn(bound, 1000, seed=bound), expected.astype(np.int32))


def test_a_draw_says_how_likely_it_was() -> None:
    state, draw = Uniform().sample((), jax.random.key(0), 6, jnp.int32(8))
    assert state == ()
    np.testing.assert_array_equal(draw.probability, np.full(6, 0.125, np.float32))
    assert draw.smallest == 0.125
    assert draw.size == 8
    assert draw.valid.all()


def test_nothing_can_be_drawn_from_an_empty_buffer() -> None:
    _, draw = Uniform().sample((), jax.random.key(0), 6, jnp.int32(0))
    assert not draw.valid.any()
    np.testing.assert_array_equal(draw.slots, np.zeros(6, np.int32))
    assert np.isfinite(draw.probability).all()
