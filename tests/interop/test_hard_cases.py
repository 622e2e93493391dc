"""Cases that replay buffers are known to get wrong, with their numbers. `tests/fbuf` has those of the functions."""

import numpy as np
import pytest
import torch

import fbuf
from fbuf import priority_tree
from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, PrioritizedReplayBuffer, ReplayBuffer
from tests.fbuf.model import assert_tree_is_exact
from tests.interop.bits import on_each_device

STORAGES = {"memory": LazyTensorStorage, "memmap": LazyMemmapStorage, "list": ListStorage}
in_each_storage = pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)


def prioritized(capacity: int, count: int, device: str = "cpu", **options: float) -> PrioritizedReplayBuffer:
    buffer = PrioritizedReplayBuffer(storage=LazyTensorStorage(capacity, device=device), **options)
    if count:
        buffer.extend(torch.arange(float(count), device=device))
    return buffer


def leaves(state: fbuf.PrioritizedState, count: int) -> list[float]:
    return np.asarray(state.tree.leaves[:count]).tolist()


# ------------------------------------------------------------------ an extend longer than the buffer, equal slots


@in_each_storage
@pytest.mark.parametrize("first", [0, 3], ids=["empty", "used"])
def test_buffers_keep_the_last_rows_of_an_extend_longer_than_the_buffer(make, first):
    at_once, one_by_one = ReplayBuffer(storage=make(4)), ReplayBuffer(storage=make(4))
    for buffer in (at_once, one_by_one):
        for row in range(-first, 0):
            buffer.add(torch.tensor(row))
    slots = at_once.extend(torch.arange(10))
    added = [one_by_one.add(torch.tensor(row)) for row in range(10)]
    assert slots.tolist() == added == [(first + row) % 4 for row in range(10)]
    assert at_once[:].tolist() == one_by_one[:].tolist()
    assert len(at_once) == len(one_by_one) == 4
    assert at_once.write_count == one_by_one.write_count == first + 10
    cursor = (first + 10) % 4
    assert at_once.add(torch.tensor(10)) == one_by_one.add(torch.tensor(10)) == cursor
    assert at_once[(torch.arange(4) + cursor + 1) % 4].tolist() == [7, 8, 9, 10]


@on_each_device
def test_buffers_take_the_last_of_equal_indices(device):
    for _ in range(100):
        buffer = prioritized(6, 6, device, alpha=1, beta=1, eps=0)
        buffer.update_priority(torch.tensor([3, 3, 5]), torch.tensor([1.0, 9.0, 2.0]))
        assert buffer.sampler.priorities.tolist() == [1, 1, 1, 9, 1, 2]
        assert float(priority_tree.total(buffer.sampler.state.tree)) == 15
        assert buffer.sampler.default_priority == 9


# ------------------------------------------------------------------ what can be drawn


@on_each_device
def test_buffers_never_draw_an_item_of_priority_zero(device):
    buffer = prioritized(5, 5, device, alpha=1, beta=1, eps=0)
    buffer.update_priority(torch.arange(5), torch.tensor([0.0, 2, 0, 1, 0]))
    _, info = buffer.sample(30_000, return_info=True)
    counts = torch.bincount(info["index"].cpu(), minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert abs(int(counts[1]) - 20_000) < 500  # six standard deviations
    weights = info["priority_weight"].cpu()
    assert weights[info["index"].cpu() == 3].unique().tolist() == [1]
    assert weights[info["index"].cpu() == 1].unique().tolist() == [0.5]


def hundred() -> np.ndarray:
    """Priorities of a hundred items, a third of them zero."""
    values = np.random.default_rng(0).uniform(1e-3, 1e3, 100).astype(np.float32)
    values[::3] = 0
    return values


@on_each_device
def test_buffers_draw_only_what_is_stored(device):
    buffer = prioritized(500, 100, device, alpha=1, beta=1, eps=0)
    buffer.update_priority(torch.arange(100), torch.from_numpy(hundred()))
    items, info = buffer.sample(1_000_000, return_info=True)
    slots = info["index"].cpu().numpy()
    assert slots.max() == 98 and slots.min() == 1
    assert hundred()[slots].all()
    np.testing.assert_array_equal(items.cpu().numpy(), slots)
    smallest = hundred()[hundred() > 0].min()
    np.testing.assert_allclose(info["priority_weight"].cpu(), smallest / hundred()[slots], rtol=1e-5)


# ------------------------------------------------------------------ sums that do not drift


def rounds() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 8192, (1000, 32)).astype(np.int32), random.uniform(0.1, 5, (1000, 32)).astype(np.float32)


@on_each_device
def test_buffers_do_not_drift(device):
    buffer = prioritized(8192, 8192, device, alpha=1, beta=1, eps=0)
    for number, (slots, values) in enumerate(zip(*rounds(), strict=True)):
        buffer.update_priority(torch.from_numpy(slots), torch.from_numpy(values))
        if number % 100 == 0:
            buffer.sample(1)  # brings the changes into the tree
    tree = buffer.sampler.state.tree
    assert_tree_is_exact(tree)
    total = np.asarray(tree.leaves, np.float64).sum()
    assert float(priority_tree.total(tree)) == pytest.approx(total, rel=1e-6)


# ------------------------------------------------------------------ the priority of a new item, alpha, weights


@on_each_device
def test_buffers_apply_alpha_once(device):
    buffer = prioritized(4, 1, device, alpha=0.5, beta=1, eps=0)
    buffer.update_priority(0, 4.0)
    assert leaves(buffer.sampler.state, 1) == [2]
    buffer.add(torch.tensor(1.0))
    assert leaves(buffer.sampler.state, 2) == [2, 2]
    buffer.update_priority(torch.tensor([1]), torch.tensor([1.0]))
    assert leaves(buffer.sampler.state, 2) == [2, 1]
    _, info = buffer.sample(64, return_info=True)
    index = info["index"].cpu()
    assert set(index.tolist()) == {0, 1}
    torch.testing.assert_close(info["priority_weight"].cpu(), torch.tensor([0.5, 1])[index])
    buffer.sampler.alpha = 1
    assert leaves(buffer.sampler.state, 2) == [4, 1]
    assert buffer.sampler.priorities.tolist() == [4, 1]
