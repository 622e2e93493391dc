"""Frames stored once are read as the stacks that were written, or said not to be."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbuf import Buffer, Draw, Frames, PerTrajectory, Prioritized, Slices, Trajectories
from fbuf.frames import without
from fbuf.trajectories import OPEN, TERMINATED, TRUNCATED
from tests.fbuf.compiled import bytes_of
from tests.fbuf.frame_model import (
    CUT,
    ENDS,
    EPISODES,
    UNRELATED,
    Environment,
    Model,
    batch_of,
    check,
    environments,
    extended,
    init,
    played,
    random_kinds,
    rows_of,
)

pytestmark = pytest.mark.usefixtures("device")

BUFFERS = [
    (Buffer(4, trajectories=EPISODES, frames=Frames(stack=1, finals=4)), [1, 3]),
    (Buffer(9, trajectories=ENDS, frames=Frames(stack=3, padding="zero", finals=2)), [4, 30]),
    (Buffer(5, trajectories=ENDS, frames=Frames(stack=4, axis=0), lanes=(1, 2)), [1, 5]),  # of two entries each
]


@pytest.mark.parametrize(("buffer", "counts"), BUFFERS, ids=lambda what: str(what)[:40])
@given(data=st.data())
@settings(max_examples=15)
def test_every_item_that_can_be_drawn_is_read_as_it_was_written(
    buffer: Buffer, counts: list[int], data: st.DataObject
) -> None:
    state, model, streams = (
        init(buffer, Environment(buffer.frames[0], 0).step(OPEN)),
        Model(buffer),
        environments(buffer),
    )
    often = data.draw(st.sampled_from([0, 1, 3, 12]), label="steps between ends")
    kinds = [OPEN] * (2 * often) + [TERMINATED, TRUNCATED, *([CUT] if buffer.trajectories == ENDS else [])]
    if data.draw(st.booleans(), label="unrelated"):
        kinds.append(UNRELATED)
    for what in data.draw(st.lists(st.sampled_from(["extend"] * 4 + ["clear"]), min_size=1, max_size=10)):
        if what == "clear":
            state = buffer.clear(state)
            model.clear()
            continue
        count = data.draw(st.sampled_from(counts))
        chosen = data.draw(
            st.lists(st.sampled_from(kinds), min_size=count * len(streams), max_size=count * len(streams))
        )
        ends = iter(chosen)
        rows = [[stream.step(next(ends)) for stream in streams] for _ in range(count)]
        state, found = extended(buffer, state, batch_of(rows, buffer.lanes))
        model.extend(rows)
        check(buffer, state, found, model)


SAMPLERS = [
    Prioritized(),
    Slices(4, least=1, burn_in=2),
    pytest.param(Slices(3, starts=PerTrajectory()), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda rule: type(rule).__name__)
def test_what_a_sampler_draws_is_what_was_written_and_what_is_lost_is_said_to_be(sampler: Any) -> None:
    buffer = Buffer(20, sampler, lanes=(2,), trajectories=EPISODES, frames=Frames(stack=3, finals=3))
    rows, state = rows_of(buffer, random_kinds(50, 2, 0.2))
    model = Model(buffer)
    model.extend(rows)
    state, found, (items, draw) = played(buffer, state, batch_of(rows, buffer.lanes), 36)
    check(buffer, state, found, model)
    times = {slot: (time, lane) for slot, time, lane in model.stored()}
    is_intact = np.asarray(found[1])
    assert not is_intact.all()
    slots, drawn = np.asarray(draw.slots), np.asarray(draw.valid if draw.mask is None else draw.mask)
    assert drawn.any()
    assert not drawn.all()
    if draw.mask is None:
        np.testing.assert_array_equal(drawn, is_intact[slots])
    for at in np.ndindex(slots.shape):
        item = model.rows[times[slots[at]][0]][times[slots[at]][1]]
        for key, value in item.items():
            lost = key in ("obs", "next_obs") and not is_intact[slots[at]]
            np.testing.assert_array_equal(items[key][at], np.zeros_like(value) if lost else value)
        assert is_intact[slots[at]] or not drawn[at]


def test_a_slice_ends_before_the_first_item_that_is_lost() -> None:
    mask = np.bool_([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    lost = np.bool_([[0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    flat = jnp.ones(4, jnp.bool_)
    draw = Draw(jnp.zeros((4, 5), jnp.int32), flat, flat, flat[0], flat[0], jnp.asarray(mask), flat)
    cut = jax.jit(without, static_argnums=2)(draw, jnp.asarray(lost), 2)
    expected = [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]
    np.testing.assert_array_equal(cut.mask, np.bool_(expected))
    np.testing.assert_array_equal(cut.valid, [True, True, False, True])


def test_a_recording_that_begins_in_the_midst_of_an_episode_gives_no_stack_that_it_does_not_have() -> None:
    buffer, stream = Buffer(8, trajectories=EPISODES, frames=Frames(stack=4)), Environment(Frames(stack=4), 1)
    steps = [[stream.step(OPEN)] for _ in range(12)]
    state, _ = extended(buffer, init(buffer, steps[0][0]), batch_of(steps[:6], ()))
    state, (_, is_intact) = extended(buffer, buffer.clear(state), batch_of(steps[6:], ()))
    assert state.frames[0].unlike == 3
    np.testing.assert_array_equal(is_intact[:6], [False] * 3 + [True] * 3)
    assert buffer.clear(state).frames[0].unlike == 0


def test_the_count_of_rows_may_pass_what_32_bits_hold() -> None:
    buffer = BUFFERS[0][0]
    rows, state = rows_of(buffer, random_kinds(13, 1, 0.3))
    model = Model(buffer)
    model.extend(rows)
    late = dataclasses.replace(state, ring=dataclasses.replace(state.ring, written=jnp.uint32([2**32 - 11, 0])))
    state, found, _ = played(buffer, late, batch_of(rows, ()))
    assert state.ring.written[1] == 1
    check(buffer, state, found, model)


def test_frames_of_each_type_that_is_not_complex_are_kept_bit_for_bit() -> None:
    numbers = np.stack([np.float32([-0.0, 0.0, np.nan, -np.inf, 5e-40]), np.arange(5, dtype=np.float32)], 1)
    numbers[:3, 1] = np.uint32([0x7FC00001, 0x80000000, 0x7F800001]).view(np.float32)
    dtypes = {"a": np.float32, "b": np.bool_, "c": np.int8, "d": np.uint32, "e": jnp.bfloat16}
    frames = {key: numbers if key == "a" else np.arange(5).astype(dtype) for key, dtype in dtypes.items()}
    batch = {"now": {key: leaf[:-1] for key, leaf in frames.items()}, "end": np.arange(4) == 1}
    batch["then"] = {key: leaf[1:] for key, leaf in frames.items()}
    rules = tuple(Frames(("now", key), ("then", key), stack=1) for key in dtypes)
    buffer = Buffer(4, trajectories=Trajectories(terminated="end"), frames=rules)
    _, (items, is_intact) = extended(buffer, init(buffer, jax.tree.map(lambda leaf: leaf[0], batch)), batch)
    assert is_intact.all()
    for found, values in zip(jax.tree.leaves(items), jax.tree.leaves(batch), strict=True):
        assert found.dtype == values.dtype
        assert np.asarray(found).tobytes() == values.tobytes()


# ---------------------------------------------------------------------- programs


def test_the_frames_of_a_game_take_less_than_a_seventh_of_the_memory() -> None:
    obs = jax.ShapeDtypeStruct((84, 84, 4), jnp.uint8)
    item = {"obs": obs, "next_obs": obs, "end": jax.ShapeDtypeStruct((), jnp.bool_)}
    plain, once = (
        jax.eval_shape(Buffer(10_000, trajectories=Trajectories(terminated="end"), frames=frames).init, item)
        for frames in ((), Frames())
    )
    assert bytes_of(once.frames) * 7 < bytes_of([plain.items["obs"], plain.items["next_obs"]])
    assert bytes_of(once) - bytes_of(once.frames) == bytes_of(plain) - 2 * 10_000 * 84 * 84 * 4


# ---------------------------------------------------------------------- items


class Step(NamedTuple):
    pixels: Any
    state: tuple[Any, Any]
    rest: Any


def test_items_may_have_several_observations_anywhere_in_any_structure() -> None:
    rules = (
        Frames(("pixels", "now"), ("pixels", "then"), stack=2, axis=0),
        Frames(("state", 0), ("state", 1), stack=1),
    )
    buffer = Buffer(6, trajectories=Trajectories(terminated=("rest", "end")), frames=rules)
    numbers = np.arange(10, dtype=np.float32)
    stacks = np.stack([np.maximum(numbers - 1, 0), numbers], 1)
    ends = {"end": np.arange(9) == 8, "none": None}
    batch = Step({"now": stacks[:-1], "then": stacks[1:]}, (numbers[:-1], numbers[1:]), ends)
    state = init(buffer, jax.tree.map(lambda leaf: leaf[0], batch))
    state, (items, is_intact) = extended(buffer, state, batch)
    assert len(jax.tree.leaves(state.items)) == 1
    assert is_intact.all()
    jax.tree.map(lambda kept, given: np.testing.assert_array_equal(kept, np.roll(given[-6:], 3, 0)), items, batch)
