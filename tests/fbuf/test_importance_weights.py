"""Weights that make up for drawing some items more often."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf import Draw, importance_weights
from tests.fbuf.compiled import jit

pytestmark = pytest.mark.usefixtures("device")

NORMALIZE = ["buffer", "batch", "none"]

weights = jit(importance_weights, static_argnums=2)


def draw_of(probability: Any, smallest: float, size: int, valid: Any = True) -> Draw:
    probability = jnp.asarray(probability, jnp.float32)
    return Draw(
        slots=jnp.arange(probability.size),
        probability=probability,
        valid=jnp.broadcast_to(jnp.asarray(valid), probability.shape),
        smallest=jnp.float32(smallest),
        size=jnp.int32(size),
    )


@given(
    masses=st.lists(st.floats(1e-4, 1e4), min_size=6, max_size=6),
    picks=st.lists(st.integers(0, 5), min_size=8, max_size=8),
    beta=st.floats(0, 1),
)
def test_weights_are_those_of_the_paper(masses: list[float], picks: list[int], beta: float) -> None:
    probability = np.asarray(masses) / sum(masses)
    drawn = probability[picks]
    draw = draw_of(drawn, probability.min(), 6)
    plain = (6 * drawn) ** -beta
    expected = {
        "none": plain,
        "batch": plain / plain.max(),
        "buffer": plain / ((6 * probability) ** -beta).max(),
    }
    for normalize in NORMALIZE:
        got = np.asarray(weights(draw, jnp.float32(beta), normalize))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected[normalize], rtol=1e-4)


@pytest.mark.parametrize("normalize", ["buffer", "batch"])
def test_no_weight_is_above_one(normalize: str) -> None:
    for share in range(1, 100):
        least = np.float32(share / 18203)
        assert (weights(draw_of([least] * 4 + [0.5] * 4, least, 9), 1.0, normalize) <= 1).all()


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_rows_that_are_not_valid_weigh_nothing_and_change_no_other(normalize: str, beta: float) -> None:
    mixed = draw_of([0.5, 1e-30, 0.25], 0.125, 4, [True, False, True])
    only = draw_of([0.5, 0.25], 0.125, 4)
    np.testing.assert_array_equal(weights(mixed, beta, normalize)[np.asarray([0, 2])], weights(only, beta, normalize))
    assert weights(mixed, beta, normalize)[1] == 0
    nothing = draw_of([0, 0], np.inf, 0, False)
    np.testing.assert_array_equal(weights(nothing, beta, normalize), np.zeros(2))


def test_beta_may_be_annealed_without_a_new_trace() -> None:
    traces = []

    @functools.partial(jax.jit, static_argnums=2)
    def counted(draw: Draw, beta: jax.Array, normalize: str) -> jax.Array:
        traces.append(normalize)
        return importance_weights(draw, beta, normalize)

    for normalize in NORMALIZE:
        for beta in np.linspace(0.4, 1, 10, dtype=np.float32):
            counted(draw_of([0.5, 0.25], 0.125, 4), beta, normalize)
    assert traces == NORMALIZE


def test_an_unknown_normalization_is_refused() -> None:
    with pytest.raises(ValueError, match="'buffer', 'batch' or 'none', got 'max'"):
        importance_weights(draw_of([0.5], 0.5, 2), 0.4, "max")
