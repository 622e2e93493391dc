"""Each stored item once an epoch, in any order equally often."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fbuf import Draw, Shuffled, ShuffledState
from fbuf.samplers.shuffled import swaps
from fbuf.samplers.uniform import below
from tests.fbuf.compiled import jit
from tests.fbuf.model import assert_same

pytestmark = pytest.mark.usefixtures("device")

draw_from = jit(Shuffled.sample, static_argnums=(0, 3))
start_of = jit(Shuffled.init, static_argnums=(0, 1))
RULES = [Shuffled(), Shuffled(drop_last=True), Shuffled(shuffle=False), Shuffled(True, False)]


class EpochModel:
    """Which items an epoch has returned."""

    def __init__(self, rule: Shuffled) -> None:
        self.rule, self.returned, self.length, self.finished = rule, list[int](), 0, 0

    def draw(self, count: int, size: int) -> int:
        """How many items a draw returns."""
        if size != self.length:
            self.returned = []
        left, enough = size - len(self.returned), count if self.rule.drop_last else 1
        if left < enough:
            self.finished += bool(left and self.returned)
            self.returned, left = [], size
        self.length = size
        return 0 if left < enough else min(left, count)

    def check(self, draw: Draw, count: int, size: int) -> None:
        """The draw returns new items of the epoch, and nothing in the rows behind them."""
        expected, slots = self.draw(count, size), np.asarray(draw.slots)
        np.testing.assert_array_equal(draw.valid, np.arange(count) < expected)
        new = slots[:expected].tolist()
        if not self.rule.shuffle:
            assert new == list(range(len(self.returned), len(self.returned) + expected))
        assert not set(new) & set(self.returned)
        assert len(set(new)) == expected
        assert set(new) <= set(range(size))
        assert not slots[expected:].any()
        self.returned += new
        self.finished += bool(expected) and len(self.returned) == size
        np.testing.assert_array_equal(draw.probability, np.full(count, 1 / max(size, 1), np.float32))
        assert (draw.size, draw.smallest) == (size, np.float32(1 / max(size, 1)))


def at_epoch(state: ShuffledState, epoch: int) -> ShuffledState:
    """The state at the beginning of a later epoch: all was moved in the one before."""
    moved = None if state.moved is None else jnp.full_like(state.moved, 3).at[:, 1].set(np.uint32(epoch - 1))
    return dataclasses.replace(state, moved=moved, epoch=jnp.uint32(epoch))


@functools.partial(jax.jit, static_argnums=2)
def drawn_side_by_side(keys: jax.Array, sizes: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    def step(state: ShuffledState, x: tuple[jax.Array, jax.Array]) -> tuple[ShuffledState, Any]:
        state, draw = Shuffled().sample(state, x[0], count, x[1])
        return state, (draw.slots, draw.valid)

    def once(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(step, Shuffled().init(40), (jax.random.split(key, sizes.size), sizes))[1]

    return jax.vmap(once)(keys)


def drawn(sizes: list[int], count: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Slots [times, draws, count] and their validity, of a draw for each size, with other keys each time."""
    keys = jax.random.split(jax.random.key(len(sizes)), 5_000)
    slots, valid = drawn_side_by_side(keys, jnp.asarray(sizes + sizes[-1:] * (13 - len(sizes)), jnp.int32), count)
    return np.asarray(slots)[:, : len(sizes)], np.asarray(valid)[:, : len(sizes)]


@pytest.mark.parametrize(
    ("size", "count", "before"),
    [
        (3, 3, 2),
        (4, 3, 0),
        (4, 7, 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 3, 1), (5, 3, 4))),
    ],
)
def test_all_orders_of_an_epoch_are_equally_likely(size: int, count: int, before: int) -> None:
    slots, valid = drawn([size + 1] * before + [size] * -(-size // count), count)
    rows = slots[:, before:][valid[:, before:]].reshape(-1, size)
    orders = {order: i for i, order in enumerate(itertools.permutations(range(size)))}
    found = np.bincount([orders[tuple(row)] for row in rows.tolist()], minlength=len(orders))
    assert stats.chisquare(found).pvalue > 1e-4


@functools.partial(jit, static_argnums=(1, 3))
def swaps_and_targets(key: jax.Array, count: int, left: jax.Array, bits: int) -> tuple[Any, jax.Array]:
    rows = jnp.arange(count)
    return swaps(key, count, left, bits), rows + below(key, count, jnp.maximum(left - rows, 1))


@pytest.mark.parametrize(
    ("count", "left", "bits"),
    [
        (1, 9, 4),
        *((6, left, 3) for left in (1, 5, 6, 7)),
        *((256, left, 20) for left in (256, 300, 10**6)),
        (1000, 2**31 - 9, 31),
    ],
)
def test_swaps_found_at_once_are_those_done_one_by_one(count: int, left: int, bits: int) -> None:
    (sources, holes, fillers), targets = swaps_and_targets(jax.random.key(left), count, jnp.int32(left), bits)
    targets, stands = np.asarray(targets).tolist(), dict[int, int]()
    for step, target in enumerate(targets[:left]):
        assert step <= target < left
        stands[step], stands[target] = stands.get(target, target), stands.get(step, step)
    taken = min(count, left)
    assert np.asarray(sources)[:taken].tolist() == [stands[row] for row in range(taken)]
    filled = {hole: filler for hole, filler in zip(holes.tolist(), fillers.tolist(), strict=True) if hole < left}
    assert filled == {place: held for place, held in stands.items() if place >= count}


@pytest.mark.parametrize(
    "rule", [RULES[0], RULES[3], *(pytest.param(rule, marks=pytest.mark.slow) for rule in RULES[1:3])], ids=repr
)
@given(
    happens=st.lists(st.tuples(st.sampled_from([0, 1, 3, 4, 5, 5, 9, 9, 9]), st.sampled_from([1, 4])), max_size=30),
    epoch=st.sampled_from([1, 2**32 - 4]),
)
def test_each_item_comes_once_an_epoch_while_the_size_grows_and_shrinks(
    rule: Shuffled, happens: list[tuple[int, int]], epoch: int
) -> None:
    state, model = at_epoch(start_of(rule, 9), epoch), EpochModel(rule)
    for i, (size, count) in enumerate(happens):
        state, draw = draw_from(rule, state, jax.random.key(i), count, jnp.int32(size))
        model.check(draw, count, size)
        assert (state.finished, state.position) == (model.finished, len(model.returned))


def test_what_an_epoch_moved_is_forgotten_before_its_number_comes_again() -> None:
    rule, capacity = Shuffled(), 7
    state = at_epoch(start_of(rule, capacity), 2**32 - 20)
    state, _ = draw_from(rule, state, jax.random.key(0), 7, jnp.int32(7))  # moves entries all over
    for i in range(40):
        state, draw = draw_from(rule, state, jax.random.key(i), 7, jnp.int32(1 + i % 2))
        assert draw.valid.any()
    age = np.asarray(state.epoch - state.moved[:capacity, 1])
    assert (age <= 2 * capacity).all()
    assert state.epoch < 40  # it passed 2^32


def test_draws_are_a_function_of_the_keys_of_their_epoch() -> None:
    rule, size = Shuffled(), jnp.int32(8)
    fresh, used = start_of(rule, 9), start_of(rule, 9)
    for i in range(5):
        used, _ = draw_from(rule, used, jax.random.key(i), 4, size)
    used = rule.restart(used)
    for i in range(3):
        fresh, draw = draw_from(rule, fresh, jax.random.key(100 + i), 4, size)
        used, other = draw_from(rule, used, jax.random.key(100 + i), 4, size)
        assert_same(draw, other)
