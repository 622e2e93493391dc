"""Which stored rows follow each other: against lists of rows, over every way to write them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf import Buffer, BufferState, RingState, Slices, Trajectories, trajectories, writers
from tests.fbuf.compiled import clear, extend, place
from tests.fbuf.trajectory_model import (
    ITEM,
    OPEN,
    TERMINATED,
    TRUNCATED,
    Rows,
    TrajectoriesModel,
    histories,
)

pytestmark = pytest.mark.usefixtures("device")

ENDS, ALL = Trajectories("terminated", "truncated"), Trajectories("terminated", "truncated", "id")
BUFFERS = [
    (Buffer(7, trajectories=ALL), (1, 3, 11)),
    (Buffer(5, trajectories=ENDS, lanes=(2, 1)), (1, 2, 8)),
    pytest.param(Buffer(1, trajectories=ALL, lanes=(2,)), (1, 3), marks=pytest.mark.slow),
    (Buffer(6, trajectories=Trajectories(id="id")), (1, 6, 13)),
]


def write(buffer: Buffer, state: BufferState, model: TrajectoriesModel, new: Rows) -> BufferState:
    """The state after a write, which the model sees too."""
    assert buffer.trajectories is not None
    ended = new.ended if buffer.trajectories.terminated else np.zeros_like(new.ended)
    serials = model.write(ended, new.id if buffer.trajectories.id else None)
    return extend(buffer, state, new.batch(serials, buffer.lanes))[0]


def at(buffer: Buffer, state: BufferState, slots: Any) -> Any:
    """Place as NumPy arrays, of as many slots as there are, by one program."""
    every = np.resize(np.asarray(slots, np.int32), buffer.capacity * buffer.items_per_row)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(slots)], place(buffer, state, every))


def assert_places(buffer: Buffer, state: BufferState, model: TrajectoriesModel) -> None:
    """Each stored item stands where the model has it."""
    stored = model.stored()
    assert sum(len(each.slots) for each in stored) == buffer.size(state)
    if not stored:
        return
    found = at(buffer, state, [slot for each in stored for slot in each.slots])
    lengths = [len(each.slots) for each in stored]
    before = np.concatenate([np.arange(length) for length in lengths])
    np.testing.assert_array_equal(found.before, before)
    np.testing.assert_array_equal(found.after, np.repeat(lengths, lengths) - 1 - before)
    np.testing.assert_array_equal(found.step, before + np.repeat([each.lost for each in stored], lengths))
    np.testing.assert_array_equal(found.kind, np.repeat([each.kind for each in stored], lengths))
    np.testing.assert_array_equal(found.lane, np.repeat([each.lane for each in stored], lengths))
    firsts = np.cumsum([0, *lengths[:-1]])
    np.testing.assert_array_equal(found.number, np.repeat(found.number[firsts], lengths))
    assert len({*zip(found.lane[firsts], found.number[firsts], strict=True)}) == len(stored)


@pytest.mark.parametrize(("buffer", "counts"), BUFFERS, ids=lambda what: repr(getattr(what, "trajectories", what)))
@given(data=st.data())
def test_items_stand_where_lists_of_rows_have_them(buffer: Buffer, counts: tuple[int, ...], data: Any) -> None:
    state, model = buffer.init(ITEM), TrajectoriesModel(buffer.capacity, buffer.items_per_row)
    for new in data.draw(histories(buffer.items_per_row, counts)):
        if new is None:
            state = clear(buffer, state)
            model.clear()
        else:
            state = write(buffer, state, model, new)
        assert_places(buffer, state, model)


# -------------------------------------------------------------------------- counters near their ends


@pytest.mark.parametrize("capacity", [7, 2**31 - 9])
def test_rows_and_times_of_the_largest_ring_are_right(capacity: int) -> None:
    random = np.random.default_rng(0)
    for size in (capacity, capacity // 2 + 1):
        cursor = int(random.integers(capacity)) if size == capacity else size
        ring = RingState.of(jnp.int32(cursor), jnp.int32(size), jnp.asarray([5, 0], jnp.uint32))
        row = np.unique([0, size - 1, max(cursor - 1, 0), min(cursor, size - 1), *random.integers(size, size=20)])
        age = (cursor - 1 - row) % capacity
        of_rows = trajectories.stored_before(ring, jnp.asarray(row, jnp.int32), capacity)
        np.testing.assert_array_equal(of_rows, size - 1 - age)
        times = trajectories.time_of(ring, jnp.asarray(row, jnp.int32), capacity)
        np.testing.assert_array_equal(times, (4 - age) % 2**32)
        for steps in (1 - capacity, -1, 0, 1, capacity - 1, int(random.integers(capacity))):
            moved = writers.moved(jnp.asarray(row, jnp.int32), jnp.full(row.shape, steps, jnp.int32), capacity)
            np.testing.assert_array_equal(moved, (row + steps) % capacity)


# -------------------------------------------------------------------------- programs


def test_slots_may_have_any_shape_and_integers_of_any_width() -> None:
    buffer = Buffer(2, lanes=(300,), trajectories=Trajectories("end"))
    state, _ = extend(buffer, buffer.init({"end": np.bool_(0)}), {"end": np.zeros((2, 300), bool)})
    for dtype in (np.uint8, np.int64):
        slots = np.asarray([[3, 60], [120, 5]], dtype)
        found = place(buffer, state, slots) if dtype is not np.int64 else buffer.place(state, slots)
        np.testing.assert_array_equal(found.lane, slots)
        np.testing.assert_array_equal(found.step, np.zeros((2, 2)))
        assert found.lane.dtype == jnp.int32
    assert buffer.place(state, np.int32(360)).lane == 60


# -------------------------------------------------------------------------- where items say it


class Pair(NamedTuple):
    left: Any
    right: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["end"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Step:
    end: Any


FLAG, NO_FLAG = np.bool_(0), np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("path", "item"),
    [
        ("end", {"end": FLAG}),
        (("next", "end"), {"next": {"end": FLAG, "x": NO_FLAG}}),
        (("next", "end"), {"next": Step(FLAG)}),
        ("end", Step(np.zeros((1, 1), np.bool_))),
        (("right", 0, "end"), Pair(NO_FLAG, [{"end": np.zeros(1, np.bool_)}])),
    ],
    ids=str,
)
def test_a_leaf_is_found_by_keys_fields_and_places(path: Any, item: Any) -> None:
    where = Trajectories(truncated=path)
    Buffer(4, trajectories=where).init(item)
    batch = jax.tree.map(lambda leaf: np.zeros((3, *leaf.shape), leaf.dtype), item)
    batch = jax.tree.map(lambda leaf: leaf if leaf.dtype != bool else np.arange(3).reshape(leaf.shape) == 1, batch)
    ended, ids = where.marks(batch, ())
    assert ended.tolist() == [[OPEN], [TRUNCATED], [OPEN]] and ids is None


@pytest.mark.parametrize("dtype", [np.int8, np.uint32])
def test_ids_may_be_integers_of_any_kind(dtype: Any) -> None:
    buffer = Buffer(8, trajectories=Trajectories(id="id"))
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    ids = np.asarray([low, low, high, high, high, high - 1, low], dtype)
    state, slots = extend(buffer, buffer.init({"id": dtype(0)}), {"id": ids})
    assert place(buffer, state, slots).after.tolist() == [1, 0, 2, 1, 0, 0, 0]
    assert state.trajectories is not None and state.trajectories.id is not None
    assert state.trajectories.id.dtype == dtype


MARKS = {"goes on": (0.0, -0.0), "ends": (1.0, 0.5, -1.0, np.inf, np.nan)}


def test_an_end_may_be_marked_by_a_float() -> None:
    values = [value for pair in zip(MARKS["goes on"] * 3, MARKS["ends"], strict=False) for value in pair]
    marks = np.asarray(values, np.float32)
    flags = marks.astype(bool)
    assert flags.tolist() == [False, True] * 5
    batch = {"flag": flags, "mark": marks, "discount": np.where(flags, 0, 0.9).astype(jnp.bfloat16)}
    for paths, kind in (
        ({"terminated": "mark"}, TERMINATED),
        ({"truncated": "mark"}, TRUNCATED),
        ({"discount": "discount"}, TERMINATED),
        ({"truncated": "flag", "discount": "discount"}, TERMINATED),
    ):
        rule = Trajectories(**paths)
        ended, ids = rule.marks(batch, ())
        assert ended[:, 0].tolist() == [0, kind] * 5 and ids is None
        Buffer(2, trajectories=rule).init(jax.tree.map(lambda leaf: leaf[0], batch))


def test_an_id_that_is_no_number_is_one_id() -> None:
    buffer = Buffer(6, Slices(2), trajectories=Trajectories(id="id"))
    ids = jnp.asarray([np.nan, np.nan, 0.0, -0.0, 1.0, 1.0])
    state = buffer.init({"x": jnp.zeros((), int), "id": jnp.zeros(())})
    state, _ = buffer.extend(state, {"x": jnp.arange(6), "id": ids})
    _, items, draw = buffer.sample(state, jax.random.key(0), 2 * 64)
    assert draw.valid.all() and {tuple(pair) for pair in items["x"].tolist()} == {(0, 1), (2, 3), (4, 5)}
