"""TensorDictReplayBuffer: the entries of samples, and the priorities that `extend` reads from data."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.interop.rows import STORAGES, check_same, flat_td, nested_td, refused, trajectories


@pytest.fixture(params=STORAGES)
def storage(request):
    return STORAGES[request.param]


def prioritized(capacity=8, storage=LazyTensorStorage, reduction="max", **kwargs):
    sampler = PrioritizedSampler(capacity, 1.0, 1.0, eps=0.0, reduction=reduction)
    return TensorDictReplayBuffer(storage=storage(capacity), sampler=sampler, **kwargs)


def with_priority(rows, values, key="td_error"):
    return rows.set(key, torch.as_tensor(values, dtype=torch.float32))


def test_the_defaults():
    buffer = TensorDictReplayBuffer()
    assert type(buffer.writer) is TensorDictRoundRobinWriter
    assert type(buffer.sampler) is RandomSampler and type(buffer.storage) is ListStorage
    assert buffer.priority_key == "td_error"


@pytest.mark.parametrize("rows", [flat_td, nested_td])
def test_samples_carry_the_index_and_the_given_data_does_not(storage, rows):
    buffer = TensorDictReplayBuffer(storage=storage(4), batch_size=9)
    given = rows([0, 1, 2, 3, 4, 5])
    keys = set(given.keys())
    check_same(buffer.extend(given), torch.tensor([0, 1, 2, 3, 0, 1]))
    assert set(given.keys()) == keys
    batch = buffer.sample()
    assert batch["index"].dtype == torch.int64 and batch["index"].shape == (9,)
    check_same(batch.exclude("index"), rows(torch.tensor([4, 5, 2, 3])[batch["index"]]))
    check_same(buffer[:]["index"], torch.arange(4))


def test_the_index_of_trajectories_is_expanded(storage):
    buffer = TensorDictReplayBuffer(storage=storage(5))
    check_same(buffer.extend(trajectories([0, 1, 2])), torch.arange(3))
    batch = buffer.sample(6)
    assert batch.batch_size == (6, 4) and batch["index"].shape == (6, 4)
    check_same(batch.exclude("index"), trajectories(batch["index"][:, 0]))
    assert bool((batch["index"] == batch["index"][:, :1]).all())


def test_with_info_the_sample_has_it_too_in_memory_of_its_own():
    buffer = prioritized(batch_size=3)
    buffer.extend(flat_td([0, 1]))
    batch, info = buffer.sample(return_info=True)
    assert set(info) == {"index", "priority_weight"}
    for key, value in info.items():
        check_same(batch[key], value)
        batch[key].add_(1)
        assert not torch.equal(batch[key], value)


def test_transforms_see_stored_entries_and_no_info():
    seen = []

    def look(data):
        seen.append(set(data.keys()))
        return data

    buffer = prioritized()
    buffer.append_transform(look)
    buffer.extend(flat_td([0, 1]))
    batch = buffer.sample(16)
    assert "priority_weight" in batch and "priority_weight" not in seen[-1] and "index" in seen[-1]
    with pytest.warns(UserWarning, match="include_info"):  # deprecated
        assert set(buffer.sample(16, include_info=False).keys()) == seen[-1] == seen[0]


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
@pytest.mark.parametrize("key", ["td_error", ("next", "error")])
def test_extend_and_add_read_one_priority_an_item(shape, key):
    buffer = prioritized(priority_key=key)
    rows = flat_td([0, 1, 2])
    rows["next"] = TensorDict({}, [3])
    rows = with_priority(rows, torch.tensor([1.0, 2.0, 5.0]).reshape(shape), key)
    buffer.extend(rows)
    buffer.add(rows[1])
    check_same(buffer.sampler.priorities, torch.tensor([1.0, 2.0, 5.0, 2.0]))


@pytest.mark.parametrize(
    ("reduction", "wanted"), [("max", 9.0), ("min", 1.0), ("mean", 4.0), ("median", 2.0), ("sum", 16.0)]
)
def test_several_values_of_an_item_are_reduced(reduction, wanted):
    values = torch.tensor([1.0, 9.0, 2.0, 4.0])
    buffer = prioritized(reduction=reduction)
    buffer.extend(flat_td([0, 1]))
    batch = buffer[torch.tensor([1, 0])]
    batch["td_error"] = torch.stack([values, values / 2])
    assert buffer.update_tensordict_priority(batch) is None
    check_same(buffer.sampler.priorities, torch.tensor([wanted / 2, wanted]))
    added = prioritized(reduction=reduction)
    added.add(with_priority(flat_td([2])[0], values))
    check_same(added.sampler.priorities, torch.tensor([wanted]))


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 1), (2,), (2, 1)])
def test_priorities_of_trajectories_are_reduced_over_time(shape):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, 1.0, 1.0))
    buffer.extend(trajectories([0, 1, 2]))
    batch = buffer[torch.tensor([2, 0])]
    values = torch.zeros(shape)
    values.reshape(2, -1)[:, -1] = torch.tensor([3.0, 6.0])
    if len(shape) == 1 or shape == (2, 1):
        batch = TensorDict({"index": batch["index"]}, [2])
    batch["td_error"] = values
    buffer.update_tensordict_priority(batch)
    check_same(buffer.sampler.priorities, torch.tensor([6.0, 1.0, 3.0]))


def test_an_update_needs_an_index_and_a_known_reduction():
    buffer = prioritized(reduction="nothing")
    buffer.extend(flat_td([0, 1]))
    with refused(buffer, KeyError, "index"):
        buffer.update_tensordict_priority(with_priority(flat_td([0, 1]), [5.0, 6.0]))
    with refused(buffer, NotImplementedError, "nothing"):
        buffer.update_tensordict_priority(buffer[:].set("td_error", torch.ones(2, 3)))


def test_a_priority_key_without_a_prioritized_sampler_warns():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    with pytest.warns(UserWarning, match="prioritized"):
        buffer.extend(with_priority(flat_td([0, 1]), [1.0, 2.0]))
    assert len(buffer) == 2
    buffer.extend(with_priority(flat_td([0, 1]), [1.0, 2.0]), update_priority=False)


BAD_PRIORITIES = {
    "several values": torch.ones(2, 3),
    "no values": torch.ones(2, 0),
    "nan": torch.tensor([1.0, torch.nan]),
    "negative": torch.tensor([-1.0, 1.0]),
    "too large for the dtype": torch.tensor([1e300, 1.0], dtype=torch.float64),
    "bool": torch.tensor([True, False]),
    "text": "text",
}


@pytest.mark.parametrize("bad", BAD_PRIORITIES)
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("transform", [None, lambda data: data], ids=["bare", "transform"])
def test_bad_priorities_refuse_the_whole_batch(bad, storage, transform):
    buffer = prioritized(storage=storage, transform=transform)
    rows = flat_td([5, 6]).set("td_error", BAD_PRIORITIES[bad])
    with refused(buffer, RuntimeError, "update_priority=False"):
        buffer.extend(rows)
    if bad == "several values":  # `extend` does not reduce them
        buffer.extend(rows, update_priority=False)
        check_same(buffer.sampler.priorities, torch.ones(2))


@pytest.mark.parametrize(
    ("transform", "match"), [(lambda data: data["obs"], "non-tensordict"), (lambda data: data[:2], "metadata")]
)
def test_a_transform_that_leaves_no_place_for_the_info_is_an_error(transform, match):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), transform=transform)
    buffer.extend(flat_td([0, 1]))
    with pytest.raises(RuntimeError, match=match):
        buffer.sample(3)
    plain = ReplayBuffer(storage=LazyTensorStorage(5), transform=transform)
    plain.extend(flat_td([0, 1]))
    plain.sample(3)
