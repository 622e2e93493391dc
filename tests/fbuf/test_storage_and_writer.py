"""The ring: which rows new items take, and what lies in them afterwards."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf import RingState, RoundRobin, storage
from tests.fbuf.compiled import jit
from tests.fbuf.model import RingModel, assert_same

pytestmark = pytest.mark.usefixtures("device")

ITEM = {
    "observation": np.zeros((2, 3), np.float32),
    "action": (np.zeros((), np.int8), [np.zeros(4, np.uint8), np.zeros((), np.bool_)]),
    "other": {"half": np.zeros(1, np.float16), "brain": np.zeros(2, jnp.bfloat16), "wave": np.zeros((), np.complex64)},
}


write = jit(storage.write)
read = jit(storage.read, static_argnums=2)


@functools.partial(jit, static_argnums=(1, 2))
def claim(ring: RingState, count: int, capacity: int) -> tuple[RingState, jax.Array]:
    return RoundRobin().claim(ring, None, count, capacity)


def ring_at(cursor: int, size: int, written: int = 0) -> RingState:
    words = np.asarray([written % 2**32, written // 2**32], np.uint32)
    return RingState(jnp.int32(cursor), jnp.int32(size), jnp.asarray(words))


def rows_of(shape: tuple[int, ...], seed: int) -> Any:
    """A batch like ITEM with different values in every place."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.integers(0, 100, (*shape, *leaf.shape)).astype(leaf.dtype), ITEM)


@pytest.mark.parametrize("capacity", [1, 2, 3, 13, 40])
@given(counts=st.lists(st.sampled_from([0, 1, 5, 41, 100]), max_size=6))
def test_rows_are_those_that_one_write_after_the_other_takes(capacity: int, counts: list[int]) -> None:
    ring, model = RoundRobin().init(capacity, None), RingModel(capacity)
    for count in counts:
        ring, rows = claim(ring, count, capacity)
        np.testing.assert_array_equal(rows, np.asarray([model.claim() for _ in range(count)], np.int32))
        assert_same(ring, ring_at(model.cursor, model.size, model.written))
        assert rows.dtype == jnp.int32


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


@pytest.mark.parametrize("lanes", [(), (3,), (2, 2)])
def test_what_is_written_is_read_and_the_rest_stays(lanes: tuple[int, ...]) -> None:
    items = storage.init(5, lanes, ITEM)
    first, second = rows_of((5, *lanes), 1), rows_of((2, *lanes), 2)
    items = write(items, np.arange(5), first)
    items = write(items, np.asarray([4, 1]), second)
    expected = jax.tree.map(lambda old, new: np.stack([old[0], new[1], old[2], old[3], new[0]]), first, second)
    assert_same(items, expected)
    slots = np.asarray([0, 3, 3, 5 * int(np.prod(lanes)) - 1])
    flat = jax.tree.map(lambda leaf, item: leaf.reshape(-1, *item.shape)[slots], expected, ITEM)
    assert_same(read(items, slots, lanes), flat)
