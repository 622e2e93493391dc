"""Rows of rings flat and back, against a model that goes row by row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf import RingState, ted
from tests.fbuf.compiled import jit

pytestmark = pytest.mark.usefixtures("device")

SHAPES = [(1,), (5,), (3, 2, 2)]  # rows and lanes
layout = jit(ted.layout)
flatten = jit(ted.flatten, static_argnames="ends")
unflatten = jit(ted.unflatten)
lay_out = jit(ted.lay_out, static_argnames="lanes")
take_back = jit(ted.take_back, static_argnames="shape")


def ring(cursor: int, size: int) -> RingState:
    return RingState(jnp.int32(cursor), jnp.int32(size), jnp.zeros(2, jnp.uint32))


def stored(shape: tuple[int, ...], done: np.ndarray, start: int) -> dict[str, np.ndarray]:
    """Observations of which no two are the same, except for those that a row and the next one share; and what follows."""
    before = np.arange(done.size, dtype=np.float32).reshape(shape)
    after = np.roll(before, -1, 0)
    after = np.where(done, -1 - before, after)
    before_oldest = (start - 1) % shape[0]
    after[before_oldest] = -1 - before[before_oldest]
    return {"before": np.stack([before, before], -1), "after": np.stack([after, after], -1)}


def model(shape: tuple[int, ...], done: np.ndarray, cursor: int, full: bool, closed: bool) -> tuple[np.ndarray, ...]:
    """Where rows and what came after them go, which rows are ends, and how many places there are."""
    places, after, ends = np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape, bool)
    place = 0
    for lane in np.ndindex(shape[1:]):
        for time in range(shape[0]):
            row = ((cursor if full else 0) + time) % shape[0]
            end = done[(row, *lane)] or row == (cursor - 1) % shape[0] or (closed and time == shape[0] - 1)
            places[(row, *lane)], ends[(row, *lane)] = place, end
            after[(row, *lane)] = place + (end or time < shape[0] - 1)
            place += 1 + end
    return places, after, ends, np.array(place)


@st.composite
def rings(draw: Any) -> tuple[tuple[int, ...], np.ndarray, int, bool, bool]:
    shape = draw(st.sampled_from(SHAPES))
    done = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < draw(st.sampled_from([0, 0.2, 0.5, 1]))
    full = draw(st.booleans())
    return shape, done, draw(st.integers(0, shape[0] - 1)), full, not full and draw(st.booleans())


@given(rings())
def test_rows_go_where_the_model_says(case: Any) -> None:
    shape, done, cursor, full, closed = case
    found = layout(done, ring(cursor, shape[0] if full else cursor), closed=closed)
    for got, wanted in zip((found.places, found.after, found.ends, found.used), model(*case), strict=True):
        np.testing.assert_array_equal(got, wanted)


@given(rings())
def test_all_comes_back(case: Any) -> None:
    shape, done, cursor, full, closed = case
    state = ring(cursor, shape[0] if full else cursor)
    found = layout(done, state, closed=closed)
    data = stored(shape, np.asarray(found.ends), cursor if full else 0)
    flat = flatten(found, {"x": data["before"]}, {"x": data["after"]})
    assert flat["x"].shape == (2 * done.size, 2)
    assert not np.asarray(flat["x"])[int(found.used) :].any()
    before, after = unflatten(found, flat)
    np.testing.assert_array_equal(before["x"], data["before"])
    last = ~np.asarray(found.ends) & (np.arange(shape[0]) == shape[0] - 1).reshape(-1, *(1 for _ in shape[1:]))
    if full:
        last[:] = False
    np.testing.assert_array_equal(after["x"], np.where(last[..., None], data["before"], data["after"]))


@given(rings())
def test_what_stands_once_a_row(case: Any) -> None:
    shape, done, cursor, full, _ = case
    state = ring(cursor, shape[0] if full else cursor)
    rows = {"r": np.arange(done.size).reshape(shape).astype(np.int32), "d": done[..., None]}
    flat = lay_out(rows, state, lanes=len(shape) - 1)
    order = [
        ((cursor if full else 0) + time) % shape[0] * (done.size // shape[0]) + lane
        for lane in range(done.size // shape[0])
        for time in range(shape[0])
    ]
    np.testing.assert_array_equal(flat["r"], order)
    back = take_back(flat, state, shape=shape)
    jax.tree.map(np.testing.assert_array_equal, back, rows)


def test_the_worked_example() -> None:
    """Ten steps, obs t and then t + 1, but 4.5 where the episode ends at step 4: in twelve rows, and in a ring of eight."""
    seen = np.arange(10, dtype=np.float32)
    after = np.where(seen == 4, 4.5, seen + 1).astype(np.float32)
    for capacity, wanted in (
        (12, [0, 1, 2, 3, 4, 4.5, 5, 6, 7, 8, 9, 10, 0, 0]),
        (8, [2, 3, 4, 4.5, 5, 6, 7, 8, 9, 10]),
    ):
        kept = np.arange(10)[-capacity:]
        obs, nexts, done = np.zeros(capacity, np.float32), np.zeros(capacity, np.float32), np.zeros(capacity, bool)
        obs[kept % capacity], nexts[kept % capacity], done[kept % capacity] = seen[kept], after[kept], kept == 4
        found = layout(jnp.asarray(done), ring(10 % capacity, min(10, capacity)))
        assert int(found.used) == len(wanted)
        assert flatten(found, obs, nexts, ends=2).tolist() == wanted


def test_rows_in_more_than_one_group() -> None:
    ends = np.random.default_rng(0).random(70_000) < 0.1
    ends[300:800] = True
    wanted = np.arange(ends.size) + np.cumsum(ends) - ends
    with jax.enable_x64(True):
        for dtype in (jnp.int32, jnp.int64):
            found = jax.jit(ted.places, static_argnums=1)(ends, dtype)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, wanted)


def test_in_programs() -> None:
    """One trace for all cursors and sizes; lanes of their own under vmap."""
    traces = 0

    @jax.jit
    def round_trip(done: Any, obs: Any, nexts: Any, state: RingState) -> Any:
        nonlocal traces
        traces += 1
        found = ted.layout(done, state)
        return ted.unflatten(found, ted.flatten(found, obs, nexts))[0], found.used

    done = jnp.zeros((3, 4), bool).at[1, 2].set(True)
    obs = jnp.arange(12.0).reshape(3, 4)
    for cursor, size in ((0, 4), (1, 4), (2, 2), (3, 3)):
        many = jax.vmap(round_trip, in_axes=(0, 0, 0, None))(done, obs, obs, ring(cursor, size))
        for lane in range(3):
            one, used = round_trip(done[lane], obs[lane], obs[lane], ring(cursor, size))
            np.testing.assert_array_equal(many[0][lane], one)
            np.testing.assert_array_equal(one, obs[lane])
            assert many[1][lane] == used
    assert traces == 1


def test_too_little_room() -> None:
    found = layout(jnp.ones(4, bool), ring(0, 4))
    obs = jnp.arange(1.0, 5)
    flat = flatten(found, obs, -obs, ends=1)
    assert flat.tolist() == [1, -1, 2, -2, 3]
    assert int(found.used) == 8 > flat.size


def test_refused() -> None:
    state = ring(0, 4)
    for done in (jnp.zeros(4), jnp.zeros((), bool)):
        with pytest.raises(TypeError, match="done must be bool"):
            ted.layout(done, state)
    with pytest.raises(ValueError, match="no rows"):
        ted.layout(jnp.zeros((4, 0), bool), state)
    with pytest.raises(ValueError, match="more than int32 can count"):
        jax.eval_shape(ted.layout, jax.ShapeDtypeStruct((1 << 30, 2), bool), state)
    found, obs = layout(jnp.zeros(4, bool), state), jnp.zeros(4)
    for given_, nexts, message in (
        ({"a": obs}, {"b": obs}, "observations have the structure"),
        ({"a": obs[:3]}, {"a": obs[:3]}, r"observations\['a'\] has shape \[3\], the rows have \[4\]"),
        ({"a": obs}, {"a": obs > 0}, r"observations\['a'\] are float32 \[4\], following\['a'\] are bool"),
    ):
        with pytest.raises(ValueError, match=message):
            ted.flatten(found, given_, nexts)
    with pytest.raises(ValueError, match="ends must be at least 0"):
        ted.flatten(found, obs, obs, ends=-1)
    with pytest.raises(ValueError, match=r"flat\['a'\] has shape \[3\]: there are 4 rows"):
        ted.unflatten(found, {"a": obs[:3]})
    with pytest.raises(ValueError, match=r"\[rows, \*lanes, ...\] with 1 lane dims, got \[4\]"):
        ted.lay_out(obs, state, 1)
    with pytest.raises(ValueError, match=r"has shape \[4\], the rows have \[3\]"):
        ted.take_back(obs, state, (3,))
