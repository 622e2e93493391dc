"""What a buffer says about its next draw, against brute force over random histories, and against real draws."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import (
    Buffer,
    Fifo,
    Frames,
    HighestRanked,
    PerTrajectory,
    Prioritized,
    Reason,
    Shuffled,
    Slices,
    Trajectories,
    Uniform,
)
from tests.fbuf.chance_model import ChanceModel, ManyChanceModels
from tests.fbuf.compiled import extend, sample
from tests.fbuf.test_slices import ALL, CASES, ENDS, MORE, RANKED

QUICK: list[Any] = [(Buffer(7, Shuffled(), trajectories=ENDS), (1, 11)), *CASES[3:4]]
SLOW: list[Any] = [
    (Buffer(7, trajectories=ENDS), (1, 3, 11)),
    (Buffer(7, Prioritized(alpha=0.5, eps=0), trajectories=ENDS, lanes=(2,)), (1, 3, 11)),
    (Buffer(7, RANKED, trajectories=ALL), (1, 3, 11)),
    (Buffer(7, Fifo(), trajectories=ENDS, lanes=(2,)), (1, 3, 11)),
    *CASES[:3],
    *CASES[4:6],
    *MORE,
]


def name(what: Any) -> str:
    return f"{what.capacity}x{what.lanes}-{what.sampler}" if isinstance(what, Buffer) else str(what)


def assert_histories(buffer: Buffer, counts: tuple[int, ...], seeds: range) -> None:
    for seed in seeds:
        model = ChanceModel(buffer, seed)
        model.assert_same()
        for _ in range(4):
            model.write_some(int(model.random.choice(counts)))
            model.update()
            model.assert_same()
            for _ in range(int(model.random.integers(3))):
                model.draw(2)
                model.assert_same()
            if model.random.random() < 0.1:
                model.clear()
                model.assert_same()


@pytest.mark.parametrize(("buffer", "counts"), QUICK, ids=name)
def test_the_law_of_the_next_draw_is_that_of_brute_force(buffer: Buffer, counts: tuple[int, ...]) -> None:
    assert_histories(buffer, counts, range(15))


def kind(buffer: Buffer) -> str:
    """The sampler that a buffer has, without its numbers."""
    if not isinstance(buffer.sampler, Slices):
        return type(buffer.sampler).__name__
    starts = buffer.sampler.starts
    return f"Slices({type(starts.trajectories if isinstance(starts, PerTrajectory) else starts).__name__})"


def assert_many_histories(buffer: Buffer, counts: tuple[int, ...], seeds: range) -> None:
    """Every history at its end, and on its way now and then."""
    many = ManyChanceModels(buffer, seeds)
    for _ in range(int(many.random.integers(1, 6))):
        if many.random.random() < 0.1:
            many.clear()
        many.write(int(many.random.choice(counts)))
        for _ in range(int(many.random.integers(3))):
            if many.random.random() < 0.5:
                many.update()
            many.assert_same(10)
            many.draw(2)
    many.assert_same()


@pytest.mark.slow
@pytest.mark.parametrize(("buffer", "counts"), [*QUICK, *SLOW], ids=name)
def test_the_law_of_the_next_draw_is_that_of_brute_force_on_many_histories(
    buffer: Buffer, counts: tuple[int, ...]
) -> None:
    """10,000 histories of each sampler, over its buffers, in groups that make the same calls."""
    alike = sum(kind(each) == kind(buffer) for each, _ in [*QUICK, *SLOW])
    for first in range(60, 60 + -(-10_000 // alike), 50):
        assert_many_histories(buffer, counts, range(first, first + 50))


# ---------------------------------------------------------------------- single rules, and what is not in the histories


def filled(buffer: Buffer, count: int) -> Any:
    """The state after `count` writes of single items, ranked by their number."""
    batch = {"rank": np.arange(count, dtype=np.float32), "terminated": np.arange(count) % 5 == 4}
    return extend(buffer, buffer.init({"rank": np.float32(0), "terminated": np.bool_(False)}), batch)[0]


def reasons(buffer: Buffer, state: Any) -> list[str]:
    return [Reason(each).label for each in buffer.chances(state).reason]


def test_items_in_a_fixed_order_wait_for_those_before_them() -> None:
    for rule in (Fifo(), Shuffled(shuffle=False)):
        buffer = Buffer(5, rule)
        state, _, _ = sample(buffer, filled(buffer, 4), jax.random.key(0), 1)
        assert reasons(buffer, state) == ["consumed", "none", "waiting", "waiting", "not written"]
        law = buffer.chances(state)
        assert law.probability is not None and law.probability.tolist() == [0, 1, 0, 0, 0]
        assert law.drawable.tolist() == [False, True, True, True, False]


def test_reasons_name_the_cause() -> None:
    buffer = Buffer(4, Prioritized(eps=0))
    state = buffer.update(filled(buffer, 3), np.asarray([1]), np.asarray([0.0]))
    assert reasons(buffer, state) == ["none", "zero priority", "none", "not written"]
    sliced = Buffer(8, Slices(3), trajectories=Trajectories("terminated"))
    assert reasons(sliced, filled(sliced, 7)) == ["none"] * 5 + ["too short"] * 2 + ["not written"]
    ranked = Buffer(3, writer=HighestRanked("rank"))
    law = ranked.chances(filled(ranked, 2))
    assert law.probability is not None and law.probability.tolist() == [0.5, 0.5, 0]


def test_lost_frames_are_not_drawn() -> None:
    item = {"obs": np.zeros((), np.uint8), "next_obs": np.zeros((), np.uint8), "end": np.bool_(False)}
    batch = {
        "obs": np.arange(6, dtype=np.uint8) * 2,
        "next_obs": np.arange(6, dtype=np.uint8) * 2 + np.uint8([2, 1, 2, 1, 2, 1]),
        "end": np.arange(6) % 2 == 1,
    }
    frames = Frames(stack=1, finals=1)  # enough for the last of three ends
    single = Buffer(6, trajectories=Trajectories("end"), frames=frames)
    state, _ = extend(single, single.init(item), batch)
    assert reasons(single, state) == ["none", "lost", "none", "lost", "none", "none"]
    law = single.chances(state).probability
    assert law is not None and law.tolist() == [1 / 6, 0, 1 / 6, 0, 1 / 6, 1 / 6]
    sliced = Buffer(6, Slices(2, least=1), trajectories=Trajectories("end"), frames=frames)
    state, _ = extend(sliced, sliced.init(item), batch)
    law = sliced.chances(state).probability
    _, _, draw = sample(sliced, state, jax.random.key(1), 2 * 20_000)
    drawn = np.bincount(np.asarray(draw.slots)[np.asarray(draw.mask)], minlength=6) / 20_000
    assert law is not None
    np.testing.assert_allclose(law, [1 / 6, 0, 1 / 6, 0, 1 / 6, 2 / 6], rtol=1e-12)
    np.testing.assert_allclose(drawn, law, atol=0.02)


@dataclasses.dataclass(frozen=True)
class First(Uniform):
    """Another law than that of its base class."""

    def sample(self, state: Any, key: Any, batch_size: int, size: Any) -> Any:
        draw = super().sample(state, key, batch_size, size)[1]
        return state, dataclasses.replace(draw, slots=jnp.zeros(batch_size, int))


def test_the_law_of_a_users_rule_is_not_invented() -> None:
    buffer = Buffer(4, First())
    law = buffer.chances(filled(buffer, 3))
    assert law.probability is None and not law.known
    assert reasons(buffer, filled(buffer, 3)) == ["unknown"] * 3 + ["not written"]
    sliced = Buffer(8, Slices(3, First()), trajectories=Trajectories("terminated"))
    assert sliced.chances(filled(sliced, 7)).probability is None
    assert reasons(sliced, filled(sliced, 7)) == ["unknown"] * 5 + ["too short"] * 2 + ["not written"]


def test_the_law_is_known_outside_of_jit_only() -> None:
    buffer = Buffer(4)
    with pytest.raises(TypeError, match=r"chances\(\) reads values, which are not known inside jax.jit"):
        jax.jit(buffer.chances)(filled(buffer, 3))
