"""Every item once, in the order in which items came."""

import dataclasses
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbuf import Buffer, Fifo, FifoState
from tests.fbuf.compiled import extend, init, jit, sample

pytestmark = pytest.mark.usefixtures("device")

draw_from = jit(Fifo.sample, static_argnums=(0, 3))
written = jit(Fifo.written, static_argnums=0)


class QueueModel:
    """What waits to be returned, item by item."""

    def __init__(self, capacity: int, per_row: int) -> None:
        self.capacity, self.per_row = capacity * per_row, per_row
        self.waiting, self.lost, self.count = deque[int](), 0, 0

    def extend(self, rows: int) -> np.ndarray:
        """The values of new items, numbered from 0 on."""
        values = np.arange(self.count, self.count + rows * self.per_row)
        self.count += len(values)
        for value in values:
            self.waiting.append(value)
            if len(self.waiting) > self.capacity:
                self.waiting.popleft()
                self.lost += 1
        return values

    def draw(self, count: int) -> list[int]:
        return [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]


@pytest.mark.parametrize(
    ("capacity", "lanes"),
    [(1, ()), pytest.param(7, (), marks=pytest.mark.slow), pytest.param(5, (2,), marks=pytest.mark.slow), (3, (2, 2))],
    ids=str,
)
@given(data=st.data())
@settings(max_examples=15)
def test_a_history_returns_what_waits_in_a_queue(capacity: int, lanes: tuple[int, ...], data: st.DataObject) -> None:
    buffer, per_row = Buffer(capacity, Fifo(), lanes=lanes), int(np.prod(lanes))
    state, model = init(buffer, np.int32(0)), QueueModel(capacity, per_row)
    stored = 0
    for kind in data.draw(st.lists(st.sampled_from(["extend", "extend", "sample", "sample", "clear"]), max_size=14)):
        if kind == "clear":
            state, model, stored = buffer.clear(state), QueueModel(capacity, per_row), 0
        elif kind == "extend":
            rows = data.draw(st.sampled_from([0, 1, 3, 17]))
            values = model.extend(rows)
            state, _ = extend(buffer, state, values.reshape(rows, *lanes).astype(np.int32))
            stored = min(stored + rows, capacity)
        else:
            count = data.draw(st.sampled_from([1, 5]))
            state, items, draw = sample(buffer, state, jax.random.key(0), count)
            expected = model.draw(count)
            np.testing.assert_array_equal(draw.valid, np.arange(count) < len(expected))
            assert items[: len(expected)].tolist() == expected
            assert ((draw.slots >= 0) & (draw.slots < capacity * per_row)).all()
            assert draw.size == stored * per_row
            np.testing.assert_array_equal(draw.probability, np.full(count, 1 / max(stored * per_row, 1), np.float32))
        assert (state.sampler.unread, state.sampler.lost) == (len(model.waiting), model.lost)


def test_slots_near_the_largest_capacity_do_not_overflow() -> None:
    capacity = 2**31 - 9
    state = FifoState(jnp.int32(capacity - 3), jnp.int32(capacity - 1), jnp.uint32(2**32 - 1), capacity)
    state = written(Fifo(), state, jnp.asarray([capacity - 3, capacity - 2, capacity - 1, 0], jnp.int32))
    assert (state.head, state.unread, state.lost) == (1, capacity, 2)
    state, draw = draw_from(Fifo(), state, jax.random.key(0), 3, jnp.int32(capacity))
    np.testing.assert_array_equal(draw.slots, [1, 2, 3])
    late = dataclasses.replace(state, head=jnp.int32(2), unread=jnp.int32(5))
    late, draw = draw_from(Fifo(), late, jax.random.key(0), 8, jnp.int32(capacity))
    np.testing.assert_array_equal(draw.slots[:5], [capacity - 3, capacity - 2, capacity - 1, 0, 1])
    np.testing.assert_array_equal(draw.valid, np.arange(8) < 5)
