"""PrioritizedReplayBuffer and TensorDictPrioritizedReplayBuffer."""

import pytest
import torch

from interop import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import KINDS, STORAGES, check_same, flat_td, plain_tensor


@pytest.fixture(params=STORAGES)
def storage(request):
    return STORAGES[request.param]


def test_the_sampler_is_made_for_the_storage():
    buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, eps=1e-3, dtype=torch.float64, storage=LazyTensorStorage(9))
    sampler = buffer.sampler
    assert type(sampler) is PrioritizedSampler and buffer.prioritized_sampler is sampler
    assert (sampler.max_size, sampler.alpha, sampler.beta, sampler.eps) == (9, 0.7, 0.5, 1e-3)
    assert PrioritizedReplayBuffer(alpha=0.7, beta=0.5).storage.max_size == 1000


def test_arguments_that_contradict_each_other_are_refused():
    sampler = PrioritizedSampler(3, 1.0, 1.0)
    with pytest.raises(TypeError):
        PrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(3), sampler=sampler, sampler_device="cpu"
        )
    with pytest.raises(TypeError):
        PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=lambda: LazyTensorStorage(3))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_kind_are_drawn_by_priority(kind):
    rows = KINDS[kind]
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(8), batch_size=16)
    buffer.extend(rows([0, 1, 2, 3]))
    buffer.update_priority(torch.arange(4), torch.tensor([0.0, 2.0, 0.0, 1.0]))
    batch, info = buffer.sample(return_info=True)
    assert set(info) == {"index", "priority_weight"}
    assert info["index"].dtype == torch.int64 and info["index"].shape == (16,)
    assert info["priority_weight"].dtype == torch.float32 and info["priority_weight"].shape == (16,)
    assert set(info["index"].tolist()) <= {1, 3}
    check_same(batch, rows(info["index"]))


def test_the_usual_loop(storage):
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=1.1, storage=storage(10), batch_size=5)
    buffer.extend(flat_td(list(range(10))).set("td_error", torch.ones(10)))
    batch = buffer.sample()
    assert {"index", "priority_weight"} <= set(batch.keys())
    assert batch["priority_weight"].shape == (5,) and batch["priority_weight"].dtype == torch.float32
    batch["td_error"] = torch.full((5,), 100.0)
    buffer.update_tensordict_priority(batch)
    wanted = torch.ones(10)
    wanted[batch["index"]] = 100.0
    check_same(buffer.sampler.priorities, wanted)
    assert buffer.sampler.default_priority == 100.0
    batch = buffer.sample()
    weights = ((wanted[batch["index"]] + 1e-8) ** 0.7 / (1 + 1e-8) ** 0.7) ** -1.1
    torch.testing.assert_close(batch["priority_weight"], weights)


def test_writes_through_another_buffer_get_priorities(storage):
    shared = storage(4)
    learner = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=shared)
    writer = ReplayBuffer(storage=shared)
    writer.extend(plain_tensor([0, 1]))
    learner.update_priority([0, 1], [5.0, 2.0])
    writer.extend(plain_tensor([2, 3, 4]))
    check_same(learner.sampler.priorities, torch.tensor([5.0, 2.0, 5.0, 5.0]))
    writer.add(plain_tensor([5])[0])
    check_same(learner.sampler.priorities, torch.tensor([5.0, 5.0, 5.0, 5.0]))


@pytest.mark.parametrize("index", [[2, 0], (torch.tensor([2, 0]),), torch.tensor([[2], [0]])], ids=repr)
@pytest.mark.parametrize("priority", [[5.0, 6.0], torch.tensor([[5.0], [6.0]])], ids=repr)
def test_updates_take_any_form_of_index(index, priority):
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8))
    buffer.extend(plain_tensor([0, 1, 2]))
    assert buffer.update_priority(index, priority) is None
    check_same(buffer.sampler.priorities, torch.tensor([6.0, 1.0, 5.0]))


@pytest.mark.parametrize("room", [5, 2000])
def test_a_default_storage_is_as_large_as_the_sampler(room):
    for buffer in (
        TensorDictReplayBuffer(sampler=PrioritizedSampler(room, 0.7, 0.5)),
        ReplayBuffer(sampler=lambda: PrioritizedSampler(room, 0.7, 0.5), delayed_init=True),
    ):
        assert type(buffer.storage) is ListStorage and buffer.storage.max_size == room
