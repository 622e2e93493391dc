"""Returns of n steps, and of all that follow: against loops over lists."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf import Buffer, Trajectories, n_step_of_slots, returns
from tests.fbuf.compiled import clear, extend, init, jit
from tests.fbuf.trajectory_model import ITEM, TERMINATED, TrajectoriesModel, histories

pytestmark = pytest.mark.usefixtures("device")

LINES, T = 3, 11
RING = Buffer(6, trajectories=Trajectories("terminated", "truncated", "id"), lanes=(2, 1))
WRITTEN = 2  # rows at once
n_step = jit(fbuf.n_step, static_argnames=("n", "axis"))
returns_to_go = jit(fbuf.returns_to_go, static_argnames="axis")


@functools.partial(jit, static_argnums=4)
def of_slots(slots: Any, rewards: Any, state: Any, gamma: Any, n: int) -> Any:
    return n_step_of_slots(slots, rewards, state.trajectories, state.ring, gamma, n)


class Line(NamedTuple):
    """Steps of one line of time: what each gives, and how it ends."""

    rewards: np.ndarray
    ends: np.ndarray
    terminated: np.ndarray
    valid: np.ndarray
    gamma: np.ndarray
    values: np.ndarray


def expected_n_step(line: Line, n: int) -> list[tuple[float, int, float, int]]:
    """Return, steps, discount and the last step, of each step of a line."""
    found = []
    for start in range(len(line.rewards)):
        total, discount, last, steps = 0.0, 1.0, start, 0
        for t in range(start, min(start + n, len(line.rewards))):
            if not line.valid[t]:
                break
            total += discount * line.rewards[t]
            discount *= line.gamma[t] * (not line.terminated[t])
            last, steps = t, steps + 1
            if line.ends[t] or line.terminated[t]:
                break
        found.append((total, steps, discount if steps else 0.0, last))
    return found


def expected_to_go(line: Line) -> np.ndarray:
    """The return of each step of a line, with the values of what is cut short."""
    found = np.zeros(len(line.rewards))
    for t in reversed(range(len(line.rewards))):
        if not line.valid[t]:
            continue
        is_last = t + 1 == len(line.rewards) or not line.valid[t + 1]
        ahead = line.values[t] if line.ends[t] or line.terminated[t] or is_last else found[t + 1]
        found[t] = line.rewards[t] + (0.0 if line.terminated[t] else line.gamma[t] * ahead)
    return found


@st.composite
def lines(draw: Any) -> Line:
    """LINES lines [LINES, T]. Behind what ends, or is not there, stand rewards that must not be seen."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    chance = rng.choice([0.0, 0.1, 0.5, 1.0], (2, LINES, 1))
    terminated, ends = rng.random((2, LINES, T)) < chance
    valid = rng.random((LINES, T)) < rng.choice([0.5, 0.9, 1.0], (LINES, 1))
    return Line(
        np.where(valid, rng.integers(-8, 8, (LINES, T)), np.nan),
        ends,
        terminated,
        valid,
        rng.choice([0.0, 0.5, 1.0], (LINES, T)),
        np.where(terminated, np.nan, rng.integers(-8, 8, (LINES, T))),
    )


def single(line: Line) -> dict[str, np.ndarray]:
    """As arguments; all are given by name, as below: other ways to call would be other programs."""
    leaves = line._asdict().items()
    return {name: np.asarray(leaf, np.float32) if leaf.dtype == np.float64 else leaf for name, leaf in leaves}


@pytest.mark.parametrize("n", [3, 100])
@given(line=lines())
def test_n_steps_are_what_a_loop_over_them_gives(n: int, line: Line) -> None:
    given = single(line)
    given.pop("values")
    found = jax.tree.map(np.asarray, n_step(**given, n=n))
    for i in range(LINES):
        wanted = expected_n_step(Line(*(leaf[i] for leaf in line)), n)
        got = zip(found.returns[i], found.steps[i], found.discount[i], found.last[i], strict=True)
        assert [tuple(map(float, each)) for each in got] == [tuple(map(float, each)) for each in wanted]


@given(line=lines())
def test_what_is_to_be_earned_is_what_a_loop_from_the_end_gives(line: Line) -> None:
    wanted = np.stack([expected_to_go(Line(*(leaf[i] for leaf in line))) for i in range(LINES)])
    np.testing.assert_allclose(returns_to_go(**single(line)), wanted, rtol=1e-6)


@given(line=lines())
def test_both_ways_to_sum_are_what_a_loop_gives(line: Line) -> None:
    rewards, gamma = line.rewards.astype(np.float32), line.gamma.astype(np.float32)
    stops = line.ends | ~line.valid | np.roll(~line.valid, -1, -1)
    stops[:, -1] = True
    for found, discount in (
        (by_halves(rewards, gamma, stops), gamma),
        (by_halves(rewards, np.full_like(gamma, 0.5), stops), np.full_like(gamma, 0.5)),
        (one_by_one(rewards, np.float32(0.5), stops), np.full_like(gamma, 0.5)),
    ):
        wanted = rewards.astype(float)
        for t in reversed(range(T - 1)):
            wanted[:, t] += np.where(stops[:, t], 0, discount[:, t] * wanted[:, t + 1])
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


one_by_one, by_halves = (jit(form) for form in (returns._one_by_one, returns._by_halves))


# -------------------------------------------------------------------------- in a ring


@given(history=histories(RING.items_per_row, [WRITTEN], most=6))
def test_stored_steps_are_followed_by_those_of_their_trajectory_that_are_stored(history: Any) -> None:
    state, model = init(RING, ITEM), TrajectoriesModel(RING.capacity, RING.items_per_row)
    for new in history:
        if new is None:
            state = clear(RING, state)
            model.clear()
            continue
        serials = model.write(new.ended, new.id)
        state, _ = extend(RING, state, new.batch(serials, RING.lanes))
    stored = model.stored()
    slots = [slot for each in stored for slot in each.slots]
    if not slots:
        return
    every = np.resize(np.asarray(slots, np.int32), RING.capacity * RING.items_per_row)
    found = of_slots(every, state.items["serial"], state, 0.5, 3)
    numbers = model.numbers()
    wanted = []
    for each in stored:
        for at in range(len(each.slots)):
            window = each.slots[at : at + 3]
            over = each.kind == TERMINATED and at + len(window) == len(each.slots)
            total = sum(0.5**i * numbers[slot] for i, slot in enumerate(window))
            wanted.append((total, len(window), 0.0 if over else 0.5 ** len(window), window[-1]))
    got = [np.asarray(leaf)[: len(slots)].tolist() for leaf in (found.returns, found.steps, found.discount, found.last)]
    assert list(zip(*got, strict=True)) == wanted


def test_slots_of_any_shape_and_a_discount_for_each_item() -> None:
    state = init(RING, ITEM)
    rewards = np.arange(12, dtype=np.float16).reshape(6, 2, 1, 1)
    batch = {name: np.zeros((WRITTEN, 2, 1), leaf.dtype) for name, leaf in ITEM.items()}
    for _ in range(2):
        state, _ = extend(RING, state, batch)
    gamma = np.array([0.5, 0.25, 0.5, 0.5, 0.5, 0.5], np.float32).reshape(6, 1, 1).repeat(2, 1)
    found = of_slots(np.array([[0, 1], [4, 7]]), rewards, state, gamma, 9)  # more steps than there are rows
    assert found.returns.tolist() == [[0 + 1 + 0.5 + 0.375, 1 + 1.5 + 0.625 + 0.4375], [4 + 3, 7]]
    assert found.discount.tolist() == [[0.03125, 0.03125], [0.25, 0.5]]
    assert found.last.tolist() == [[6, 7], [6, 7]]
    assert found.returns.dtype == np.float16


# -------------------------------------------------------------------------- programs, dtypes, shapes


def test_one_program_for_every_discount() -> None:
    traces = []

    @jit
    def program(rewards: Any, ends: Any, gamma: Any) -> Any:
        traces.append(None)
        return fbuf.n_step(rewards, ends, gamma, 3).returns, fbuf.returns_to_go(rewards, ends, gamma)

    rewards, ends = np.ones(T, np.float32), np.zeros(T, bool)
    for gamma in (0.0, 0.5, 0.9):
        few, all_ = program(rewards, ends, gamma)
        np.testing.assert_allclose(np.asarray(few)[0], 1 + gamma + gamma**2, rtol=1e-6)
        np.testing.assert_allclose(np.asarray(all_)[0], sum(gamma**i for i in range(T)), rtol=1e-6)
    assert len(traces) == 1


def test_time_is_any_axis() -> None:
    rng = np.random.default_rng(0)
    rewards, gamma, values = rng.random((3, LINES, T), np.float32)
    ends, terminated, valid = rng.random((3, LINES, T)) < np.array([0.2, 0.1, 0.8]).reshape(3, 1, 1)
    given = {"rewards": rewards, "ends": ends, "gamma": gamma, "terminated": terminated, "valid": valid}
    moved = {name: leaf.T[None] for name, leaf in given.items()}  # [1, T, LINES]
    few, all_ = n_step(**given, n=3), returns_to_go(**given, values=values)
    found = n_step(**moved, n=3, axis=1), returns_to_go(**moved, values=values.T[None], axis=1)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves((few, all_)), strict=True):
        np.testing.assert_allclose(np.asarray(leaf)[0].T, other, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_returns_have_the_dtype_of_rewards_and_small_ones_are_summed_as_float32(dtype: str) -> None:
    rewards, ends = np.ones(T).astype(jnp.dtype(dtype)), np.zeros(T, bool)
    kind = jnp.dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)
    found = n_step(rewards, ends, 0.9, n=3)
    summed = jnp.promote_types(kind, jnp.float32)
    assert (found.returns.dtype, found.discount.dtype, found.steps.dtype) == (kind, summed, jnp.int32)
    assert np.asarray(found.returns)[0] == np.asarray(1 + 0.9 + 0.9**2, summed).astype(kind)
    assert returns_to_go(rewards, ends, 0.9).dtype == kind
    with jax.enable_x64(True):
        wide = n_step(np.full(4, 1 / 3), ends[:4], 0.9, n=3)
        assert (wide.returns.dtype, wide.steps.dtype, wide.last.dtype) == (np.float64, np.int32, np.int32)
        assert np.asarray(wide.returns)[0] == pytest.approx(2.71 / 3, rel=1e-14)


REWARDS = np.array([1, 1, 1, 1, 100, 100, 100], np.float32)
END = np.array([0, 0, 0, 1, 0, 0, 0], bool)


def test_it_can_be_differentiated() -> None:
    def first(rewards: Any) -> Any:
        return fbuf.n_step(rewards, END, 0.5, 3).returns[1] + fbuf.returns_to_go(rewards, END, 0.5)[0]

    assert jit(jax.grad(first))(REWARDS).tolist() == [1, 1.5, 0.75, 0.375, 0, 0, 0]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"n": 0}, ValueError, "n must be at least 1"),
        ({"n": 2.5}, TypeError, "n must be an int"),
        ({"ends": np.zeros(7, np.float32)}, TypeError, "ends must be bool"),
        ({"ends": np.zeros((7, 1), bool)}, ValueError, r"ends has the shape \[7, 1\], rewards have \[7\]"),
        ({"gamma": 1j}, TypeError, "gamma must be real"),
        ({"rewards": np.zeros(7, np.complex64)}, TypeError, "rewards must be real"),
        ({"axis": 1}, ValueError, "axis=1"),
    ],
    ids=lambda what: ",".join(what) if isinstance(what, dict) else "",
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type, text: str) -> None:
    given: Any = {"rewards": REWARDS, "ends": END, "gamma": 0.5, "n": 3, **change}
    with pytest.raises(error, match=text):
        n_step(**given)
    if "n" not in change:
        given.pop("n")
        with pytest.raises(error, match=text):
            returns_to_go(**given)


def test_a_column_of_other_items_is_refused() -> None:
    state = init(RING, ITEM)
    for rewards in (np.zeros((5, 2), np.float32), np.zeros((6, 2, 3), np.float32)):
        with pytest.raises(ValueError, match="rewards: one for each item is needed, 6 rows of 2"):
            of_slots(np.arange(2), rewards, state, 0.5, 3)
