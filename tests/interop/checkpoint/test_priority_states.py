"""Priorities that were saved: the tree rebuilt of them has the same bits, and fits what is stored."""

from typing import Any

import jax
import numpy as np
import pytest
import torch

from fbuf.checkpoint import CheckpointMismatch
from interop import LazyTensorStorage, PrioritizedSampler
from tests.interop.checkpoint.saved_trees import put_into
from tests.interop.pair_history import items


def bits(state: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize(
    ("alpha", "dtype", "within", "turns"),
    [
        (0.6, torch.float32, False, 2000),
        pytest.param(1.3, torch.float64, True, 60, marks=pytest.mark.slow),
        pytest.param(1.3, torch.float64, False, 5000, marks=pytest.mark.slow),
        pytest.param(0.7, torch.float64, True, 5000, marks=pytest.mark.slow),
        pytest.param(0.7, torch.float32, True, 5000, marks=pytest.mark.slow),
    ],
)
def test_sums_of_priorities_are_the_same_bits_after_thousands_of_updates(
    alpha: float, dtype: torch.dtype, within: bool, turns: int
) -> None:
    def make() -> PrioritizedSampler:
        return PrioritizedSampler(500, alpha, 0.5, dtype=dtype, max_priority_within_buffer=within)

    sampler, storage, draw = make(), LazyTensorStorage(500), np.random.default_rng(1)
    storage.set(slice(0, 480), torch.arange(480))
    sampler.mark_update(np.arange(480), storage=storage)
    for turn in range(turns):
        count = int(draw.choice([1, 3, 32, 90]))
        sampler.update_priority(draw.integers(0, 480, count), 10 ** draw.uniform(-9, 9, count), storage=storage)
        if turn % 9 == 0:
            sampler.mark_update(draw.integers(0, 480, int(draw.choice([1, 7, 40]))), storage=storage)
        if turn % 50 == 0:
            sampler.sample(storage, 1)  # brings the changes into the tree
        if turn == turns // 2:
            sampler.alpha = 0.7 * alpha
    twin = make()
    with pytest.warns(UserWarning, match="alpha="):
        put_into(twin, sampler.saved())
    one, other = sampler.state, twin.state
    assert one is not None and other is not None
    assert bits(one.tree) == bits(other.tree) and bits(one.ranks) == bits(other.ranks)
    assert bits(one) == bits(other)


def test_priorities_that_wait_are_saved_as_they_are_given() -> None:
    sampler, storage = PrioritizedSampler(12, 1, 1), LazyTensorStorage(12)
    storage.set(slice(0, 4), torch.arange(4))
    sampler.mark_update(np.arange(4), storage=storage)
    sampler.update_priority([0, 1, 2], [5.0, 0.0, 2.0])
    twin = PrioritizedSampler(12, 1, 1)
    put_into(twin, sampler.saved())
    assert twin.priorities.tolist() == [5, 0, 2, 1] and twin.default_priority == 5
    assert torch.equal(twin.priorities, sampler.priorities)


@pytest.mark.parametrize("capacity", [4, 6, 20])
def test_priorities_fit_another_capacity_if_every_item_does(capacity: int) -> None:
    sampler, storage = PrioritizedSampler(12, 1, 1), LazyTensorStorage(12)
    storage.set(slice(0, 6), torch.arange(6))
    sampler.mark_update(np.arange(6), storage=storage)
    sampler.update_priority(np.arange(6), np.arange(6.0) + 1)
    twin = PrioritizedSampler(capacity, 1, 1)
    if capacity < 6:
        with pytest.raises(CheckpointMismatch, match="max_capacity"):
            put_into(twin, sampler.saved())
        assert twin.state is None
        return
    put_into(twin, sampler.saved())
    assert twin.priorities.tolist() == [1, 2, 3, 4, 5, 6]
    room = LazyTensorStorage(capacity)
    room.set(slice(0, 6), torch.arange(6))
    assert twin.sample(room, 100)[0].max() < 6
    if capacity > 6:
        room.set(slice(6, 7), torch.arange(1))
        twin.mark_update(6, storage=room)
        assert len(twin.priorities) == 7


def _of(count: int) -> LazyTensorStorage:
    storage = LazyTensorStorage(count)
    storage.set(slice(0, count), items(np.arange(count), False))
    return storage


def test_priorities_of_other_items_than_are_stored_are_not_drawn_by() -> None:
    sampler = PrioritizedSampler(12, 1, 1)
    sampler.mark_update(np.arange(6), storage=_of(6))
    twin = PrioritizedSampler(12, 1, 1)
    put_into(twin, sampler.saved())
    with pytest.raises(RuntimeError, match="priorities of 6 items, and 4 items are stored"):
        twin.sample(_of(4), 2)
