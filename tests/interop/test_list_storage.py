"""ListStorage: any objects, one a slot."""

import sys

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from interop import ListStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer
from tests.interop.rows import Pair, check_same, flat_td, plain_tensor, refused, tensors_of


def as_they_are(items):
    return items


def objects(capacity=5, **kwargs):
    return ReplayBuffer(storage=ListStorage(capacity), collate_fn=as_they_are, **kwargs)


def test_any_object_is_an_item():
    buffer = objects()
    kept = ["text", {"a": 1}, None, (torch.zeros(2), "x")]
    assert [buffer.add(item) for item in kept] == [0, 1, 2, 3]
    assert buffer[:] == kept
    assert buffer[0] == "text" and buffer[-1] is kept[3]
    assert all(any(drawn is item for item in kept) for drawn in buffer.sample(20))


@pytest.mark.parametrize(
    "batch",
    [[30, None], (30, None), {30, 31}, range(2), np.array([4, 5]), torch.tensor([4, 5])],
    ids=lambda batch: type(batch).__name__,
)
def test_extend_iterates_over_what_is_given(batch):
    buffer = objects()
    buffer.add("first")
    check_same(buffer.extend(batch), torch.tensor([1, 2]))
    assert len(buffer) == 3 and buffer[1:] == list(batch)


def test_items_of_equal_structure_are_stacked():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend([{"a": torch.ones(2), "b": (torch.zeros(1), torch.ones(()))}] * 3)
    batch = buffer.sample(4)
    check_same(batch, {"a": torch.ones(4, 2), "b": (torch.zeros(4, 1), torch.ones(4))})


@pytest.mark.parametrize("kind", [plain_tensor, flat_td])
def test_tensors_and_tensordicts_are_stacked(kind):
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(kind([1, 2, 3]))
    batch, info = buffer.sample(8, return_info=True)
    check_same(batch, kind(info["index"] + 1))
    check_same(buffer[:], kind([1, 2, 3]))


def test_named_tuples_are_items_of_a_list():
    buffer = ReplayBuffer(storage=ListStorage(5))
    items = [Pair(torch.tensor([float(i)]), torch.tensor(i)) for i in range(3)]
    buffer.extend(items)
    check_same(buffer[:], Pair(torch.tensor([[0.0], [1.0], [2.0]]), torch.arange(3)))


def test_what_cannot_be_stacked_is_a_type_error():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend([None, 3])
    with pytest.raises(TypeError, match="collate_fn"):
        buffer.sample(2)
    with pytest.raises(TypeError, match="collate_fn"):
        buffer[:]
    assert buffer[1] == 3


def test_texts_come_as_a_list():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(["a", "b"])
    assert buffer[:] == ["a", "b"] and set(buffer.sample(8)) == {"a", "b"}


def test_the_collate_function_gets_the_list_except_for_an_int():
    calls = []

    def collate(items):
        calls.append(items)
        return len(items)

    buffer = ReplayBuffer(storage=ListStorage(5), collate_fn=collate)
    buffer.extend(list("abc"))
    assert (buffer.sample(4), buffer[:2], buffer[1]) == (4, 2, "b")
    assert len(calls) == 2 and calls[1] == ["a", "b"]


def unlike_items():
    return [TensorDict({"a": torch.full((size,), float(size))}) for size in (2, 3)]


def test_unlike_tensordicts_are_stacked_lazily():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(unlike_items())
    batch = buffer.sample(64)
    assert isinstance(batch, LazyStackedTensorDict) and batch.batch_size == (64,)
    assert set(batch[0].keys()) == {"a"}


def test_samples_of_unlike_tensordicts_can_be_edited_freely():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(unlike_items())
    batch = buffer.sample(6)
    for place in range(6):
        batch[place]["a"].zero_()
        batch[place]["new"] = torch.ones(())
    check_same(buffer[0], unlike_items()[0])
    check_same(buffer[1], unlike_items()[1])


def test_sampling_adds_no_keys_to_stored_tensordicts():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=ListStorage(5))
    for item in unlike_items():
        buffer.add(item)
    batch = buffer.sample(6)
    assert {"index", "priority_weight"} <= set(batch[0].keys())
    assert all(set(item.keys()) == {"a", "index"} for item in buffer.storage)


@pytest.mark.parametrize("collate", [as_they_are, lambda items: items[0], lambda items: lazy_stack(items)])
def test_an_item_that_is_handed_on_gets_no_keys(collate):
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=ListStorage(5), collate_fn=collate, batch_size=1
    )
    buffer.extend(flat_td([1, 2]))
    if collate is as_they_are:
        with pytest.raises(RuntimeError, match="non-tensordict"):
            buffer.sample()
    else:
        batch = buffer.sample()
        assert "priority_weight" in batch.keys()  # noqa: SIM118
        batch["obs"].zero_()
    assert all(set(item.keys()) == {"obs", "done", "index"} and item["obs"].all() for item in buffer.storage)


def test_a_sample_of_a_list_can_be_edited_freely():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(flat_td([1, 2, 3]))
    for leaf in tensors_of(buffer.sample(4)):
        leaf.zero_()
    check_same(buffer[:], flat_td([1, 2, 3]))


def test_items_are_moved_to_a_device_only_when_asked():
    item = {"x": torch.zeros(2, device="meta")}
    alone, moved = ListStorage(2), ListStorage(2, device="meta")
    alone.set(0, item)
    moved.set(0, {"x": torch.zeros(2), "name": "n", "pair": (torch.zeros(1), 2)})
    assert alone.get(0) is item
    assert moved.get(0)["x"].device.type == moved.get(0)["pair"][0].device.type == "meta"
    assert moved.get(0)["name"] == "n" and moved.get(0)["pair"][1] == 2


def test_a_list_has_no_bound_by_default():
    storage = ListStorage()
    assert storage.max_size == sys.maxsize
    buffer = ReplayBuffer(storage=storage, collate_fn=as_they_are)
    buffer.extend(range(1500))
    assert len(buffer) == 1500 and not storage.is_full


def test_containment_iteration_and_length():
    storage = ListStorage(5)
    storage.set([0, 1, 2], list("abc"))
    assert len(storage) == 3 and list(storage) == ["a", "b", "c"]
    assert 2 in storage and -3 in storage and 3 not in storage
    check_same(storage.contains(torch.tensor([0, 3, -1])), torch.tensor([True, False, True]))
    with pytest.raises(NotImplementedError):
        storage.contains("a")
    assert storage.shape == torch.Size([5]) and storage.flatten() is storage


def test_edits_by_key_need_tensor_storages():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(flat_td([1, 2]))
    for edit in (
        lambda: buffer.set_("obs", torch.zeros(2, 3)),
        lambda: buffer.set_at_("obs", torch.zeros(3), 0),
        lambda: buffer.update_({"obs": torch.zeros(2, 3)}),
    ):
        with refused(buffer, AttributeError):
            edit()
