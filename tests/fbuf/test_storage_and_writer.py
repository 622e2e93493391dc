"""The ring: which rows new items take, and what lies in them afterwards."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import (
    Buffer,
    Fifo,
    HighestRanked,
    PerTrajectory,
    Prioritized,
    RingState,
    RoundRobin,
    Slices,
    Trajectories,
    storage,
)
from tests.fbuf.compiled import jit
from tests.fbuf.every_pair import items
from tests.fbuf.model import assert_same

pytestmark = pytest.mark.usefixtures("device")

ITEM = {
    "observation": np.zeros((5, 40), np.float32),
    "action": (np.zeros((), np.int8), [np.zeros(100, np.uint8), np.zeros(3, np.bool_)]),
    "other": {"half": np.zeros(7, np.float16), "brain": np.zeros(2, jnp.bfloat16), "wave": np.zeros(2, np.complex64)},
    "empty": np.zeros(0, np.float32),
}


write = jit(storage.write)


@functools.partial(jit, static_argnums=(1, 2))
def claim(ring: RingState, count: int, capacity: int) -> tuple[RingState, jax.Array]:
    return RoundRobin().claim(ring, None, count, capacity)


def ring_at(cursor: int, size: int, written: int = 0) -> RingState:
    words = np.asarray([written % 2**32, written // 2**32], np.uint32)
    return RingState.of(jnp.int32(cursor), jnp.int32(size), jnp.asarray(words))


def rows_of(shape: tuple[int, ...], seed: int) -> Any:
    """A batch like ITEM with different values in every place."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.integers(0, 100, (*shape, *leaf.shape)).astype(leaf.dtype), ITEM)


def test_rows_near_the_largest_capacity_do_not_overflow() -> None:
    capacity = 2**31 - 1
    ring, rows = claim(ring_at(capacity - 2, capacity - 2), 5, capacity)
    np.testing.assert_array_equal(rows, [capacity - 2, capacity - 1, 0, 1, 2])
    assert_same(ring, ring_at(3, capacity, 5))
    assert_same(claim(ring, 5, capacity)[0], ring_at(8, capacity, 10))


@pytest.mark.parametrize("before", [2**32 - 3, 2**32 - 7, 2**33 - 1, 5 * 2**32 + 2**31, 2**64 - 2**32 - 1])
def test_the_count_of_writes_passes_32_bits(before: int) -> None:
    ring, _ = claim(ring_at(0, 4, before), 7, 4)
    assert_same(ring, ring_at(3, 4, before + 7))


@pytest.mark.parametrize("lanes", [(), (2, 2)])
@pytest.mark.parametrize("count", [1, 37])
def test_what_is_written_is_read_whatever_its_dtype_and_size(lanes: tuple[int, ...], count: int) -> None:
    capacity, stored = 50, 50 * math.prod(lanes)
    first, second = rows_of((capacity, *lanes), 1), rows_of((count, *lanes), 2)
    held = write(storage.init(capacity, lanes, ITEM), np.arange(capacity), first)
    rows = np.random.default_rng(0).permutation(capacity)[:count].astype(np.int32)
    held = write(held, rows, second)
    for kept, new in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        kept[rows] = new
    assert_same(held, first)
    slots = np.random.default_rng(1).integers(0, stored, count).astype(np.int32)
    flat = jax.tree.map(lambda leaf, item: leaf.reshape(stored, *item.shape)[slots], first, ITEM)
    assert_same(jax.jit(storage.read, static_argnums=2)(held, slots, lanes), flat)


def test_derivatives_pass_through_what_is_written_and_read() -> None:
    count = 70
    buffer = Buffer(100)
    state = buffer.init(np.zeros(3, np.float32))

    def squares(scale: jax.Array) -> tuple[jax.Array, Any]:
        after, slots = buffer.extend(state, jnp.full((count, 3), scale))
        return jnp.sum(buffer.read(after, slots) ** 2), after

    found, after = jax.jit(jax.grad(squares, has_aux=True))(5.0)
    assert found == 2 * 5 * count * 3
    np.testing.assert_array_equal(after.items[:count], 5)


# ---------------------------------------------------------------------- the same rows in another shape

add = jit(Buffer.add, static_argnums=0)
extend = jit(Buffer.extend, static_argnums=0, static_argnames="lanes_first")
ALL = [
    Buffer(5, Fifo(), lanes=(2,)),
    pytest.param(Buffer(5, Prioritized(), writer=HighestRanked("rank")), marks=pytest.mark.slow),
    pytest.param(
        Buffer(5, Slices(2, PerTrajectory()), lanes=(2, 3), trajectories=Trajectories("done")), marks=pytest.mark.slow
    ),
]


def written(buffer: Buffer, count: int) -> Any:
    """A batch of rows [count, *lanes, ...], and an empty state for it."""
    ids = np.arange(count)[:, None] + 1000 * np.arange(buffer.items_per_row)
    batch = jax.tree.map(lambda leaf: leaf.reshape(count, *buffer.lanes, *leaf.shape[2:]), items(ids))
    return batch, buffer.init(items(0))


@pytest.mark.parametrize("buffer", ALL, ids=repr)
def test_rows_are_the_same_one_by_one_and_in_the_order_of_lanes(buffer: Buffer) -> None:
    batch, state = written(buffer, 7)
    turned = jax.tree.map(lambda leaf: np.moveaxis(leaf, 0, len(buffer.lanes)), batch)
    by_time = extend(buffer, state, batch)
    by_lane = extend(buffer, state, turned, lanes_first=True)
    assert_same(by_lane, (by_time[0], np.moveaxis(by_time[1], 0, len(buffer.lanes))))

    row = jax.tree.map(lambda leaf: leaf[0], batch)
    state, slots = add(buffer, state, row)
    assert slots.shape == buffer.lanes
    one = extend(buffer, written(buffer, 1)[1], jax.tree.map(lambda leaf: leaf[None], row))
    assert_same((state, slots), (one[0], one[1][0]))


def test_one_item_may_be_of_plain_numbers() -> None:
    buffer = Buffer(3)
    item = {"a": 1.5, "b": 2, "c": np.ones(2)}
    state, _ = jax.eval_shape(lambda: buffer.add(buffer.init(item), item))
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in state.items.items()} == {
        "a": ((3,), np.float32),
        "b": ((3,), np.int32),
        "c": ((3, 2), np.float32),
    }
