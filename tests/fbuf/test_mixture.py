"""One batch from several buffers: whose rows, with which chance, and what comes back to whom."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fbuf import (
    Buffer,
    BufferState,
    Fifo,
    Mixture,
    MixtureDraw,
    Prioritized,
    Shuffled,
    Slices,
    Trajectories,
    importance_weights,
)
from fbuf.mixture import apportioned
from tests.fbuf.compiled import extend, init, jit, update
from tests.fbuf.compiled import sample_mixture as sample
from tests.fbuf.compiled import update_mixture as update_all
from tests.fbuf.model import assert_same

pytestmark = pytest.mark.usefixtures("device")

States = tuple[BufferState, ...]


def filled(mixture: Mixture, *rows: int) -> States:
    """States with that many rows in each member, all items different: member * 1000 + slot."""
    states = []
    for i, (buffer, count) in enumerate(zip(mixture.buffers, rows, strict=True)):
        state = init(buffer, np.float32(0))
        if count:
            values = np.arange(count * buffer.items_per_row, dtype=np.float32).reshape(count, *buffer.lanes)
            state, _ = extend(buffer, state, 1000 * i + values)
        states.append(state)
    return tuple(states)


def parts(draw: MixtureDraw) -> list[int]:
    return np.bincount(np.asarray(draw.member)).tolist()


@pytest.mark.parametrize(
    ("shares", "total", "counts"),
    [
        ((1, 1), 7, [4, 3]),
        ((0.25, 0.75), 256, [64, 192]),
        ((0.1, 0.2, 0.7), 1, [0, 0, 1]),
        ((1, 1, 1), 2, [1, 1, 0]),
        ((0, 1, 2), 10, [0, 3, 7]),
        ((0.47, 0.16, 0.158, 0.12, 0.061, 0.031), 10, [5, 2, 1, 1, 1, 0]),
        ((1e-30, 1), 5, [0, 5]),
        ((1e300, 1e300), 4, [2, 2]),
    ],
)
def test_fixed_shares_are_rounded_by_largest_remainders(shares: Any, total: int, counts: list[int]) -> None:
    assert apportioned(shares, total) == counts


def test_each_member_gives_its_rows_in_turn() -> None:
    mixture = Mixture((Buffer(5, lanes=(2,)), Buffer(9, Prioritized(alpha=1, eps=0))), (1, 3))
    states = filled(mixture, 3, 4)
    states = (states[0], update(mixture.buffers[1], states[1], np.arange(4), np.asarray([1, 2, 3, 2], np.float32)))
    states, items, draw = sample(mixture, states, jax.random.key(0), 8)
    assert mixture.size(states) == 10
    np.testing.assert_array_equal(draw.member, [0] * 2 + [1] * 6)
    np.testing.assert_array_equal(items, 1000 * draw.member + draw.slots)
    own = [np.full(6, 1 / 6), np.asarray([1, 2, 3, 2]) / 8]
    chances = [[0.25, 0.75][member] * own[member][slot] for member, slot in zip(draw.member, draw.slots, strict=True)]
    np.testing.assert_allclose(draw.probability, chances, rtol=1e-6)
    np.testing.assert_allclose(draw.smallest, 0.25 / 6, rtol=1e-6)
    assert draw.valid.all()
    assert draw.size == 10
    assert draw.member.dtype == draw.slots.dtype == draw.size.dtype == jnp.int32


@pytest.mark.parametrize(
    ("shares", "drawn"),
    [(None, False), ((0.3, 0.7), True), pytest.param((1, 0), True, marks=pytest.mark.slow)],
    ids=str,
)
def test_items_are_drawn_as_often_as_the_draw_says(shares: Any, drawn: bool) -> None:
    mixture = Mixture((Buffer(4), Buffer(5, Prioritized(alpha=1, eps=0))), shares, drawn)
    states = filled(mixture, 3, 3)
    states = (states[0], update(mixture.buffers[1], states[1], np.arange(3), np.asarray([1, 2, 3], np.float32)))
    keys = jax.random.split(jax.random.key(3), 4_000)
    _, items, draw = jit(jax.vmap(lambda key: mixture.sample(states, key, 8)))(keys)
    draw = jax.tree.map(lambda leaf: leaf.reshape(-1) if leaf.ndim == 2 else leaf[0], draw)
    assert draw.valid.all()
    np.testing.assert_array_equal(items.reshape(-1), 1000 * draw.member + draw.slots)
    place = np.asarray(draw.member * 3 + draw.slots)
    found = np.bincount(place, minlength=6)
    parts = np.asarray(shares or (1, 1)) / sum(shares or (1, 1))
    if not drawn:
        parts = np.asarray(apportioned(parts, 8)) / 8
    law = np.concatenate([parts[0] * np.full(3, 1 / 3), parts[1] * np.asarray([1, 2, 3]) / 6])
    assert not found[law == 0].any()
    assert stats.chisquare(found[law > 0], law[law > 0] * place.size).pvalue > 1e-4
    np.testing.assert_allclose(draw.probability, law[place], rtol=1e-5)
    np.testing.assert_allclose(draw.smallest, law[law > 0].min(), rtol=1e-5)
    assert draw.size == 3 * np.count_nonzero(parts)
    np.testing.assert_allclose(importance_weights(draw, 1.0, "none"), 1 / (draw.size * law[place]), rtol=1e-5)
    np.testing.assert_allclose(importance_weights(draw, 1.0), law[law > 0].min() / law[place], rtol=1e-5)


@pytest.mark.parametrize("drawn", [False, True])
def test_what_a_member_without_items_leaves(drawn: bool) -> None:
    for empty in range(3):
        check_what_is_left(drawn, empty)


def check_what_is_left(drawn: bool, empty: int) -> None:
    mixture = Mixture((Buffer(4), Buffer(4), Buffer(4, Prioritized())), (1, 2, 1), drawn)
    states = filled(mixture, *(0 if i == empty else 2 for i in range(3)))
    _, items, draw = sample(mixture, states, jax.random.key(0), 64)
    valid = np.asarray(draw.valid)
    if drawn:
        assert valid.all()
        assert set(draw.member.tolist()) == {0, 1, 2} - {empty}
    else:
        np.testing.assert_array_equal(valid, draw.member != empty)
        assert parts(draw) == [16, 32, 16]
    parts_of = np.asarray([1, 2, 1]) * (np.arange(3) != empty)
    law = (parts_of / parts_of.sum())[np.asarray(draw.member)] / 2
    np.testing.assert_allclose(draw.probability[valid], law[valid], rtol=1e-6)
    np.testing.assert_array_equal(items[valid], (1000 * draw.member + draw.slots)[valid])
    assert draw.size == 4
    weights = importance_weights(draw, 0.5)
    assert np.isfinite(weights).all()
    assert (np.asarray(weights > 0) == valid).all()


def test_priorities_go_to_the_member_that_a_row_came_from() -> None:
    mixture = Mixture((Buffer(6, Prioritized()), Buffer(4), Buffer(5, Prioritized(), lanes=(2,))), (1, 1, 2))
    states = filled(mixture, 4, 4, 3)
    states, _, draw = sample(mixture, states, jax.random.key(1), 16)
    priorities = np.arange(1, 17, dtype=np.float32)
    priorities[[0, 5, 9]] = [np.nan, -1, np.inf]  # of members 0, 1 and 2
    after = update_all(mixture, states, draw, priorities)
    assert_same(after[1], states[1])
    for i, rows in ((0, slice(0, 4)), (2, slice(8, 16))):
        assert_same(after[i], update(mixture.buffers[i], states[i], draw.slots[rows], priorities[rows]))
        assert after[i].sampler.refused == 1
    # Any rows of a draw will do, in any order.
    rows = jnp.asarray([15, 1, 6, 8])
    some = dataclasses.replace(draw, slots=draw.slots[rows], member=draw.member[rows], valid=draw.valid[rows])
    after = update_all(mixture, states, some, 3.0)
    assert_same(after[0], update(mixture.buffers[0], states[0], draw.slots[1:2], np.full(1, 3, np.float32)))
    last = update(mixture.buffers[2], states[2], draw.slots[jnp.asarray([15, 8])], np.full(2, 3, np.float32))
    assert_same(after[2], last)


def test_members_that_return_each_item_once_do_so_in_a_mixture() -> None:
    mixture = Mixture((Buffer(6, Shuffled()), Buffer(5, Fifo())), (4, 2))
    states = filled(mixture, 6, 5)
    seen: list[list[int]] = [[], []]
    for i, expected in enumerate([(4, 2), (2, 2), (4, 1), (2, 0)]):
        states, _, draw = sample(mixture, states, jax.random.key(i), 6)
        for member in range(2):
            own = np.asarray(draw.valid & (draw.member == member))
            assert own.sum() == expected[member]
            seen[member] += draw.slots[own].tolist()
            chance = expected[member] / sum(expected) / [6, 5][member]
            np.testing.assert_allclose(draw.probability[own], chance, rtol=1e-6)
    assert sorted(seen[0][:6]) == sorted(seen[0][6:]) == list(range(6))
    assert seen[1] == list(range(5))


A, B = Buffer(4), Buffer(5, Prioritized())


def test_a_draw_that_cannot_be_is_refused_while_tracing() -> None:
    mixture, key = Mixture((A, B), (1, 2)), jax.random.key(0)
    states = tuple(init(buffer, np.float32(0)) for buffer in (A, B))
    with pytest.raises(ValueError, match="one state for each of 2 buffers"):
        sample(mixture, states[:1], key, 3)
    with pytest.raises(ValueError, match="items must be alike: those of buffer 1"):
        sample(mixture, (states[0], init(B, np.int32(0))), key, 3)
    _, _, draw = sample(mixture, states, key, 3)
    with pytest.raises(ValueError, match="need the shape of slots"):
        mixture.update(states, draw, np.ones(2, np.float32))
    with pytest.raises(TypeError, match="no member keeps priorities"):
        Mixture((A, A)).update((states[0], states[0]), draw, np.ones(3, np.float32))
    sliced = Mixture((Buffer(9, Slices(3), trajectories=Trajectories("done")),))
    with pytest.raises(ValueError, match="not a multiple of the slice length, 3"):
        sample(sliced, (None,), key, 8)
