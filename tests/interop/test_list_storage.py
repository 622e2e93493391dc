"""ListStorage: any objects, one a slot."""

import sys

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from interop import ListStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
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


def test_tensordicts_and_tensorclasses_are_unbound():
    buffer = objects()
    buffer.extend(flat_td([1, 2]))
    check_same(buffer[1], flat_td([2])[0])


@pytest.mark.parametrize("batch", [{"a": torch.zeros(2)}, "text", b"bytes", 3, None, torch.zeros(())])
def test_extend_refuses_what_is_not_a_sequence(batch):
    buffer = objects()
    buffer.add("first")
    with refused(buffer, TypeError):
        buffer.extend(batch)


def test_an_empty_batch_is_refused():
    buffer = objects()
    buffer.add("first")
    with refused(buffer, RuntimeError, "at least one element"):
        buffer.extend([])


def test_the_ring_recycles_the_oldest_objects():
    buffer = objects(3)
    buffer.extend(list("ab"))
    check_same(buffer.extend(list("cd")), torch.tensor([2, 0]))
    assert buffer[:] == ["d", "b", "c"] and buffer.write_count == 4 and buffer.writer._cursor == 1
    buffer.add("e")
    assert buffer[:] == ["d", "e", "c"]


@pytest.mark.parametrize("filled", [0, 2, 3])
def test_of_more_objects_than_slots_the_last_stay(filled):
    buffer = objects(3)
    if filled:
        buffer.extend(list("xyz")[:filled])
    index = buffer.extend(list("abcdefgh"))
    check_same(index, (torch.arange(8) + filled) % 3)
    assert set(buffer[:]) == {"f", "g", "h"} and buffer.write_count == 8 + filled
    assert [buffer[int(slot)] for slot in index[-3:]] == ["f", "g", "h"]


def test_set_appends_at_the_end_and_leaves_no_gap():
    storage = ListStorage(9)
    storage.set(0, "a")
    storage.set([1, 0], ["b", "c"])
    assert list(storage) == ["c", "b"]
    with pytest.raises(RuntimeError, match="more than one item away"):
        storage.set(3, "x")
    with pytest.raises(RuntimeError, match="more than one item away"):
        storage.set([2, 4], ["x", "y"])
    assert list(storage) == ["c", "b"]


def test_set_past_the_capacity_is_refused():
    storage = ListStorage(2)
    storage.set([0, 1], ["a", "b"])
    with pytest.raises(RuntimeError, match="maximum capacity"):
        storage.set(2, "c")
    with pytest.raises(RuntimeError, match="maximum capacity"):
        storage.set([1, 2], ["x", "y"])
    assert list(storage) == ["a", "b"]


def test_a_slice_of_the_list_can_be_set():
    storage = ListStorage(4)
    storage.set(slice(0, 3), ["a", "b", "c"])
    assert list(storage) == ["a", "b", "c"]
    storage.set(slice(1, 3), ["x", "y"])
    assert list(storage) == ["a", "x", "y"]


def test_unequal_numbers_of_places_and_items_are_refused():
    storage = ListStorage(4)
    storage.set([0, 1], ["a", "b"])
    with pytest.raises(ValueError):
        storage.set([0, 1], ["x", "y", "z"])
    with pytest.raises(ValueError):
        storage.set([0, 1], (torch.zeros(3), torch.ones(3, 2), "z"))
    assert list(storage) == ["a", "b"]


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (1, "b"),
        (-1, "d"),
        (np.int32(2), "c"),
        (torch.tensor(2), "c"),
        ((1,), "b"),
        (slice(1, 3), ["b", "c"]),
        (slice(None, None, 2), ["a", "c"]),
        ([0, 3], ["a", "d"]),
        (range(2), ["a", "b"]),
        (np.array([2, 0]), ["c", "a"]),
        (torch.tensor([1, 1]), ["b", "b"]),
        (torch.tensor([True, False, False, True]), ["a", "d"]),
        ([-1, 0], ["d", "a"]),
    ],
    ids=str,
)
def test_every_kind_of_index(index, wanted):
    buffer = objects()
    buffer.extend(list("abcd"))
    assert buffer[index] == wanted
    assert buffer.storage.get(index) == wanted


@pytest.mark.parametrize("index", [4, -5, [0, 4], torch.tensor([4]), torch.tensor([-5])], ids=str)
def test_an_index_out_of_the_filled_range_is_refused(index):
    buffer = objects(9)
    buffer.extend(list("abcd"))
    with refused(buffer, IndexError):
        buffer[index]


def test_an_index_of_several_dims_is_refused():
    buffer = objects()
    buffer.extend(list("abcd"))
    with pytest.raises(RuntimeError):
        buffer[0, 1]
    with pytest.raises(TypeError):
        buffer[torch.tensor([0.5])]


def test_assignment_changes_items_only():
    buffer = objects()
    buffer.extend(list("abc"))
    buffer[1] = "x"
    buffer[[0, 2]] = ["y", "z"]
    assert buffer[:] == ["y", "x", "z"]
    assert (len(buffer), buffer.writer._cursor, buffer.write_count) == (3, 3, 3)
    assert buffer.storage._last_cursor.tolist() == [0, 1, 2]


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


def test_a_tensordict_buffer_on_a_list_carries_the_index():
    buffer = TensorDictReplayBuffer(storage=ListStorage(5))
    given = flat_td([3, 4])
    buffer.extend(given)
    batch = buffer.sample(6)
    assert set(given.keys()) == {"obs", "done"}
    check_same(batch.exclude("index"), flat_td(batch["index"] + 3))


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
    assert len(buffer) == 1500 and not storage._is_full


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


def test_empty_forgets_the_items():
    buffer = objects()
    buffer.extend(list("abc"))
    buffer.empty()
    assert len(buffer) == 0
    buffer.add("z")
    assert buffer[:] == ["z"]


def test_the_representation_shows_the_first_item():
    storage = ListStorage(5)
    assert repr(storage) == "ListStorage()"
    storage.set([0, 1], ["first", "second"])
    assert "first" in repr(storage) and "second" not in repr(storage)


@pytest.mark.parametrize("kind", [plain_tensor, flat_td])
def test_a_batch_that_was_taken_apart_is_not_the_list(kind):
    buffer = ReplayBuffer(storage=ListStorage(5))
    given = kind([1, 2])
    buffer.extend(given)
    for leaf in tensors_of(given):
        leaf.zero_()
    check_same(buffer[:], kind([1, 2]))


def test_a_list_keeps_no_graph():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(torch.ones(3, requires_grad=True) * 2)
    assert not any(item.requires_grad for item in buffer.storage) and not buffer.sample(2).requires_grad


def test_assigning_another_number_of_items_than_places_leaves_the_length_alone():
    buffer = ReplayBuffer(storage=ListStorage(10), collate_fn=lambda items: items)
    buffer.extend(["a", "b", "c", "d", "e"])
    for items in (["x"], ["x"] * 4):
        with refused(buffer, ValueError, "3 places were given for"):
            buffer[0:3] = items
    buffer[0:3] = ["x", "y", "z"]
    assert buffer[:] == ["x", "y", "z", "d", "e"]
    buffer.add("f")
    assert buffer[:] == ["x", "y", "z", "d", "e", "f"]
