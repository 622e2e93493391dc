"""Every item once, in the order in which items came."""

import dataclasses
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbuf import Buffer, BufferState, Fifo, FifoState, Slices, Trajectories, importance_weights
from tests.fbuf.compiled import extend, init, sample
from tests.fbuf.model import assert_same
from tests.fbuf.test_compile_facts import bytes_of, copied

pytestmark = pytest.mark.usefixtures("device")

draw_from = jax.jit(Fifo.sample, static_argnums=(0, 3))
written = jax.jit(Fifo.written, static_argnums=0)


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


def test_what_is_overwritten_unread_is_lost_and_counted() -> None:
    buffer = Buffer(4, Fifo())
    state, _ = extend(buffer, init(buffer, np.int32(0)), np.arange(6, dtype=np.int32))
    assert (state.sampler.unread, state.sampler.lost) == (4, 2)
    state, _ = extend(buffer, state, np.arange(6, 9, dtype=np.int32))
    assert (state.sampler.unread, state.sampler.lost) == (4, 5)
    state, items, draw = sample(buffer, state, jax.random.key(0), 6)
    assert items[draw.valid].tolist() == [5, 6, 7, 8]
    state, _, draw = sample(buffer, state, jax.random.key(0), 6)
    assert not draw.valid.any()
    assert state.sampler.lost == 5


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


def test_importance_weights_are_one() -> None:
    buffer = Buffer(8, Fifo())
    state, _ = extend(buffer, init(buffer, np.int32(0)), np.zeros(5, np.int32))
    _, _, draw = sample(buffer, state, jax.random.key(0), 7)
    for normalize in ("buffer", "batch", "none"):
        np.testing.assert_allclose(importance_weights(draw, 0.7, normalize), [1] * 5 + [0] * 2, rtol=1e-6)


def turn(state: BufferState, batch: Any) -> tuple[BufferState, Any]:
    """Each item is written, and learnt from once."""
    buffer = Buffer(6, Fifo(), lanes=(2,))
    state, _ = buffer.extend(state, batch)
    state, items, draw = buffer.sample(state, jax.random.key(0), 6)
    return state, (items, draw)


@pytest.mark.slow
def test_loops_scans_buffers_side_by_side_and_64_bit_types_agree() -> None:
    buffer, once = Buffer(6, Fifo(), lanes=(2,)), jax.jit(turn)
    batches = np.arange(2 * 5 * 4 * 2, dtype=np.int32).reshape(2, 5, 4, 2)
    start = init(buffer, np.int32(0))
    run = jax.jit(lambda state, batches: jax.lax.scan(turn, state, batches))
    side_by_side = jax.jit(jax.vmap(run, in_axes=(None, 0)))(start, batches)
    state, seen = start, []
    for batch in batches[1]:
        state, out = once(state, batch)
        seen.append(out)
    looped = (state, jax.tree.map(lambda *each: jnp.stack(each), *seen))
    assert once._cache_size() == 1
    assert_same(jax.tree.map(lambda leaf: leaf[1], side_by_side), looped)
    with jax.enable_x64(True):
        assert_same(run(start, batches[1]), looped)


def test_a_donated_state_is_updated_in_place() -> None:
    buffer = Buffer(50_000, Fifo(), lanes=(2,))
    state = jax.eval_shape(lambda: buffer.init(np.zeros(2, np.float32)))

    def turns(state: BufferState, batches: jax.Array) -> tuple[BufferState, jax.Array]:
        def turn(state: BufferState, batch: jax.Array) -> tuple[BufferState, jax.Array]:
            state, _ = buffer.extend(state, batch)
            state, items, _ = buffer.sample(state, jax.random.key(0), 6)
            return state, items.sum()

        return jax.lax.scan(turn, state, batches)

    program = jax.jit(turns, donate_argnums=0).lower(state, np.zeros((5, 3, 2, 2), np.float32)).compile()
    assert program.memory_analysis().alias_size_in_bytes == pytest.approx(bytes_of(state), rel=1e-3)
    assert max(copied(program), default=0) < 10_000


def test_a_state_fresh_from_init_or_clear_may_be_donated_while_a_draw_is_kept() -> None:
    buffer = Buffer(6, Fifo())
    donated = jax.jit(buffer.extend, donate_argnums=0)
    state, _ = donated(buffer.clear(buffer.init(np.int32(0))), np.ones(4, np.int32))
    state, _, draw = buffer.sample(state, jax.random.key(0), 3)
    donated(state, np.ones(4, np.int32))
    assert draw.size == 4
    assert draw.valid.all()


def test_what_has_no_meaning_is_refused() -> None:
    buffer = Buffer(4, Fifo())
    with pytest.raises(TypeError, match="Fifo keeps no priorities"):
        buffer.update(buffer.init(np.float32(0)), np.zeros(2, np.int32), np.ones(2, np.float32))
    with pytest.raises(TypeError, match="needs the order of writing"):
        Buffer(4, Slices(2, starts=Fifo()), trajectories=Trajectories("done"))
    with pytest.raises(ValueError, match="the state was not made for"):
        Buffer(4, Fifo()).sample(Buffer(4).init(np.float32(0)), jax.random.key(0), 2)
