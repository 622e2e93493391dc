"""Items of highest rank: as if they came one after the other."""

import dataclasses
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbuf import Buffer, BufferState, HighestRanked
from tests.fbuf.compiled import extend, init
from tests.fbuf.model import assert_same

pytestmark = pytest.mark.usefixtures("device")

RULE = HighestRanked(rank="return")
RANKS = [-np.inf, -2.5, -1.0, 0.0, 0.5, 1.0, 2.0, np.inf, np.nan]


class RankedModel:
    """The items that stay, one by one, each with a search of all."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.ranks, self.names = capacity, list[Any](), list[int]()
        self.written = self.refused = 0

    def extend(self, ranks: list[Any], names: list[int]) -> list[int]:
        """Slots, -1 for those that are not stored in the end."""
        slots: list[int] = []
        for rank, name in zip(ranks, names, strict=True):
            slots.append(self.add(rank, name))
            if slots[-1] >= 0:
                slots[:-1] = [-1 if slot == slots[-1] else slot for slot in slots[:-1]]
        return slots

    def add(self, rank: Any, name: int) -> int:
        if rank != rank:
            self.refused += 1
            return -1
        if len(self.ranks) < self.capacity:
            slot = len(self.ranks)
            self.ranks.append(rank)
            self.names.append(name)
        else:
            lowest = min(self.ranks)
            if not rank > lowest:
                return -1
            slot = self.ranks.index(lowest)
            self.ranks[slot], self.names[slot] = rank, name
        self.written += 1
        return slot


def batch_of(ranks: Any, names: Any, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {"return": np.asarray(ranks).astype(dtype), "name": np.asarray(names, np.int32)}


def empty(buffer: Buffer, dtype: Any = np.float32) -> BufferState:
    return init(buffer, {"return": np.zeros((), dtype), "name": np.int32(0)})


def check(buffer: Buffer, state: BufferState, model: RankedModel) -> None:
    size = len(model.ranks)
    np.testing.assert_array_equal(state.items["name"][:size], model.names)
    np.testing.assert_array_equal(state.items["return"][:size], model.ranks)
    assert not state.items["name"][size:].any()
    ring = state.ring
    assert (buffer.size(state), ring.size, ring.refused) == (size, size, model.refused)
    np.testing.assert_array_equal(ring.written, [model.written, 0])
    np.testing.assert_array_equal(ring.ranks[0][:size], model.ranks)
    for below, level in zip(ring.ranks, ring.ranks[1:], strict=False):
        least = np.asarray(below).reshape(-1, 128).min(axis=1)
        np.testing.assert_array_equal(level[: len(least)], least)


@pytest.mark.parametrize(
    ("capacity", "counts"), [(1, [1, 4]), (5, [0, 1, 13]), pytest.param(130, [3, 90], marks=pytest.mark.slow)], ids=str
)
@given(data=st.data())
@settings(max_examples=15)
def test_a_history_leaves_what_one_item_after_the_other_leaves(
    capacity: int, counts: list[int], data: st.DataObject
) -> None:
    buffer, model = Buffer(capacity, writer=RULE), RankedModel(capacity)
    state, named = empty(buffer), 0
    for kind in data.draw(st.lists(st.sampled_from(["extend"] * 6 + ["clear"]), max_size=8)):
        if kind == "clear":
            state, model = buffer.clear(state), RankedModel(capacity)
            assert_same(state.ring, empty(buffer).ring)
            state = dataclasses.replace(state, items=jax.tree.map(jnp.zeros_like, state.items))
            continue
        count = data.draw(st.sampled_from(counts))
        ranks = data.draw(st.lists(st.sampled_from(RANKS), min_size=count, max_size=count))
        names, named = list(range(named, named + count)), named + count
        state, slots = extend(buffer, state, batch_of(ranks, names))
        assert slots.tolist() == model.extend([float(rank) for rank in ranks], names)
        assert slots.dtype == jnp.int32
        check(buffer, state, model)


@pytest.mark.parametrize(
    "dtype",
    [
        np.int8,
        np.uint32,
        jnp.bfloat16,
    ],
    ids=str,
)
def test_ranks_of_any_real_type_are_compared_as_they_are(dtype: Any) -> None:
    top = np.asarray(np.inf) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
    low = -np.asarray(np.inf) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min
    buffer, model, rng = Buffer(3, writer=RULE), RankedModel(3), np.random.default_rng(0)
    state = empty(buffer, dtype)
    near = np.asarray([low, top, 0, 1, 2, 100], dtype)
    if dtype is np.uint32:  # neighbours that no float32 tells apart
        near = np.asarray([low, top, top - 1, top - 2, 2**30, 2**30 + 1], dtype)
    for i in range(12):
        ranks = rng.choice(near, 2)
        state, slots = extend(buffer, state, batch_of(ranks, [2 * i, 2 * i + 1], dtype))
        assert slots.tolist() == model.extend(list(ranks), [2 * i, 2 * i + 1])
        check(buffer, state, model)


def test_many_items_over_three_levels_leave_what_a_heap_leaves() -> None:
    capacity, count, rng = 20_000, 1_500, np.random.default_rng(0)
    buffer, heap = Buffer(capacity, writer=RULE), list[tuple[float, int, int]]()
    state, names = empty(buffer), np.full(capacity, -1)
    assert len(state.ring.ranks) == 3
    for i in range(25):
        ranks = rng.integers(0, 1000 + 40 * i, count).astype(np.float32)
        state, slots = extend(buffer, state, batch_of(ranks, np.arange(count) + i * count))
        expected = np.full(count, -1)
        for j, rank in enumerate(ranks.tolist()):
            if len(heap) < capacity:
                slot = len(heap)
                heapq.heappush(heap, (rank, slot, 0))
            elif rank > heap[0][0]:
                slot = heap[0][1]
                heapq.heapreplace(heap, (rank, slot, 0))
            else:
                continue
            expected[expected == slot] = -1
            names[slot], expected[j] = i * count + j, slot
        np.testing.assert_array_equal(slots, expected)
    np.testing.assert_array_equal(state.items["name"], names)
    assert 0 < np.sum(slots >= 0) < count


class Pair(NamedTuple):
    score: Any
    rest: Any


@pytest.mark.parametrize(
    ("rank", "item"),
    [
        ((0, "score"), (Pair(np.float32(0), np.zeros(3, np.float32)), np.int8(0))),
        ((), np.float32(0)),
    ],
    ids=str,
)
def test_the_rank_may_be_any_leaf(rank: Any, item: Any) -> None:
    buffer = Buffer(2, writer=HighestRanked(rank))
    batch = jax.tree.map(lambda leaf: np.stack([np.full_like(leaf, value) for value in (3, 1, 2, 4)]), item)
    state, slots = extend(buffer, init(buffer, item), batch)
    assert slots.tolist() == [0, -1, -1, 1]
    assert sorted(state.ring.ranks[0][:2].tolist()) == [3, 4]
    assert_same(buffer.read(state, slots[3:]), jax.tree.map(lambda leaf: leaf[3:], batch))


def test_the_count_of_accepted_items_passes_32_bits() -> None:
    buffer = Buffer(4, writer=RULE)
    state = empty(buffer)
    ring = dataclasses.replace(state.ring, written=jnp.asarray([2**32 - 3, 0], jnp.uint32))
    state, _ = extend(buffer, dataclasses.replace(state, ring=ring), batch_of(range(7), range(7)))
    np.testing.assert_array_equal(state.ring.written, [4, 1])
