"""What slices refuse: at construction, or while tracing, with what is needed instead."""

from typing import Any

import jax
import numpy as np
import pytest

from fbuf import Buffer, Fifo, PerTrajectory, Prioritized, Shuffled, Slices, Trajectories, Uniform
from tests.fbuf.trajectory_model import ITEM, rows

pytestmark = pytest.mark.usefixtures("device")

WHERE = Trajectories("terminated")
ROWS = rows([["."]] * 6).batch(np.zeros(6, np.int32), ())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": 0}, ValueError, "length must be at least 1"),
        ({"length": 2.0}, TypeError, "length must be an int"),
        ({"length": True}, TypeError, "length must be an int"),
        ({"length": 2, "least": 3}, ValueError, "least=3 is more than length=2"),
        ({"length": 2, "least": 0}, ValueError, "least must be at least 1"),
        ({"length": 2, "least": 1.5}, TypeError, "least must be an int"),
        ({"length": 2, "burn_in": -1}, ValueError, "burn_in must be at least 0"),
        ({"length": 2, "burn_in": None}, TypeError, "burn_in must be an int"),
        ({"length": 2, "starts": Uniform}, TypeError, r"starts must be an instance.*Uniform\(\)"),
        ({"length": 2, "starts": Prioritized}, TypeError, r"starts must be an instance.*Prioritized\(\)"),
        ({"length": 2, "starts": PerTrajectory}, TypeError, r"starts must be an instance.*PerTrajectory\(\)"),
        ({"length": 2, "starts": None}, TypeError, "starts must be a Sampler"),
        ({"length": 2, "starts": Fifo()}, TypeError, "needs the order of writing"),
        ({"length": 2, "starts": Slices(2)}, TypeError, "draws slices"),
    ],
    ids=str,
)
def test_slices_that_cannot_be_are_refused(arguments: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Slices(**arguments)


@pytest.mark.parametrize(
    "inner", [Prioritized(), Fifo(), Prioritized, Uniform, PerTrajectory(), Slices(2), None, 0.5], ids=str
)
def test_trajectories_are_drawn_by_rules_that_keep_no_slots_only(inner: Any) -> None:
    with pytest.raises(TypeError, match="trajectories"):
        PerTrajectory(inner)


def test_slices_by_their_count() -> None:
    assert Slices.by_count(4, 32) == Slices(8)
    assert Slices.by_count(4, 32, starts=PerTrajectory(), least=1) == Slices(8, PerTrajectory(), least=1)
    with pytest.raises(ValueError, match="batch_size=33 is not a multiple of count=4"):
        Slices.by_count(4, 33)
    with pytest.raises(ValueError, match="count must be at least 1"):
        Slices.by_count(0, 32)
    with pytest.raises(TypeError, match="batch_size must be an int"):
        Slices.by_count(4, 32.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampler", "others", "error", "message"),
    [
        (Slices(2), {}, ValueError, "build the buffer with trajectories="),
        (Slices(9), {"trajectories": WHERE}, ValueError, r"slices of 0 \+ 9 rows do not fit in capacity=8"),
        (Slices(6, burn_in=3), {"trajectories": WHERE}, ValueError, r"slices of 3 \+ 6 rows do not fit"),
        (Slices, {"trajectories": WHERE}, TypeError, r"write Slices\(\)"),
        (PerTrajectory(), {"trajectories": WHERE}, TypeError, "sampler must be a Sampler, got PerTrajectory"),
    ],
    ids=str,
)
def test_buffers_that_slices_cannot_draw_from_are_refused(sampler: Any, others: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Buffer(8, sampler, **others)


def test_a_batch_is_whole_slices() -> None:
    buffer = Buffer(8, Slices(3), trajectories=WHERE)
    with pytest.raises(ValueError, match="batch_size=7 is not a multiple of the slice length, 3"):
        buffer.sample(buffer.init(ITEM), jax.random.key(0), 7)


@pytest.mark.parametrize("starts", [Uniform(), Shuffled(), PerTrajectory(), PerTrajectory(Shuffled())], ids=str)
def test_only_prioritized_starts_take_priorities(starts: Any) -> None:
    buffer = Buffer(8, Slices(2, starts), trajectories=WHERE)
    with pytest.raises(TypeError, match="keeps no priorities"):
        buffer.update(buffer.init(ITEM), np.arange(2), np.ones(2, np.float32))


@pytest.mark.parametrize(
    "other",
    [
        Slices(2),
        Slices(3, least=2),
        Slices(3, PerTrajectory()),
        Slices(3, Shuffled()),
        Slices(3, Prioritized()),
        Uniform(),
    ],
    ids=str,
)
def test_a_state_that_was_made_for_other_slices_is_refused(other: Any) -> None:
    buffer, maker = Buffer(8, Slices(3), trajectories=WHERE), Buffer(8, other, trajectories=WHERE)
    for one, two in [(buffer, maker), (maker, buffer)]:
        with pytest.raises(ValueError, match="the state was not made for sampler="):
            one.extend(two.init(ITEM), ROWS)
        with pytest.raises(ValueError, match="the state was not made for sampler="):
            one.sample(two.init(ITEM), jax.random.key(0), 6)
