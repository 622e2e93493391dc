"""A buffer against the plain model, and wherever it may run."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbuf import Buffer, BufferState, Prioritized, Uniform
from tests.fbuf.compiled import extend, init, sample, update
from tests.fbuf.model import BufferModel, PrioritiesModel, assert_same, assert_tree_is_exact

pytestmark = pytest.mark.usefixtures("device")

ITEM = {
    "observation": np.zeros(2, np.float32),
    "rest": (np.zeros((), np.int8), {"image": np.zeros((2, 2), np.uint8), "done": np.zeros((), np.bool_)}),
}
STORED = Prioritized(alpha=0.6, eps=0.01, stratified=True, new_items="highest_stored")
SAMPLERS = [Uniform(), Prioritized(alpha=0.7, eps=0.01), STORED]


def numbered(item: Any, shape: tuple[int, ...], start: int) -> Any:
    """A batch like `item` in which no two items are the same, numbered from `start`."""
    count = int(np.prod(shape))

    def leaf(example: np.ndarray) -> np.ndarray:
        size = max(example.size, 1)
        values = np.arange(start * size, (start + count) * size).reshape(*shape, *example.shape)
        return (values % 100).astype(example.dtype) if example.dtype.itemsize == 1 else values.astype(example.dtype)

    return jax.tree.map(leaf, item)


@st.composite
def histories(draw: st.DrawFn, items: int, counts: list[int], updates: bool) -> list[tuple[Any, ...]]:
    """What happens to a buffer: extensions by one of these counts, samples, and updates with slots good and bad."""
    priority = st.sampled_from([0.0, 0.25, 1.0, 2.0, 3.5, 10.0, 1e4, -1.0, np.nan, np.inf, -np.inf])
    slot = st.integers(-2, items + 8)
    kinds = st.sampled_from(["extend", "extend", "sample", *(["update", "update"] if updates else [])])
    history: list[tuple[Any, ...]] = []
    for kind in draw(st.lists(kinds, min_size=1, max_size=7)):
        if kind == "extend":
            history.append((kind, draw(st.sampled_from(counts))))
        elif kind == "sample":
            history.append((kind, draw(st.integers(0, 2**32 - 1))))
        else:
            size = draw(st.sampled_from([0, 6]))
            slots = draw(st.lists(slot, min_size=size, max_size=size))
            priorities = draw(st.lists(priority, min_size=size, max_size=size))
            history.append((kind, np.asarray(slots, np.int32), np.asarray(priorities, np.float32)))
    return history


def check_sample(buffer: Buffer, state: BufferState, model: BufferModel, seed: int) -> BufferState:
    after, batch, draw = sample(buffer, state, jax.random.key(seed), 8)
    stored = model.ring.size * buffer.items_per_row
    weights = (np.arange(buffer.capacity * buffer.items_per_row) < stored).astype(float)
    if model.priorities is not None:
        weights = model.priorities.values()
    slots = np.asarray(draw.slots)
    assert draw.size == stored
    assert (np.asarray(draw.valid) == weights.any()).all()
    if weights.any():
        assert (weights[slots] > 0).all()
        np.testing.assert_allclose(draw.probability, (weights / weights.sum())[slots], rtol=1e-5)
        np.testing.assert_allclose(draw.smallest, (weights[weights > 0] / weights.sum()).min(), rtol=1e-5)
        assert_same(batch, model.item(slots))
    return after


def check_state(buffer: Buffer, state: BufferState, model: BufferModel) -> None:
    assert_same(state.items, model.items)
    ring = model.ring
    assert_same(
        [state.ring.cursor, state.ring.size, state.ring.written],
        [np.int32(ring.cursor), np.int32(ring.size), np.uint32([ring.written, 0])],
    )
    assert buffer.size(state) == ring.size * buffer.items_per_row
    if model.priorities is None:
        return
    kept = state.sampler
    np.testing.assert_array_equal(kept.priorities[: len(model.priorities.given)], model.priorities.given)
    assert (kept.priorities[len(model.priorities.given) :] == -1).all()
    assert (kept.highest, kept.refused) == (model.priorities.highest, model.priorities.refused)
    np.testing.assert_allclose(kept.tree.leaves[: kept.tree.capacity], model.priorities.values(), rtol=1e-5)
    assert_tree_is_exact(kept.tree)


@pytest.mark.parametrize(
    ("buffer", "counts"),
    [
        (Buffer(1), [0, 1, 3]),
        (Buffer(3, lanes=(2, 2)), [0, 2, 7]),
        pytest.param(Buffer(40), [0, 7, 41], marks=pytest.mark.slow),
        pytest.param(Buffer(1, SAMPLERS[1]), [1, 3], marks=pytest.mark.slow),
        (Buffer(5, SAMPLERS[1]), [0, 1, 13]),
        (Buffer(7, SAMPLERS[1], lanes=(2, 2)), [3, 9]),
        pytest.param(Buffer(5, STORED), [1], marks=pytest.mark.slow),
        (Buffer(2, STORED, lanes=(3,)), [1]),
    ],
    ids=str,
)
@given(data=st.data())
@settings(max_examples=10)
def test_a_history_leaves_what_it_leaves_in_the_model(buffer: Buffer, counts: list[int], data: st.DataObject) -> None:
    items, rule, priorities = buffer.capacity * buffer.items_per_row, buffer.sampler, None
    if isinstance(rule, Prioritized):
        priorities = PrioritiesModel(items, rule.alpha, rule.eps, rule.new_items)
    state, model = init(buffer, ITEM), BufferModel(buffer.capacity, buffer.lanes, ITEM, priorities)
    for kind, *what in data.draw(histories(items, counts, priorities is not None)):
        if kind == "sample":
            state = check_sample(buffer, state, model, what[0])
        elif kind == "update":
            state = update(buffer, state, *what)
            model.priorities.update(*what)
        else:
            batch = numbered(ITEM, (what[0], *buffer.lanes), model.ring.written * buffer.items_per_row)
            state, slots = extend(buffer, state, batch)
            assert_same(slots, model.extend(batch, what[0]))
        check_state(buffer, state, model)


@pytest.mark.parametrize("rule", SAMPLERS, ids=repr)
def test_nothing_is_valid_in_a_buffer_that_is_empty_or_cleared(rule: Any) -> None:
    buffer = Buffer(4, rule)
    empty = init(buffer, np.float32(0))
    _, _, draw = sample(buffer, empty, jax.random.key(0), 8)
    assert not draw.valid.any()
    assert ((draw.slots >= 0) & (draw.slots < 4)).all()
    full, _ = extend(buffer, empty, np.ones(5, np.float32))
    _, _, draw = sample(buffer, full, jax.random.key(0), 8)
    assert draw.valid.all()
    cleared = buffer.clear(full)
    assert_same((cleared.ring, cleared.sampler), (empty.ring, empty.sampler))
    assert not sample(buffer, cleared, jax.random.key(0), 8)[2].valid.any()


def test_nothing_is_valid_where_all_priorities_are_zero() -> None:
    buffer = Buffer(4, Prioritized(eps=0))
    state, slots = extend(buffer, init(buffer, np.float32(0)), np.ones(4, np.float32))
    state = update(buffer, state, slots, np.zeros(4, np.float32))
    assert not sample(buffer, state, jax.random.key(0), 8)[2].valid.any()
    state = update(buffer, state, slots[2:3], np.ones(1, np.float32))
    _, _, draw = sample(buffer, state, jax.random.key(0), 8)
    assert draw.valid.all()
    np.testing.assert_array_equal(draw.slots, np.full(8, 2))


def test_one_priority_may_serve_many_slots_of_any_shape() -> None:
    buffer = Buffer(4, Prioritized(), lanes=(3,))
    state, slots = extend(buffer, init(buffer, np.float32(0)), np.ones((2, 3), np.float32))
    expected = update(buffer, state, slots.reshape(-1), np.full(6, 5, np.float32))
    assert_same(update(buffer, state, slots, 5.0), expected)
    assert_same(update(buffer, state, slots, np.full((2, 3), 5, np.float32)), expected)
