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
    Shuffled,
    Slices,
    Uniform,
    importance_weights,
)
from tests.fbuf.model import assert_same
from tests.fbuf.slices_play import CASES, ENDS, EVER, MANY, MORE, Play, extend, name, played, sample
from tests.fbuf.trajectory_model import (
    CODES,
    ITEM,
    TrajectoriesModel,
    begun_long_ago,
    histories,
    renumbered,
    rows,
    shifted,
)

pytestmark = pytest.mark.usefixtures("device")


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
    assert play.draw(play.drawable()).valid.sum() == play.drawable()
    play.draw(play.drawable() - 1)
    for code in ".t":  # as much can be drawn as before
        play.write(rows([[code]]))
    assert play.draw(play.drawable()).valid.all()


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
