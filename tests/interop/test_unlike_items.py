"""Items that are not alike, such as trajectories of unlike lengths, are sampled, marked and updated one by one."""

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from interop import (
    CompressedListStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.remote.sharded import Sharded
from tests.interop.rows import check_same

COUNT = 6


def along_the_end(capacity):
    return LazyStackStorage(capacity, stack_dim=-1)


def trajectory(number):
    """A trajectory with a length of its own."""
    length = number + 2
    return TensorDict({"obs": torch.full((length, 3), float(number)), "done": torch.zeros(length, 1)}, [length])


def of_equal_length(number):
    return trajectory(3).set("obs", torch.full((5, 3), float(number)))


def wide(number):
    """Lanes of unlike lengths."""
    return TensorDict({"obs": torch.full((2, number + 2, 3), float(number))}, [2, number + 2])


def of_unlike_entries(number):
    return TensorDict({"obs": torch.full((number + 1,), float(number))}, [])


def lazily(number):
    """Trajectories that are lazy stacks of unlike parts themselves."""
    return lazy_stack([trajectory(number), trajectory(number + 1).apply(lambda each: each * 0 + number)])


STORAGES = [ListStorage, LazyStackStorage, along_the_end, CompressedListStorage]
ITEMS = [trajectory, of_equal_length, wide, of_unlike_entries]
each_storage = pytest.mark.parametrize("storage", STORAGES, ids=lambda kind: kind.__name__)
each_item = pytest.mark.parametrize("item", ITEMS, ids=lambda kind: kind.__name__)


def filled(kind, storage, item, **kwargs):
    buffer = kind(storage=storage(9), **kwargs)
    buffer.extend([item(number) for number in range(COUNT)] if kind is ReplayBuffer else lazy_of(item))
    return buffer


def lazy_of(item):
    return lazy_stack([item(number) for number in range(COUNT)])


def prioritized(storage, item, **kwargs):
    return filled(TensorDictPrioritizedReplayBuffer, storage, item, alpha=1.0, beta=1.0, eps=0.0, **kwargs)


def items_of(sample):
    return sample.tensordicts if isinstance(sample, LazyStackedTensorDict) else list(sample.unbind(0))


def number_of(item):
    values = item["obs"].unique() if not isinstance(item, LazyStackedTensorDict) else item[0]["obs"].unique()
    assert values.numel() == 1
    return int(values)


@each_item
@each_storage
def test_each_item_of_a_sample_has_its_own_index(storage, item):
    buffer = filled(TensorDictReplayBuffer, storage, item)
    sample, info = buffer.sample(32, return_info=True)
    assert len(items_of(sample)) == 32
    for found, slot in zip(items_of(sample), info["index"].tolist(), strict=True):
        check_same(found.exclude("index").contiguous(), item(slot))
        check_same(found["index"], torch.full(item(slot).batch_size, slot))


@pytest.mark.parametrize("storage", [LazyStackStorage, CompressedListStorage], ids=lambda kind: kind.__name__)
def test_items_that_are_lazy_stacks_themselves(storage):
    sample, info = filled(TensorDictReplayBuffer, storage, lazily).sample(16, return_info=True)
    for found, slot in zip(items_of(sample), info["index"].tolist(), strict=True):
        assert number_of(found) == slot
        for part in found.tensordicts:
            check_same(part["index"], torch.full(part.batch_size, slot))


@each_item
@each_storage
def test_priorities_of_each_item_are_reduced_to_its_own(storage, item):
    buffer = prioritized(storage, item)
    sample = buffer.sample(32)
    wanted = torch.ones(COUNT)
    found_items = items_of(sample)
    for found in found_items:
        slot = number_of(found)
        check_same(found["priority_weight"], torch.ones(found.batch_size))
        steps = torch.arange(found.batch_size.numel()).reshape(found.batch_size)
        found["td_error"] = steps + 10.0 * slot
        wanted[slot] = found["td_error"].max()
    if not isinstance(sample, LazyStackedTensorDict):  # `unbind` made tensordicts of its own
        sample = torch.stack(found_items)
    buffer.update_tensordict_priority(sample)
    check_same(buffer.sampler.priorities, wanted)


@each_storage
def test_an_item_without_priorities_changes_nothing(storage):
    buffer = prioritized(storage, trajectory)
    sample = lazy_stack([found.set("td_error", found["obs"]) for found in items_of(buffer.sample(8))])
    sample.tensordicts[3].del_("td_error").set("td_errors", torch.ones(sample.tensordicts[3].batch_size))
    before = buffer.sampler.priorities
    with pytest.raises(KeyError, match=r"item 3 of the sample has no entry 'td_error'.*did you mean 'td_errors'\?"):
        buffer.update_tensordict_priority(sample)
    check_same(buffer.sampler.priorities, before)


@each_storage
def test_parts_of_an_ensemble(storage):
    members = [prioritized(storage, trajectory), filled(TensorDictReplayBuffer, storage, trajectory)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    sample, info = ensemble.sample(16, return_info=True)
    wanted = torch.ones(COUNT)
    for place, part in enumerate(items_of(sample)):
        assert len(part.tensordicts) == 8
        for found, slot in zip(part.tensordicts, info[place]["index", "index"].tolist(), strict=True):
            assert number_of(found) == slot
            check_same(found["index", "index"], torch.full(found.batch_size, slot))
            check_same(found["index", "buffer_ids"], torch.full(found.batch_size, place))
            errors = torch.arange(len(found)) + 10.0 * slot
            found["td_error"] = errors
            if place == 0:
                wanted[slot] = errors.max()
    ensemble.update_tensordict_priority(sample)
    check_same(members[0].sampler.priorities, wanted)


def test_items_of_several_shards():
    shards = Sharded(2, lambda: filled(TensorDictReplayBuffer, ListStorage, trajectory, batch_size=4))
    sample, info = shards.sample(32)
    assert set(info["index"].tolist()) <= {*range(COUNT), *range(9, 9 + COUNT)}
    for found, index in zip(items_of(sample), info["index"].tolist(), strict=True):
        check_same(found["obs"], trajectory(index % 9)["obs"])
        check_same(found["index"], torch.full(found.batch_size, index))


@each_storage
def test_transforms_that_take_items_one_by_one_see_the_rows_that_are_stored(storage):
    def doubled(batch):
        for found in items_of(batch):
            found["obs"] = found["obs"] * 2
        return batch

    buffer = filled(TensorDictReplayBuffer, storage, trajectory, transform=doubled)
    for found in items_of(buffer.sample(8)):
        assert number_of(found) == 2 * int(found["index"][0])
    assert [number_of(item) for item in buffer.storage] == list(range(COUNT))


@each_storage
def test_items_of_unlike_dims_are_refused_with_the_way(storage):
    buffer = ReplayBuffer(storage=storage(9))
    buffer.extend([trajectory(1), trajectory(1)[0], trajectory(1)])
    with pytest.raises(RuntimeError, match=r"need the same number of batch dims.*collate_fn"):
        buffer[:]
    with pytest.raises(RuntimeError, match=r"need the same number of batch dims.*collate_fn"):
        buffer.sample(64)


@pytest.mark.parametrize("storage", [ListStorage, CompressedListStorage], ids=lambda kind: kind.__name__)
def test_tensors_of_unlike_shapes_are_had_as_a_list(storage):
    items = [torch.arange(3), torch.arange(4)]
    buffer = ReplayBuffer(storage=storage(9))
    buffer.extend(items)
    with pytest.raises(RuntimeError, match=r"\[3\] and \[4\] cannot be stacked.*collate_fn"):
        buffer[:]
    buffer = ReplayBuffer(storage=storage(9), collate_fn=lambda found: found)
    buffer.extend(items)
    check_same(buffer[:], items)


# ------------------------------------------------------------------ no items

NOTHING = [
    *(slice(0, 0), slice(5, 5), slice(3, 1), [], (slice(0, 0),), range(0), np.zeros(0, int), np.zeros(COUNT, bool)),
    *(torch.zeros(0, dtype=torch.int64), torch.tensor([]), torch.zeros(COUNT, dtype=torch.bool), [False] * COUNT),
]


def tensor_rows(number):
    return torch.full((3,), float(number))


def pytree(number):
    return {"obs": torch.full((3,), float(number)), "pair": (torch.tensor(number), torch.zeros(2))}


def flat(number):
    return TensorDict({"obs": torch.full((3,), float(number)), "text": "x", "below": {"a": torch.tensor(number)}}, [])


@pytest.mark.parametrize("index", NOTHING, ids=str)
@pytest.mark.parametrize("item", [flat, tensor_rows, pytree], ids=lambda kind: kind.__name__)
def test_an_index_of_nothing_gives_nothing_of_the_kind_that_tensors_give(item, index):
    rows = ReplayBuffer(storage=LazyTensorStorage(9))
    rows.extend([item(number) for number in range(COUNT)])
    wanted = rows[index]
    for storage in STORAGES if item is flat else [ListStorage, CompressedListStorage]:
        buffer = ReplayBuffer(storage=storage(9))
        buffer.extend([item(number) for number in range(COUNT)])
        found = buffer[index]
        if item is flat:
            assert list(found["text"]) == list(wanted["text"]) == []
            check_same(found.exclude("text"), wanted.exclude("text"))
        else:
            check_same(found, wanted)
        assert len(buffer.storage[index]) == 0


@each_item
@each_storage
def test_nothing_of_unlike_items(storage, item):
    buffer = filled(TensorDictReplayBuffer, storage, item, transform=lambda batch: batch.set("seen", batch["obs"] * 2))
    for index in NOTHING:
        found = buffer[index]
        assert found.batch_size.numel() == 0 and found.ndim == item(0).ndim + 1
        assert {"obs", "seen", "index"} <= set(found.keys()) and found["seen"].numel() == 0
    ensemble = ReplayBufferEnsemble(buffer, buffer)
    assert ensemble[:, :0].batch_size.numel() == 0


def test_nothing_of_other_objects():
    buffer = ReplayBuffer(storage=ListStorage(9))
    buffer.extend(["one", "two"])
    assert buffer[:0] == [] and buffer.storage[:0] == []
    buffer = ReplayBuffer(storage=ListStorage(9), collate_fn=len)
    buffer.extend([object(), object()])
    assert buffer[:0] == 0
