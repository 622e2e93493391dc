"""PrioritizedReplayBuffer and TensorDictPrioritizedReplayBuffer."""

import copy
import pickle

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
    TensorStorage,
)
from tests.interop.rows import ALL_STORAGES, KINDS, STORAGES, check_same, flat_td, plain_tensor, state_of


@pytest.fixture(params=STORAGES)
def storage(request):
    return STORAGES[request.param]


def test_alpha_and_beta_are_required():
    for kind in (PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer):
        with pytest.raises(TypeError):
            kind(storage=LazyTensorStorage(3))
        with pytest.raises(TypeError):
            kind(alpha=0.5, storage=LazyTensorStorage(3))


def test_the_sampler_is_made_for_the_storage():
    buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, eps=1e-3, dtype=torch.float64, storage=LazyTensorStorage(9))
    sampler = buffer.sampler
    assert type(sampler) is PrioritizedSampler and buffer.prioritized_sampler is sampler
    assert (sampler.max_size, sampler.alpha, sampler.beta, sampler.eps) == (9, 0.7, 0.5, 1e-3)
    assert PrioritizedReplayBuffer(alpha=0.7, beta=0.5).storage.max_size == 1000


def test_arguments_that_contradict_each_other_are_refused():
    with pytest.raises(TypeError):
        PrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(3), sampler=PrioritizedSampler(3, 1.0, 1.0),
            sampler_device="cpu",
        )  # fmt: skip
    with pytest.raises(TypeError):
        PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=lambda: LazyTensorStorage(3))
    with pytest.raises(TypeError):
        TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(3), sampler=None)


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


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_the_smallest_capacities_work(capacity):
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(capacity))
    buffer.extend(plain_tensor(list(range(capacity))))
    batch, info = buffer.sample(16, return_info=True)
    check_same(batch, plain_tensor(info["index"]))
    check_same(info["priority_weight"], torch.ones(16))


def test_objects_in_a_list_are_drawn_by_priority():
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=ListStorage(8), collate_fn=lambda items: items)
    buffer.extend(["a", "b", "c"])
    buffer.update_priority([0, 2], [0.0, 0.0])
    assert set(buffer.sample(16)) == {"b"}


@pytest.mark.parametrize("make", ALL_STORAGES)
def test_content_is_not_looked_into_for_priorities(make):
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=ALL_STORAGES[make](8))
    buffer.extend(flat_td([0, 1]).set("td_error", torch.tensor([5.0, 6.0])))
    check_same(buffer.sampler.priorities, torch.ones(2))
    assert set(buffer.sample(16).keys()) == {"obs", "done", "td_error"}


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


def test_trajectories_carry_one_weight_each():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=LazyTensorStorage(8), batch_size=16)
    buffer.extend(KINDS["trajectories"]([0, 1]))
    batch = buffer.sample()
    assert batch["priority_weight"].shape == (16, 4) and batch["index"].shape == (16, 4)


def test_rows_that_are_there_already_get_the_default_priority():
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=TensorStorage(plain_tensor(list(range(8)))))
    check_same(buffer.sampler.priorities, torch.ones(8))
    batch, info = buffer.sample(16, return_info=True)
    check_same(batch, plain_tensor(info["index"]))
    check_same(info["priority_weight"], torch.ones(16))


def test_writes_through_another_buffer_are_given_priorities(storage):
    shared = storage(4)
    learner = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=shared)
    writer = ReplayBuffer(storage=shared)
    writer.extend(plain_tensor([0, 1]))
    learner.update_priority([0, 1], [5.0, 2.0])
    writer.extend(plain_tensor([2, 3, 4]))
    check_same(learner.sampler.priorities, torch.tensor([5.0, 2.0, 5.0, 5.0]))
    writer.add(plain_tensor([5])[0])
    check_same(learner.sampler.priorities, torch.tensor([5.0, 5.0, 5.0, 5.0]))


def test_emptying_through_another_buffer_leaves_no_stale_priorities():
    shared = LazyTensorStorage(8)
    learner = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=shared)
    writer = ReplayBuffer(storage=shared)
    writer.extend(plain_tensor(list(range(8))))
    learner.update_priority(torch.arange(8), torch.full((8,), 50.0))
    writer.empty()
    writer.extend(plain_tensor([1, 2]))
    batch, info = learner.sample(16, return_info=True)
    assert set(info["index"].tolist()) == {0, 1}
    assert set(batch[:, 0].tolist()) == {1.0, 2.0}
    check_same(info["priority_weight"], torch.ones(16))


def test_another_storage_leaves_no_stale_priorities():
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8))
    buffer.extend(plain_tensor(list(range(8))))
    buffer.update_priority(torch.arange(8), torch.arange(8.0))
    buffer.set_storage(TensorStorage(plain_tensor([1, 2, 3])))
    batch, info = buffer.sample(16, return_info=True)
    assert set(info["index"].tolist()) == {0, 1, 2}
    assert set(batch[:, 0].tolist()) == {1.0, 2.0, 3.0}
    check_same(info["priority_weight"], torch.ones(16))


def test_the_storage_put_away_no_longer_tells_the_buffer():
    old = LazyTensorStorage(8)
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=old)
    other = ReplayBuffer(storage=old)
    buffer.extend(plain_tensor([0]))
    buffer.set_storage(TensorStorage(plain_tensor([1, 2])))
    other.extend(plain_tensor([1, 2, 3, 4, 5]))
    assert set(buffer.sample(16, return_info=True)[1]["index"].tolist()) == {0, 1}


def test_empty_forgets_priorities():
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8))
    buffer.extend(plain_tensor([0, 1, 2]))
    buffer.update_priority([0, 1, 2], [5.0, 6.0, 7.0])
    buffer.empty()
    assert buffer.sampler.default_priority == 1.0
    buffer.extend(plain_tensor([4, 5]))
    check_same(buffer.sampler.priorities, torch.ones(2))
    assert set(buffer.sample(16)[:, 0].tolist()) == {4.0, 5.0}


def test_marked_items_get_the_default_priority():
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8))
    buffer.extend(plain_tensor([0, 1, 2]))
    buffer.update_priority([0, 1], [0.5, 4.0])
    assert buffer.mark_update(torch.tensor([0])) is None
    check_same(buffer.sampler.priorities, torch.tensor([4.0, 4.0, 1.0]))


def test_assigned_items_keep_their_priority():
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8))
    buffer.extend(plain_tensor([0, 1, 2]))
    buffer.update_priority([0, 1, 2], [1.0, 2.0, 3.0])
    buffer[1] = plain_tensor([9])[0]
    check_same(buffer.sampler.priorities, torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    "index", [torch.tensor([2, 0]), [2, 0], (torch.tensor([2, 0]),), torch.tensor([[2], [0]])], ids=repr
)
@pytest.mark.parametrize("priority", [torch.tensor([5.0, 6.0]), [5.0, 6.0], torch.tensor([[5.0], [6.0]])], ids=repr)
def test_priorities_are_given_for_any_form_of_index(index, priority):
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8))
    buffer.extend(plain_tensor([0, 1, 2]))
    assert buffer.update_priority(index, priority) is None
    check_same(buffer.sampler.priorities, torch.tensor([6.0, 1.0, 5.0]))


@pytest.mark.parametrize("kind", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_copies_draw_alike_and_live_apart(kind, copier):
    buffer = kind(alpha=0.7, beta=0.5, storage=LazyTensorStorage(8), batch_size=16)
    buffer.set_rng(torch.Generator().manual_seed(0))
    buffer.extend(flat_td([0, 1, 2]))
    buffer.update_priority(torch.arange(3), torch.tensor([1.0, 2.0, 9.0]))
    twin = copier(buffer)
    check_same(twin.sample(return_info=True), buffer.sample(return_info=True))
    before = state_of(buffer)
    twin.extend(flat_td([3, 4]))
    twin.update_priority(torch.arange(3), torch.zeros(3))
    twin.sampler.alpha = 0.1
    check_same(state_of(buffer), before)


def test_equal_generators_give_equal_batches():
    drawn = []
    for _ in range(2):
        buffer = TensorDictPrioritizedReplayBuffer(
            alpha=0.7,
            beta=0.5,
            storage=LazyTensorStorage(50),
            generator=torch.Generator().manual_seed(3),
            batch_size=20,
        )
        buffer.extend(
            flat_td(list(range(50))).set("td_error", torch.rand(50, generator=torch.Generator().manual_seed(1)))
        )
        drawn.append([buffer.sample() for _ in range(3)])
    check_same(drawn[0], drawn[1])
    assert not torch.equal(drawn[0][0]["index"], drawn[0][1]["index"])


@pytest.mark.parametrize("room", [5, 2000])
def test_a_default_storage_is_as_large_as_the_sampler(room):
    for buffer in (
        TensorDictReplayBuffer(sampler=PrioritizedSampler(room, 0.7, 0.5)),
        ReplayBuffer(sampler=lambda: PrioritizedSampler(room, 0.7, 0.5), delayed_init=True),
        PrioritizedReplayBuffer(alpha=0.7, beta=0.5, sampler=PrioritizedSampler(room, 0.7, 0.5)),
    ):
        assert type(buffer.storage) is ListStorage and buffer.storage.max_size == room
    with pytest.raises(ValueError, match="holds 5 items"):
        ReplayBuffer(storage=ListStorage(6), sampler=PrioritizedSampler(5, 0.7, 0.5))
