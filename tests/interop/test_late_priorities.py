"""Asynchronous updates of priorities on an accelerator; here the CPU takes its place."""

import numpy as np
import pytest
import torch

from interop import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
)
from interop.samplers import item_priorities


@pytest.fixture(autouse=True)
def _is_on_an_accelerator(monkeypatch):
    monkeypatch.setattr(item_priorities, "is_accelerator", lambda device: True)


def filled(count: int = 10, **more) -> PrioritizedReplayBuffer:
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(count), **more)
    buffer.extend(torch.arange(count))
    return buffer


def settle(buffer) -> None:
    buffer.sampler.functional_state.priorities.block_until_ready()


@pytest.mark.parametrize(
    ("dtype", "index"),
    [(torch.float32, torch.int64), (torch.float64, torch.int32), (torch.bfloat16, torch.int32)],
)
def test_priorities_equal_those_of_the_host(dtype, index):
    buffer, draw = filled(), np.random.default_rng(0)
    expected = np.ones(10, np.float32)
    for _ in range(20):
        slots, values = draw.integers(-1, 10, 6), torch.from_numpy(draw.random(6)).to(dtype)
        buffer.update_priority(torch.from_numpy(slots).to(index), values)
        for slot, value in zip(slots, values.float().numpy(), strict=True):
            if slot >= 0:
                expected[slot] = value
        np.testing.assert_array_equal(buffer.sampler.priorities.numpy(), expected)
    drawn = buffer.sample(20_000)
    share = np.bincount(drawn.numpy(), minlength=10) / 20_000
    np.testing.assert_allclose(share, expected / expected.sum(), atol=0.02)


@pytest.mark.parametrize(
    ("index", "priority"),
    [
        ([1, 2], [1.0, float("nan")]),
        ([1, 2], [-1.0, 5.0]),
        ([1, 10], [5.0, 5.0]),
    ],
)
def test_a_bad_update_changes_nothing_and_a_later_call_raises(index, priority):
    buffer = filled()
    buffer.update_priority(torch.arange(10), torch.arange(10.0))
    before = buffer.sampler.priorities
    buffer.update_priority(torch.tensor(index), torch.tensor(priority))
    settle(buffer)
    assert torch.equal(buffer.sampler.priorities, before)
    with pytest.raises(ValueError, match="refused as a whole"):
        buffer.sample(4)
    assert buffer.sample(4).shape == (4,)
    buffer.update_priority(torch.tensor(index), torch.tensor(priority))
    settle(buffer)
    with pytest.raises(ValueError, match="refused as a whole"):
        buffer.update_priority(torch.tensor([0]), torch.tensor([3.0]))
    assert torch.equal(buffer.sampler.priorities, before)


@pytest.mark.parametrize("within", [False, True])
def test_new_items_get_the_highest_priority_of_the_device(within):
    storage = LazyTensorStorage(4)
    sampler = PrioritizedSampler(4, 1.0, 1.0, max_priority_within_buffer=within)
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, sampler=sampler)
    buffer.extend(torch.arange(4))
    buffer.update_priority(torch.tensor([2]), torch.tensor([7.0]))
    buffer.extend(torch.arange(2))
    assert sampler.priorities.tolist() == [7, 7, 7, 1] and sampler.default_priority == 7
    buffer.extend(torch.arange(2))
    assert sampler.priorities.tolist()[2:] == [7, 7]
    assert sampler.default_priority == (1 if within else 7)
