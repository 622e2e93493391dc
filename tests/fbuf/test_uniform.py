"""Random words and integers: each equally often, and bit for bit what is published."""

from typing import Any

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


@pytest.mark.parametrize("size", [2, 37, 1000])
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


@pytest.mark.parametrize("bound", [1, 3, 2**16 - 1, 2**16 + 1, 10**9 + 7, 2**31 - 1])
def test_a_draw_is_64_random_bits_times_the_bound_without_rounding(bound: int) -> None:
    high, low = (np.asarray(words).astype(object) for words in random_words.pairs(jax.random.key(bound), 1000))
    expected = (high * 2**32 + low) * bound >> 64
    np.testing.assert_array_equal(drawn(bound, 1000, seed=bound), expected.astype(np.int32))


ONES = 2**32 - 1
# Random123's kat_vectors: counter, key, answer.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_threefry_gives_the_published_answers(counter: Any, key: Any, answer: Any) -> None:
    first, second = (jnp.full(3, word, jnp.uint32) for word in counter)
    found = random_words.threefry(jnp.asarray(key, jnp.uint32), first, second)
    np.testing.assert_array_equal(found, [[word] * 3 for word in answer])


def test_keys_of_every_kind_give_words_of_their_own() -> None:
    typed, raw = jax.random.key(7), jax.random.PRNGKey(7)
    words = np.asarray(random_words.pairs(typed, 1000))
    np.testing.assert_array_equal(random_words.pairs(raw, 1000), words)
    others = np.asarray(random_words.pairs(typed, 1000, another=True))
    assert len(np.unique([words, others])) > 3990
    of_rbg = [np.asarray(random_words.pairs(jax.random.key(seed, impl="rbg"), 50)) for seed in (3, 4)]
    assert len(np.unique(of_rbg)) == 200
