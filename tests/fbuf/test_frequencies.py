"""Real draws have the frequencies that `chances` says: chi-square over single draws of one state by many keys."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

from fbuf import (
    Buffer,
    Chances,
    Fifo,
    HighestRanked,
    Mixture,
    PerTrajectory,
    Prioritized,
    Shuffled,
    Slices,
    Uniform,
)
from tests.fbuf.chance_model import ChanceModel, unit
from tests.fbuf.compiled import extend, jit, sample, update
from tests.fbuf.test_slices import ENDS
from tests.fbuf.trajectory_model import rows

EVER = Prioritized(eps=0)
STRATIFIED = Prioritized(alpha=1, eps=0.125, stratified=True, new_items="highest_stored")
QUICK: list[Any] = [
    STRATIFIED,
    Shuffled(),
    Slices(4, EVER, least=2, burn_in=2),
]
SLOW: list[Any] = [
    Uniform(),
    EVER,
    Shuffled(drop_last=True),
    Shuffled(shuffle=False),
    Fifo(),
    Slices(4),
    Slices(4, least=1),
    Slices(4, least=2, burn_in=3),
    Slices(4, EVER),
    Slices(4, STRATIFIED, least=1, burn_in=1),
    Slices(4, Shuffled()),
    Slices(4, Shuffled(), least=1, burn_in=2),
    Slices(4, PerTrajectory()),
    Slices(4, PerTrajectory(), least=2, burn_in=2),
    Slices(4, PerTrajectory(Shuffled()), least=2),
    Slices(4, PerTrajectory(Shuffled(drop_last=True))),
]


@functools.partial(jit, static_argnums=(0, 3))
def draws_by_key(buffer: Any, state: Any, keys: jax.Array, rows: int) -> Any:
    """A draw of so many rows by each key, all from the same state."""
    return jax.vmap(lambda key: buffer.sample(state, key, rows)[2])(keys)


def keys(seed: int, count: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def probability_of(counts: np.ndarray, law: np.ndarray) -> float:
    """The p-value of counts of slots under a law. AssertionError for a count where the law has none."""
    assert not counts[law == 0].any()
    expected = counts.sum() * law / law.sum()
    rare = expected < 10  # together they are one cell
    seen, meant = ([*each[~rare], each[rare].sum()] for each in (counts, expected))
    cells = [(one, other) for one, other in zip(seen, meant, strict=True) if other > 0]
    if len(cells) < 2:
        return 1.0
    return float(stats.chisquare(*zip(*cells, strict=True), sum_check=False).pvalue)


def in_use(rule: Any, seed: int) -> ChanceModel:
    """A buffer that is full, with priorities, zero among them, and with an epoch that has returned some items."""
    model = ChanceModel(Buffer(20, rule, trajectories=ENDS, lanes=(2,)), seed)
    for _ in range(2):
        model.write(rows(model.random.choice(list("..........tu"), (15, 2))))
        for _ in range(6):
            model.update()
    model.draw(3)
    return model


def assert_frequencies(rule: Any, seed: int, count: int) -> float:
    """Each draw is one of the law: p-value of the starts, or slots."""
    model = in_use(rule, seed)
    law = model.buffer.chances(model.state)
    assert law.probability is not None and law.probability.any()
    draws = jax.tree.map(np.asarray, draws_by_key(model.buffer, model.state, keys(seed, count), unit(model.buffer)))
    assert draws.valid.all()
    slots = law.probability.size
    if law.starts is None:
        return probability_of(np.bincount(draws.slots.reshape(-1), minlength=slots), law.probability)
    # The rows of a slice are no independent draws: each alone is binomial.
    drawn = np.bincount(draws.slots[draws.mask], minlength=slots)
    assert not drawn[law.probability == 0].any()
    z = (drawn - count * law.probability) / np.sqrt(np.maximum(count * law.probability * (1 - law.probability), 1))
    assert stats.norm.sf(abs(z).max()) * slots > 1e-6
    return probability_of(np.bincount(draws.starts.reshape(-1), minlength=slots), law.starts)


@pytest.mark.parametrize("rule", QUICK, ids=str)
def test_items_are_drawn_as_often_as_is_said(rule: Any) -> None:
    assert assert_frequencies(rule, 5, 10_000) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*QUICK, *SLOW], ids=str)
def test_items_are_drawn_as_often_as_is_said_in_many_histories(rule: Any) -> None:
    found = [assert_frequencies(rule, seed, 60_000) for seed in range(50)]
    assert min(found) * len(found) > 1e-4
    unsure = [each for each in found if each < 1]  # Fifo has one choice
    assert not unsure or stats.kstest(unsure, "uniform").pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rule", [EVER, Slices(4, EVER, least=2), Slices(4, least=1), Uniform()], ids=str)
def test_rows_of_one_batch_are_drawn_as_often_as_is_said(rule: Any) -> None:
    """Rules with replacement draw the rows of a batch independently."""
    model = in_use(rule, 7)
    law = model.buffer.chances(model.state)
    _, _, draw = sample(model.buffer, model.state, jax.random.key(1), 200_000 * unit(model.buffer))
    first, chance = (draw.slots, law.probability) if law.starts is None else (draw.starts, law.starts)
    assert chance is not None
    assert probability_of(np.bincount(np.asarray(first), minlength=chance.size), chance) > 1e-4


def test_a_stratified_batch_has_each_item_as_often_as_is_said_up_to_its_two_ends() -> None:
    model, count = in_use(STRATIFIED, 5), 1000
    law = model.buffer.chances(model.state).probability
    draw = draws_by_key(model.buffer, model.state, keys(0, 1), count)
    drawn = np.bincount(np.asarray(draw.slots)[0], minlength=40)
    assert law is not None and (abs(drawn - count * law) < 2).all()


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Uniform(), EVER, Shuffled()], ids=str)
def test_items_of_highest_rank_are_drawn_as_often_as_is_said(sampler: Any) -> None:
    buffer, found = Buffer(20, sampler, writer=HighestRanked("rank")), []
    for seed in range(20):
        random = np.random.default_rng(seed)
        state: Any = buffer.init({"rank": np.float32(0)})
        for _ in range(3):
            state, _ = extend(buffer, state, {"rank": random.normal(size=15).astype(np.float32)})
            if buffer.sampler.keeps_priorities:
                state = update(buffer, state, np.arange(20, dtype=np.int32), random.uniform(size=20).astype(np.float32))
        state, _, _ = sample(buffer, state, jax.random.key(seed), 3)
        law = buffer.chances(state).probability
        draws = draws_by_key(buffer, state, keys(seed, 20_000), 1)
        assert law is not None
        found.append(probability_of(np.bincount(np.asarray(draws.slots).reshape(-1), minlength=20), law))
    assert min(found) * len(found) > 1e-4


# ---------------------------------------------------------------------- mixtures


def mixed(members: tuple[Any, ...], **how: Any) -> tuple[Mixture, Any, list[Chances]]:
    """A mixture of buffers in use, the states, and the laws of the members."""
    models = [in_use(rule, seed) for seed, rule in enumerate(members)]
    mixture = Mixture(tuple(model.buffer for model in models), **how)
    return mixture, tuple(model.state for model in models), [model.buffer.chances(model.state) for model in models]


@pytest.mark.slow
@pytest.mark.parametrize(
    "members", [(EVER, STRATIFIED), (Slices(4, EVER, least=2), Slices(4, PerTrajectory()))], ids=str
)
def test_members_that_are_drawn_come_as_often_as_is_said(members: tuple[Any, ...]) -> None:
    mixture, states, laws = mixed(members, shares=(1, 3), drawn=True)
    length = getattr(members[0], "length", 1)
    draws = jax.tree.map(np.asarray, draws_by_key(mixture, states, keys(3, 100_000), length))
    first = (draws.slots if draws.starts is None else draws.starts).reshape(-1)
    counts = np.bincount(draws.member.reshape(-1) * 40 + first, minlength=80)
    parts = mixture.parts(laws)
    law = np.concatenate(
        [
            part * (each.probability if each.starts is None else each.starts)  # type: ignore[operator]
            for part, each in zip(parts, laws, strict=True)
        ]
    )
    assert probability_of(counts, law) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("members", [(EVER, Shuffled(), Uniform()), (Slices(4), Slices(4, EVER, least=1))], ids=str)
def test_rows_of_fixed_shares_come_as_often_as_is_said(members: tuple[Any, ...]) -> None:
    mixture, states, laws = mixed(members)
    length = getattr(members[0], "length", 1)
    draws = jax.tree.map(np.asarray, draws_by_key(mixture, states, keys(3, 50_000), length * len(members)))
    first = draws.slots if draws.starts is None else draws.starts
    for member, law in enumerate(laws):
        chance = law.probability if law.starts is None else law.starts
        counts = np.bincount(first[draws.member == member], minlength=40)
        assert chance is not None and counts.sum() == 50_000
        assert probability_of(counts, chance) > 1e-4
