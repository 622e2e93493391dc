"""RandomSampler and PrioritizedSampler: the exact laws of draws, weights and default priorities."""

import jax
import numpy as np
import pytest
import torch
from scipy import stats

import fbuf
from interop import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
)
from interop.data import bridge
from interop.host.priorities import HostPriorities
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


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, False), (torch.float64, True)])
def test_a_random_history_has_the_priorities_and_the_tree_of_a_plain_model(dtype, within):
    """Few and very many changes between draws, excluded items, growth, and a tree that is lost."""
    rule = fbuf.Prioritized(new_items="highest_stored" if within else "highest_ever", dtype=str(dtype)[6:], eps=0.0)
    held, draw, capacity = HostPriorities(rule, 9000, 0.7, excluding=True), np.random.default_rng(0), 9000
    given, excluded = np.full(20_000, -1.0, rule.dtype), np.zeros(20_000, np.bool_)
    highest, slot = 1.0, -1
    for step in range(40):
        count = int(draw.choice([1, 5, 300, 5000]))
        if step % 3 == 0:
            start = min(held.size, capacity - count) if step % 2 else int(draw.integers(0, held.size + 1))
            slots = np.arange(start, min(start + count, capacity))
            held.written(slots)
            given[slots] = highest
            if within:
                highest, slot = (1.0, -1) if slot in slots else (highest, slots[0] if slot < 0 else slot)
        elif step % 3 == 1:
            slots, values = draw.integers(0, held.size, count), draw.random(count).astype(rule.dtype) * 4
            held.update(slots, values, values.max())
            for each, value in zip(slots, values, strict=True):
                given[each] = value
            settled = given[slots]
            if not within:
                highest = max(highest, values.max())
            elif slot in slots:
                slot = int(given.argmax())
                highest = given[slot]
            elif settled.max() > highest or slot < 0:
                slot = int(slots[settled.argmax()])
                highest = given[slot]
        else:
            slots = draw.integers(0, held.size, count)
            excluded[slots] = draw.random(count) < 0.3
            held.exclude(slots, ~excluded[slots])
        if step % 20 == 19:
            capacity += 2000
            held.reserve(capacity)
            excluded[:] = False
        if step % 7 == 6:
            assert held.highest() == (highest, slot)
            weights = np.where((given > 0) & ~excluded, np.maximum(given, 0).astype(np.float64) ** 0.7, 0)
            found, importance, _ = held.sample(np.array([step, 1], np.uint32), 64, held.size, 1.0, [], ())
            np.testing.assert_allclose(importance, weights[weights > 0].min() / weights[found.numpy()], rtol=1e-4)
            total, smallest = held.masses()
            np.testing.assert_allclose([total, smallest], [weights.sum(), weights[weights > 0].min()], rtol=1e-4)
            np.testing.assert_array_equal(held.values.given, given[: held.size])
            tree = held.functional().tree
            held.reweight(0.7)  # the tree is lost
            with bridge.exact():
                for kept, rebuilt in zip(jax.tree.leaves(tree), jax.tree.leaves(held.functional().tree), strict=True):
                    np.testing.assert_array_equal(kept, rebuilt)
