"""Threefry-2x32 against the answers that its authors published, and against JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import random_words

pytestmark = pytest.mark.usefixtures("device")

ONES = 2**32 - 1
# Random123's kat_vectors: counter, key, answer.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_published_answers_are_given(
    counter: tuple[int, int], key: tuple[int, int], answer: tuple[int, int]
) -> None:
    first, second = (jnp.full(3, word, jnp.uint32) for word in counter)
    found = random_words.threefry(jnp.asarray(key, jnp.uint32), first, second)
    np.testing.assert_array_equal(found, [[word] * 3 for word in answer])


def test_typed_and_raw_keys_give_the_same_and_another_draw_gives_others() -> None:
    typed, raw = jax.random.key(7), jax.random.PRNGKey(7)
    words = np.asarray(random_words.pairs(typed, 1000))
    np.testing.assert_array_equal(random_words.pairs(raw, 1000), words)
    others = np.asarray(random_words.pairs(typed, 1000, another=True))
    assert len(np.unique([words, others])) > 3990


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_keys_of_other_generators_give_words_of_their_own(kind: str) -> None:
    words = [np.asarray(random_words.pairs(jax.random.key(seed, impl=kind), 50)) for seed in (3, 4)]
    assert len(np.unique(words)) == 200
