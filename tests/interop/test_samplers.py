"""RandomSampler and PrioritizedSampler: the exact laws of draws, weights and default priorities."""

import numpy as np
import pytest
import torch
from scipy import stats

from interop import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
)
from tests.interop.rows import ALL_STORAGES, check_same, plain_tensor

DRAWS = 20_000


def filled(priorities, alpha=1.0, beta=1.0, capacity=None, storage=LazyTensorStorage, **kwargs):
    """A buffer of rows 0, 1, ... with these priorities."""
    capacity = capacity or max(8, len(priorities))
    buffer = ReplayBuffer(
        storage=storage(capacity),
        sampler=PrioritizedSampler(capacity, alpha, beta, **kwargs),
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(plain_tensor(list(range(len(priorities)))))
    buffer.update_priority(torch.arange(len(priorities)), torch.as_tensor(priorities))
    return buffer


def check_law(index, chances):
    """The draws follow the chances, by chi-square; what has none is never drawn."""
    chances = np.asarray(chances, dtype=np.float64)
    counts = np.bincount(index.numpy(), minlength=len(chances))
    assert counts[chances == 0].sum() == 0
    kept = chances > 0
    expected = counts.sum() * chances[kept] / chances.sum()
    assert stats.chisquare(counts[kept], expected).pvalue > 1e-4


@pytest.mark.parametrize("make", ALL_STORAGES)
def test_every_filled_slot_is_drawn_equally_often(make):
    buffer = ReplayBuffer(storage=ALL_STORAGES[make](50), generator=torch.Generator().manual_seed(0))
    buffer.extend(plain_tensor(list(range(13))))
    index = buffer.sample(DRAWS, return_info=True)[1]["index"]
    check_law(index, np.ones(13))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 1.1])
@pytest.mark.parametrize("make", ALL_STORAGES)
def test_items_are_drawn_in_proportion_to_their_priority(make, alpha):
    priorities = np.array([0.3, 1.0, 0.05, 4.0, 2.0, 0.7])
    buffer = filled(priorities, alpha, capacity=8, storage=ALL_STORAGES[make])
    index = buffer.sample(DRAWS, return_info=True)[1]["index"]
    check_law(index, (priorities + 1e-8) ** alpha)


@pytest.mark.parametrize(
    ("alpha", "beta", "eps"), [(0.7, 0.5, 1e-8), (0.6, 1.0, 0.1), (1.5, 0.0, 1e-8), (0.0, 1.0, 0.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_follow_the_formula(alpha, beta, eps, dtype):
    priorities = torch.tensor([0.3, 1.0, 0.05, 4.0], dtype=dtype)
    info = filled(priorities, alpha, beta, capacity=8, eps=eps, dtype=dtype).sample(64, return_info=True)[1]
    assert info["priority_weight"].dtype == dtype
    value = (priorities + eps) ** alpha
    torch.testing.assert_close(info["priority_weight"], (value / value.min()).pow(-beta)[info["index"]])
    assert bool((info["priority_weight"] <= 1 + 1e-6).all())


def test_tiny_chances_beside_large_ones_are_exact():
    priorities = np.array([1e6, 1.0, 1e-3] + [100.0] * 13)
    index = filled(priorities, 0.5, capacity=16).sample(DRAWS, return_info=True)[1]["index"]
    expected = np.sqrt(priorities + 1e-8)
    check_law(torch.where(index < 3, torch.clamp(index, max=1), index), [expected[0], expected[1] + expected[2], 0,
              *expected[3:]])  # fmt: skip


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), 1e39])
def test_bad_exponents_are_refused_and_change_nothing(value):
    buffer = filled([1.0, 4.0])
    with pytest.raises(ValueError):
        buffer.sampler.alpha = value
    assert buffer.sampler.alpha == 1.0
    with pytest.raises(ValueError):
        PrioritizedSampler(10, value, 1.0)
    if value < 1e39:
        for arguments in ((10, 1.0, value), (10, 1.0, 1.0, value)):
            with pytest.raises(ValueError):
                PrioritizedSampler(*arguments)


def test_the_highest_priority_may_be_that_within_the_buffer():
    buffer = filled([1.0, 3.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0], capacity=8, max_priority_within_buffer=True)
    assert buffer.sampler.default_priority == pytest.approx(5.0)
    buffer.update_priority(3, 2.0)
    assert buffer.sampler.default_priority == pytest.approx(3.0)
    buffer.update_priority(0, 8.0)
    buffer.add(plain_tensor([4])[0])  # over slot 0, which has the highest
    check_same(buffer.sampler.priorities[0], torch.tensor(8.0))
    assert buffer.sampler.default_priority == pytest.approx(1.0)
    buffer.add(plain_tensor([5])[0])
    check_same(buffer.sampler.priorities[1], torch.tensor(1.0))


def test_minus_one_is_ignored_with_its_priority():
    buffer = filled([1.0, 1.0, 1.0])
    buffer.update_priority(torch.tensor([-1, 2, -1]), torch.tensor([9.0, 2.0, 8.0]))
    check_same(buffer.sampler.priorities, torch.tensor([1.0, 1.0, 2.0]))
    buffer.update_priority(torch.tensor([-1]), torch.tensor([9.0]))
    buffer.update_priority(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    check_same(buffer.sampler.priorities, torch.tensor([1.0, 1.0, 2.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_priorities_of_every_dtype_are_taken(dtype):
    buffer = filled([1.0, 1.0])
    buffer.update_priority(torch.arange(2), torch.tensor([2, 4], dtype=dtype))
    check_same(buffer.sampler.priorities, torch.tensor([2.0, 4.0]))
