"""Priorities that were saved: the tree rebuilt of them has the same bits, and fits what is stored."""

import numpy as np
import pytest
import torch

from fbuf.checkpoint import CheckpointMismatch
from interop import LazyTensorStorage, PrioritizedSampler
from tests.interop.checkpoint.saved_trees import put_into
from tests.interop.pair_history import items


@pytest.mark.parametrize("capacity", [4, 6, 20])
def test_priorities_fit_another_capacity_if_every_item_does(capacity: int) -> None:
    sampler, storage = PrioritizedSampler(12, 1, 1), LazyTensorStorage(12)
    storage.set(slice(0, 6), torch.arange(6))
    sampler.mark_update(np.arange(6), storage=storage)
    sampler.update_priority(np.arange(6), np.arange(6.0) + 1)
    twin = PrioritizedSampler(capacity, 1, 1)
    if capacity < 6:
        with pytest.raises(CheckpointMismatch, match="max_capacity"):
            put_into(twin, sampler.state())
        assert twin.functional_state is None
        return
    put_into(twin, sampler.state())
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
    put_into(twin, sampler.state())
    with pytest.raises(RuntimeError, match="priorities of 6 items, and 4 items are stored"):
        twin.sample(_of(4), 2)
