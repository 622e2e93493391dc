"""Slices of trajectories: every legal start, no other, and the right rows; against brute force over random histories."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fbuf import (
    Buffer,
    PerTrajectory,
    Prioritized,
    Reason,
    Shuffled,
    Slices,
    Trajectories,
    Uniform,
    importance_weights,
)
from tests.fbuf.compiled import clear, extend, sample, update
from tests.fbuf.model import PrioritiesModel, assert_same, assert_tree_is_exact
from tests.fbuf.trajectory_model import (
    CODES,
    ITEM,
    Rows,
    TrajectoriesModel,
    begun_long_ago,
    histories,
    renumbered,
    rows,
    shifted,
)

pytestmark = pytest.mark.usefixtures("device")

ENDS, ALL = Trajectories("terminated", "truncated"), Trajectories("terminated", "truncated", "id")
RANKED = Prioritized(alpha=1, eps=0.125, stratified=True, new_items="highest_stored")
EVER = Prioritized(alpha=0.5, eps=0)
MANY = 2048  # draws, in which each start of a small ring comes

CASES: list[Any] = [
    (Buffer(7, Slices(3), trajectories=ALL), (1, 3, 11)),
    (Buffer(6, Slices(4, least=2, burn_in=1), trajectories=ENDS, lanes=(2,)), (1, 8)),
    (Buffer(7, Slices(3, EVER), trajectories=ENDS), (1, 3, 11)),
    (Buffer(5, Slices(3, RANKED, least=2, burn_in=2), trajectories=ALL, lanes=(2, 1)), (1, 3, 11)),
    (Buffer(7, Slices(3, PerTrajectory()), trajectories=ALL, lanes=(2,)), (1, 3, 11)),
    (Buffer(7, Slices(2, Shuffled()), trajectories=ENDS), (1, 9)),
    (Buffer(7, Slices(3, EVER, period=2), trajectories=ALL, lanes=(2,)), (1, 3, 11)),
]
MORE: list[Any] = [
    (Buffer(7, Slices(7), trajectories=ALL), (1, 3, 11)),
    (Buffer(4, Slices(3, least=1), trajectories=ALL, lanes=(3,)), (1, 2, 9)),
    (Buffer(1, Slices(1), trajectories=ENDS), (1, 3)),
    (Buffer(6, Slices(2, burn_in=4), trajectories=ALL), (1, 6, 13)),
    (Buffer(6, Slices(6, EVER, least=5), trajectories=ALL, lanes=(2,)), (1, 2, 7)),
    (Buffer(6, Slices(2, RANKED, least=1), trajectories=ENDS), (1, 5)),
    (Buffer(1, Slices(1, PerTrajectory()), trajectories=ALL, lanes=(2,)), (1, 3)),
    (Buffer(7, Slices(4, PerTrajectory(), least=1, burn_in=3), trajectories=ENDS), (1, 3, 7)),
    (Buffer(6, Slices(4, PerTrajectory(), least=3), trajectories=ALL, lanes=(3,)), (1, 2, 14)),
    (Buffer(6, Slices(6, PerTrajectory()), trajectories=ENDS), (1, 2, 14)),
    (Buffer(6, Slices(3, Shuffled(), least=1), trajectories=ALL, lanes=(2,)), (1, 2, 14)),
    (Buffer(6, Slices(3, Shuffled(), least=2, burn_in=1), trajectories=ALL, lanes=(2,)), (1, 2, 14)),
    (Buffer(7, Slices(3, PerTrajectory(Shuffled()), least=2), trajectories=ALL, lanes=(2,)), (1, 3, 11)),
    (Buffer(7, Slices(3, PerTrajectory(Shuffled(drop_last=True))), trajectories=ENDS), (1, 3, 11)),
    (Buffer(7, Slices(2, period=2), trajectories=ALL, lanes=(2,)), (1, 3, 11)),
    (Buffer(7, Slices(2, period=3, least=1, burn_in=1), trajectories=ENDS), (1, 3, 11)),
    (Buffer(7, Slices(2, RANKED, period=3, least=1), trajectories=ALL, lanes=(2,)), (1, 2, 9)),
    (Buffer(6, Slices(3, Shuffled(), least=2, period=2), trajectories=ALL, lanes=(2,)), (1, 2, 14)),
]


def name(what: Any) -> str:
    return f"{what.capacity}x{what.lanes}-{what.sampler}" if isinstance(what, Buffer) else str(what)


class Play:
    """A buffer and its model, side by side."""

    def __init__(self, buffer: Buffer, seed: int = 0) -> None:
        assert isinstance(buffer.sampler, Slices)
        self.buffer, self.rule, self.starts = buffer, buffer.sampler, buffer.sampler.starts
        self.random, self.state = np.random.default_rng(seed), buffer.init(ITEM)
        self.model, self.priorities = TrajectoriesModel(buffer.capacity, buffer.items_per_row), None
        if isinstance(self.starts, Prioritized):
            self._forget(self.starts.alpha)

    def _forget(self, alpha: float) -> None:
        assert isinstance(self.starts, Prioritized)
        slots = self.buffer.capacity * self.buffer.items_per_row
        self.priorities = PrioritiesModel(slots, alpha, self.starts.eps, self.starts.new_items)

    def clear(self) -> None:
        self.state = clear(self.buffer, self.state)
        self.model.clear()
        if self.priorities is not None:
            self._forget(self.priorities.alpha)

    def write(self, new: Rows) -> None:
        assert self.buffer.trajectories is not None
        serials = self.model.write(new.ended, new.id if self.buffer.trajectories.id else None)
        self.state, slots = extend(self.buffer, self.state, new.batch(serials, self.buffer.lanes))
        if self.priorities is not None:
            self.priorities.written(np.asarray(slots)[-self.buffer.capacity :].reshape(-1))

    def update(self) -> None:
        """New priorities for a few slots, stored or not, starts or not, equal or not, some of no use."""
        assert self.priorities is not None
        count = self.buffer.capacity * self.buffer.items_per_row
        slots = self.random.integers(-1, count + 1, 6).astype(np.int32)
        given = self.random.choice([0.0, 0.25, 0.5, 1, 2, 4, np.nan], 6).astype(np.float32)
        self.state = update(self.buffer, self.state, slots, given)
        self.priorities.update(slots, given)

    def reweight(self) -> None:
        assert self.priorities is not None and isinstance(self.starts, Prioritized)
        self.priorities.alpha = float(self.random.choice([0.5, 1, 2]))
        starts = self.starts.reweight(self.state.sampler.starts, self.priorities.alpha)
        self.state = dataclasses.replace(self.state, sampler=dataclasses.replace(self.state.sampler, starts=starts))

    def chances(self) -> dict[int, float]:
        """What the model says of each start that can be drawn."""
        if isinstance(self.starts, PerTrajectory):
            return self.model.chances_per_trajectory(self.rule.shortest, self.rule.length)
        weights = None if self.priorities is None else self.priorities.values()
        return self.model.chances(self.rule.shortest, weights, self.rule.period)

    def drawable(self) -> int:
        """How many starts there are, or trajectories."""
        if isinstance(self.starts, PerTrajectory):
            return sum(len(each.slots) >= self.rule.shortest for each in self.model.stored())
        return len(self.model.starts(self.rule.shortest, self.rule.period))

    def draw(self, count: int) -> Any:
        """A draw of which all rows are what the model says."""
        key = jax.random.key(int(self.random.integers(2**31)))
        self.state, items, draw = sample(self.buffer, self.state, key, count * self.rule.length)
        draw, serials = jax.tree.map(np.asarray, draw), np.asarray(items["serial"])
        chances = self.chances()
        assert draw.size == self.drawable()
        assert draw.starts.shape == (count,) and draw.mask.shape == draw.slots.shape == serials.shape
        assert not draw.mask[~draw.valid].any()
        assert set(draw.starts[draw.valid].tolist()) <= set(chances)
        if chances:
            if isinstance(self.starts, PerTrajectory):
                assert draw.smallest == draw.probability.min()
            else:
                np.testing.assert_allclose(draw.smallest, min(chances.values()), rtol=1e-5)
        for start in np.unique(draw.starts[draw.valid]).tolist():
            of_start = draw.valid & (draw.starts == start)
            window, inside = self.model.window(start, self.rule.length, self.rule.burn_in)
            np.testing.assert_array_equal(serials[of_start], [window] * of_start.sum())
            np.testing.assert_array_equal(draw.mask[of_start], [inside] * of_start.sum())
            np.testing.assert_allclose(draw.probability[of_start], chances[start], rtol=1e-5)
        return draw

    def draw_all(self) -> None:
        """Enough draws that each start comes, and no other; with Shuffled, each once an epoch."""
        if isinstance(self.starts, Shuffled):
            wanted, found = set(self.chances()), list[int]()
            for _ in range(0, len(wanted) + 1, 4):
                draw = self.draw(4)
                assert draw.valid.sum() == min(4, len(wanted) - len(found))
                found += draw.starts[draw.valid].tolist()
                if len(found) == len(wanted):
                    break
            assert sorted(found) == sorted(wanted)
            return
        draw, chances = self.draw(MANY), self.chances()
        if isinstance(self.starts, PerTrajectory) and isinstance(self.starts.trajectories, Shuffled):
            assert draw.valid.sum() == (0 if self.starts.trajectories.drop_last else self.drawable())
            return
        assert draw.valid.all() if chances else not draw.valid.any()
        likely = {slot for slot, chance in chances.items() if chance * MANY > 25}
        assert likely <= set(draw.starts.tolist())
        if self.priorities is None:
            assert likely == set(chances)
        else:
            assert_tree_is_exact(self.state.sampler.starts.tree)


def played(buffer: Buffer, *writes: Any, seed: int = 0) -> Play:
    """A buffer of one lane, or of these, after writes of codes, one string for a row."""
    play = Play(buffer, seed)
    for codes in writes:
        play.write(rows([list(code) for code in codes]))
    return play


# ---------------------------------------------------------------------- tests


def assert_history(buffer: Buffer, counts: tuple[int, ...], data: Any) -> None:
    play = Play(buffer, data.draw(st.integers(0, 2**32 - 1)))
    for new in data.draw(histories(buffer.items_per_row, counts)):
        if new is None:
            play.clear()
        else:
            play.write(new)
        if play.priorities is not None:
            play.update()
            if play.random.random() < 0.3:
                play.reweight()
        play.draw_all()


@pytest.mark.parametrize(("buffer", "counts"), CASES[2:4], ids=name)  # all of them below
@settings(max_examples=5)
@given(data=st.data())
def test_every_legal_slice_and_no_other_is_drawn(buffer: Buffer, counts: tuple[int, ...], data: Any) -> None:
    assert_history(buffer, counts, data)


@pytest.mark.slow
@pytest.mark.parametrize(("buffer", "counts"), [*CASES, *MORE], ids=name)
@settings(max_examples=60)
@given(data=st.data())
def test_every_legal_slice_and_no_other_is_drawn_of_many_buffers(
    buffer: Buffer, counts: tuple[int, ...], data: Any
) -> None:
    assert_history(buffer, counts, data)


# -------------------------------------------------------------------------- laws


LAWS = [Slices(4, least=2), Slices(4, EVER), Slices(4, PerTrajectory(), least=2)]


@pytest.mark.parametrize("rule", LAWS, ids=str)
def test_starts_are_drawn_as_often_as_is_said(rule: Slices) -> None:
    play = Play(Buffer(40, rule, trajectories=ENDS, lanes=(2,)), 3)
    for _ in range(3):
        play.write(rows(play.random.choice(list("......tu"), (25, 2))))
    for _ in range(20 if play.priorities is not None else 0):
        play.update()
    chances, count = play.chances(), 100_000
    assert len(chances) > 10
    _, _, draw = sample(play.buffer, play.state, jax.random.key(7), count * 4)
    counts = np.bincount(np.asarray(draw.starts), minlength=80)
    starts, expected = np.asarray([*chances]), np.asarray([*chances.values()])
    assert counts[starts].sum() == count
    assert stats.chisquare(counts[starts], count * expected / expected.sum()).pvalue > 1e-4
    odd = np.bincount(np.asarray(draw.starts[1::2]), minlength=80)[starts]
    assert stats.chi2_contingency([odd, counts[starts] - odd]).pvalue > 1e-4


# Which steps flashbax 0.1.3 draws as starts of 4 steps after 8, 16 and 36 rows in a ring of 16: (period, starts).
FLASHBAX = [(2, ([0, 2, 4], [*range(0, 13, 2)], [*range(20, 33, 2)])), (4, ([0, 4], [0, 4, 8, 12], [20, 24, 28, 32]))]


@pytest.mark.parametrize(("period", "wanted"), FLASHBAX)
@pytest.mark.parametrize("starts", [Uniform(), Prioritized()], ids=str)
def test_a_period_has_the_starts_of_flashbax(starts: Any, period: int, wanted: Any) -> None:
    buffer = Buffer(16, Slices(4, starts, period=period), trajectories=Trajectories(endless=True), lanes=(2,))
    state, found = buffer.init(np.int32(0)), []
    for chunk in range(9):
        rows = np.repeat(np.arange(4 * chunk, 4 * chunk + 4, dtype=np.int32)[:, None], 2, 1)
        state, _ = extend(buffer, state, rows)
        if chunk in (1, 3, 8):
            _, steps, draw = sample(buffer, state, jax.random.key(chunk), 4 * 512)
            assert draw.valid.all() and draw.size == 2 * len(wanted[len(found)])
            assert (np.diff(steps, axis=1) == 1).all()
            found.append(sorted({*np.asarray(steps)[:, 0].tolist()}))
    assert found == [*wanted]


def test_items_between_the_multiples_are_excluded() -> None:
    buffer = Buffer(8, Slices(1, period=3), trajectories=Trajectories(endless=True))
    state, _ = extend(buffer, buffer.init(np.int32(0)), np.arange(5, dtype=np.int32))
    law = buffer.chances(state)
    assert law.probability is not None
    np.testing.assert_allclose(law.probability, [0.5, 0, 0, 0.5, 0, 0, 0, 0])
    assert [Reason(each).label for each in law.reason[:4]] == ["none", "excluded", "excluded", "none"]


def test_periods_that_do_not_work_are_refused() -> None:
    with pytest.raises(ValueError, match="period=2 needs starts that are drawn among all starts"):
        Slices(2, PerTrajectory(), period=2)
    with pytest.raises(ValueError, match="period must be at least 1"):
        Slices(2, period=0)
    one, other = (Buffer(8, Slices(2, period=each), trajectories=Trajectories(endless=True)) for each in (2, 3))
    with pytest.raises(ValueError, match="the state was not made for sampler"):
        other.sample(one.init(np.int32(0)), jax.random.key(0), 2)


# -------------------------------------------------------------------------- how and when it was written


TOLD: list[tuple[np.ndarray, ...]] = []


@dataclasses.dataclass(frozen=True)
class Listening(Uniform):
    """A sampler that takes down what it is told of starts."""

    def init_excluding(self, capacity: int) -> tuple[()]:
        return ()

    def written_excluding(self, state: tuple[()], *told: Any) -> tuple[()]:
        jax.debug.callback(lambda *told: TOLD.append(tuple(map(np.asarray, told))), *told)
        return state


def test_a_sampler_is_told_of_every_new_slot_and_never_two_things_of_one() -> None:
    buffer, model, starts = Buffer(7, Slices(3, Listening()), trajectories=ENDS), TrajectoriesModel(7, 1), set[int]()
    random, state = np.random.default_rng(0), buffer.init(ITEM)
    for count in (1, 3, 3, 11, 1, 3, 11, 3):
        new = rows(random.choice(list("....t"), (count, 1)))
        state, _ = extend(buffer, state, new.batch(model.write(new.ended), ()))
        jax.effects_barrier()
        slots, told, allowed = TOLD.pop()
        assert set(slots.tolist()) <= set(told.tolist())
        said = {(slot, may) for slot, may in zip(told.tolist(), allowed.tolist(), strict=True) if 0 <= slot < 7}
        assert len(said) == len({slot for slot, _ in said})
        starts = (starts - set(slots.tolist())) | {slot for slot, may in said if may}
        assert starts == set(model.starts(3))


@pytest.mark.parametrize(
    "rule",
    [pytest.param(Slices(2, Shuffled(), least=1), marks=pytest.mark.slow), Slices(2, PerTrajectory(Shuffled()))],
    ids=str,
)
def test_a_write_of_rows_begins_another_epoch(rule: Slices) -> None:
    buffer = Buffer(6, rule, trajectories=ENDS)
    play = played(buffer, ".t.t.t")
    nothing = rows(np.empty((0, 1), str)).batch(np.zeros(0, np.int32), ())
    assert_same(extend(buffer, play.state, nothing)[0], play.state)
    draw_an_epoch(play)
    play.draw(1)
    for code in ".t":
        play.write(rows([[code]]))
    draw_an_epoch(play)


def draw_an_epoch(play: Play) -> None:
    """Draw as many starts, or trajectories, as there are, one by one: each is another."""
    draws = [play.draw(1) for _ in range(play.drawable())]
    assert all(draw.valid.all() for draw in draws)
    assert len({int(draw.starts[0]) for draw in draws}) == len(draws)


LONG = pytest.mark.parametrize(
    "buffer", [*(pytest.param(CASES[i][0], marks=pytest.mark.slow) for i in (0, 3)), CASES[4][0]], ids=name
)


def write_codes(play: Play, codes: str) -> None:
    """Rows of codes in the first lane, the others going on."""
    others = ["."] * (play.buffer.items_per_row - 1)
    play.write(rows([[code, *others] for code in codes]))
    play.draw_all()


@pytest.mark.parametrize("by", [2**32 - 3, 2**31 - 5])
@LONG
def test_the_count_of_rows_may_pass_the_ends_of_32_bits(buffer: Buffer, by: int) -> None:
    play = Play(buffer)
    play.state = shifted(play.state, by)
    for codes in CODES:
        write_codes(play, codes)


@LONG
def test_numbers_of_trajectories_may_begin_again(buffer: Buffer) -> None:
    play = Play(buffer)
    write_codes(play, "..t")
    turn = buffer.capacity * ((2**31 - 1) // buffer.capacity)
    play.state = dataclasses.replace(play.state, trajectories=renumbered(play.state.trajectories, turn - 1))
    for codes in CODES * 2:
        write_codes(play, codes)
    assert 0 <= play.state.trajectories.latest[0] < 40


@pytest.mark.parametrize("count", [1, 11])
@LONG
def test_a_trajectory_may_be_longer_than_steps_can_say(buffer: Buffer, count: int) -> None:
    play = Play(buffer)
    write_codes(play, "." * count)
    play.state = begun_long_ago(play.state, 2**31 - 14)
    for lane in play.model.all:
        lane[0].times[:0] = [-1] * 20  # rows long gone
    for _ in range(20 // count + 2):
        write_codes(play, "." * count)
    for codes in [*CODES[:3], CODES[-1]]:
        write_codes(play, codes)


@pytest.mark.parametrize(
    "case",
    [case if case in CASES[3:] else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: name(case[0]),
)
def test_nothing_can_be_drawn_from_an_empty_buffer_or_where_all_is_too_short(case: Any) -> None:
    play = Play(case[0])
    for count in (0, case[1][0]):
        play.write(rows([["t"] * play.buffer.items_per_row] * count)) if count else None
        draw = play.draw(4 if isinstance(play.starts, Shuffled) else MANY)
        assert not draw.valid.any() and not draw.mask.any() and draw.size == 0
        assert not importance_weights(draw, 0.5).any() and np.isfinite(draw.probability).all()
