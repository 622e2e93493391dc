"""Items in proportion to their priority."""

import os
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from fbuf import Buffer, BufferState, Draw, Prioritized, importance_weights, priority_tree
from fbuf.samplers import prioritized
from tests.fbuf.compiled import extend, init, jit, sample, update
from tests.fbuf.model import assert_same, assert_tree_is_exact

pytestmark = pytest.mark.usefixtures("device")


HALF = Buffer(4, Prioritized(alpha=0.5, eps=0))
ONE, AT_ONCE = np.zeros(1, np.float32), 8


def filled(buffer: Buffer, count: int) -> BufferState:
    """A buffer with this many items in it, all new."""
    state = init(buffer, np.float32(0))
    if count > AT_ONCE:
        return extend(buffer, state, np.zeros(count, np.float32))[0]
    for _ in range(count):
        state, _ = extend(buffer, state, ONE)
    return state


def set_priorities(buffer: Buffer, state: BufferState, by_slot: dict[int, float]) -> BufferState:
    """The state after one update; of few slots it is filled up with slots out of range, to be compiled once."""
    unused = max(AT_ONCE - len(by_slot), 0)
    slots = np.asarray([*by_slot, *[-1] * unused], np.int32)
    return update(buffer, state, slots, np.asarray([*by_slot.values(), *[0] * unused], np.float32))


def given(buffer: Buffer, priorities: Any) -> BufferState:
    """A buffer whose items have these priorities."""
    return set_priorities(buffer, filled(buffer, len(priorities)), dict(enumerate(priorities)))


def leaves(buffer: Buffer, state: BufferState) -> np.ndarray:
    return np.asarray(state.sampler.tree.leaves[: buffer.capacity])


def test_a_priority_whose_power_is_not_finite_is_held_to_the_largest_that_is() -> None:
    buffer = Buffer(3, Prioritized(alpha=2, eps=0))
    state = given(buffer, [3e38, 3e38, 1])
    assert_tree_is_exact(state.sampler.tree)
    assert np.isfinite(priority_tree.total(state.sampler.tree))
    np.testing.assert_array_equal(state.sampler.priorities[:3], np.asarray([3e38, 3e38, 1], np.float32))
    _, _, draw = sample(buffer, state, jax.random.key(0), 64)
    assert set(np.asarray(draw.slots).tolist()) == {0, 1}
    np.testing.assert_array_equal(draw.probability, np.full(64, 0.5, np.float32))


PRIORITIES = np.random.default_rng(3).uniform(0.05, 4, 37).astype(np.float32)


@pytest.mark.parametrize("alpha", [0, 0.7])
def test_items_are_drawn_in_proportion_to_their_weighed_priority(alpha: float) -> None:
    buffer = Buffer(37, Prioritized(alpha=alpha, eps=0.1))
    _, _, draw = sample(buffer, given(buffer, PRIORITIES), jax.random.key(5), 200_000)
    chance = (PRIORITIES.astype(float) + 0.1) ** alpha
    chance /= chance.sum()
    np.testing.assert_allclose(draw.probability, chance[draw.slots], rtol=1e-5)
    counts = np.bincount(draw.slots, minlength=37)
    assert stats.chisquare(counts, 200_000 * chance).pvalue > 1e-4
    odd = np.bincount(draw.slots[1::2], minlength=37)
    table = np.stack([odd, counts - odd])
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_stratified_counts_stay_within_two_of_their_mean_and_average_to_it() -> None:
    """A slot of mass m in shares touches at most m + 2 shares and holds more than m - 2 whole ones.

    Only the two shares at its ends are left to chance, so the variance of a count is at most 1/2.
    """
    buffer, batch, rounds = Buffer(64, Prioritized(alpha=1, eps=0, stratified=True)), 500, 400
    state = given(buffer, PRIORITIES)
    mean = batch * PRIORITIES.astype(float) / PRIORITIES.sum(dtype=float)

    @jax.jit
    @jax.vmap
    def times_drawn(key: jax.Array) -> jax.Array:
        _, draw = buffer.sampler.sample(state.sampler, key, batch, jnp.int32(37))
        return jnp.zeros(64, jnp.int32).at[draw.slots].add(1)[:37]

    counts = np.asarray(times_drawn(jax.random.split(jax.random.key(2), rounds)))
    assert np.abs(counts - mean).max() < 2
    assert np.abs(counts.mean(0) - mean).max() < 5 * np.sqrt(0.5 / rounds)
    assert (counts.std(0) > 0).any()


def test_reweighting_gives_what_the_other_alpha_would_have_given() -> None:
    half, whole = HALF, Buffer(4, Prioritized(alpha=1.5, eps=0))
    priorities = [0, 3e-3, 40]
    state = half.sampler.reweight(given(half, priorities).sampler, jnp.float32(1.5))
    assert_same(state, given(whole, priorities).sampler)
    assert state.alpha == 1.5


def test_new_and_updated_items_follow_the_alpha_of_the_last_reweighting() -> None:
    buffer = HALF
    state = given(buffer, [4, 4])
    state = BufferState(state.items, state.ring, buffer.sampler.reweight(state.sampler, 1.0))
    state, _ = extend(buffer, state, ONE)
    state = set_priorities(buffer, state, {1: 3})
    np.testing.assert_array_equal(leaves(buffer, state), [4, 3, 4, 0])
    cleared = buffer.clear(state)
    assert buffer.size(cleared) == 0 and cleared.sampler.alpha == 1


def test_a_new_alpha_that_means_nothing_is_ignored() -> None:
    state = given(HALF, [4, 1])
    for alpha in (float("nan"), float("inf"), -1.0):
        assert_same(HALF.sampler.reweight(state.sampler, alpha), state.sampler)


@pytest.mark.parametrize("count", [7, 3995])
@pytest.mark.parametrize("total", [1e8, 0.1])
def test_stratified_shares_tile_the_total(total: float, count: int) -> None:
    as_users_compile = {"xla_cpu_use_fusion_emitters": True, "xla_backend_optimization_level": 3}
    options = {name: value for name, value in as_users_compile.items() if name in os.environ.get("XLA_FLAGS", "")}
    masses = jax.jit(prioritized.placed_masses, static_argnums=(1, 3), compiler_options=options)
    exact = np.float64(np.float32(total))
    for seed in range(20):
        mass, low = masses(jax.random.key(seed), count, jnp.float32(total), True)
        mass = np.asarray(mass, np.float64) + np.asarray(low, np.float64)
        place = mass * (count / exact)
        # Each lies in its share, to the 48 bits that the pair holds: a bound that one rounded division would miss.
        assert (np.abs(place - np.arange(count) - 0.5) <= 0.5 + 1e-6).all()
        assert mass.min() >= 0 and mass.max() <= exact


def test_weights_survive_a_chance_that_underflows() -> None:
    buffer = Buffer(4, Prioritized(alpha=1, eps=0))
    state = given(buffer, [1e-30, 1e10, 1e10])
    _, _, draw = sample(buffer, state, jax.random.key(0), 8)
    assert draw.valid.all() and draw.smallest > 0
    weights = importance_weights(draw, 0.4)
    assert (weights > 0).all() and (weights < 1e-12).all()


def test_one_trace_serves_every_alpha_and_beta() -> None:
    rule, traces = Prioritized(), []

    @jit
    def counted(state: Any, alpha: Any, beta: Any) -> Any:
        traces.append(alpha)
        return rule.reweight(state, alpha), importance_weights(draw_of([0.5, 0.25], 0.125, 4), beta)

    state = rule.init(9)
    for alpha in np.linspace(0, 1, 5, dtype=np.float32):
        state, _ = counted(state, alpha, 1 - alpha)
        assert state.alpha == alpha
    assert len(traces) == 1


# ---------------------------------------------------------------------- importance weights

NORMALIZE: list[Any] = ["buffer", "batch", "none"]
weights_of = jit(importance_weights, static_argnums=2)


def draw_of(probability: Any, smallest: float, size: int, valid: Any = True) -> Draw:
    chances = jnp.asarray(probability, jnp.float32)
    valid = jnp.broadcast_to(jnp.asarray(valid), chances.shape)
    return Draw(jnp.arange(chances.size), chances, valid, jnp.float32(smallest), jnp.int32(size))


@hypothesis.given(
    masses=st.lists(st.floats(1e-4, 1e4), min_size=6, max_size=6),
    picks=st.lists(st.integers(0, 5), min_size=8, max_size=8),
    beta=st.floats(0, 1),
)
def test_weights_are_those_of_the_paper(masses: list[float], picks: list[int], beta: float) -> None:
    probability = np.asarray(masses) / sum(masses)
    plain = (6 * probability[picks]) ** -beta
    largest = {"none": 1, "batch": plain.max(), "buffer": ((6 * probability) ** -beta).max()}
    for normalize in NORMALIZE:
        got = np.asarray(weights_of(draw_of(probability[picks], probability.min(), 6), jnp.float32(beta), normalize))
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, plain / largest[normalize], rtol=1e-4)
        assert normalize == "none" or (got <= 1).all()


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_rows_that_are_not_valid_weigh_nothing_and_change_no_other(normalize: Any) -> None:
    mixed, only = draw_of([0.5, 1e-30, 0.25], 0.125, 4, [True, False, True]), draw_of([0.5, 0.25], 0.125, 4)
    got = np.asarray(weights_of(mixed, 0.4, normalize))
    np.testing.assert_array_equal(got[[0, 2]], weights_of(only, 0.4, normalize))
    assert got[1] == 0
    np.testing.assert_array_equal(weights_of(draw_of([0, 0], np.inf, 0, False), 0.4, normalize), np.zeros(2))


def test_an_unknown_normalization_is_refused() -> None:
    with pytest.raises(ValueError, match="'buffer', 'batch' or 'none', got 'max'"):
        importance_weights(draw_of([0.5], 0.5, 2), 0.4, "max")  # type: ignore[arg-type]
