"""What holds for every storage that keeps items in a Python list."""

import copy
import multiprocessing
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from interop import (
    CompressedListStorage,
    LazyStackStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import Pair, check_same, flat_td, plain_tensor, refused

KINDS = [ListStorage, LazyStackStorage, CompressedListStorage]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def filled(kind, ids, buffer=ReplayBuffer, capacity=9, **kwargs):
    made = buffer(storage=kind(capacity), **kwargs)
    made.extend(flat_td(ids))
    return made


def ids_of(items):
    return [int(item["obs"][0]) for item in items]


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ((slice(0, 2),), [0, 1]),
        ([3, 0], [3, 0]),
        ([-1, 0], [3, 0]),
        (range(2), [0, 1]),
        (np.array([2, 2]), [2, 2]),
        (torch.tensor([-1, 0]), [3, 0]),
        (torch.tensor([True, False, False, True]), [0, 3]),
    ],
    ids=str,
)
@each_kind
def test_every_kind_of_index(kind, index, wanted):
    buffer = filled(kind, [0, 1, 2, 3])
    assert ids_of(buffer.storage.get(index)) == wanted
    check_same(buffer[index].contiguous(), flat_td(wanted))
    for one in (wanted[0], wanted[0] - 4, np.int32(wanted[0]), torch.tensor(wanted[0]), (wanted[0],)):
        check_same(buffer[one], flat_td(wanted)[0])


@each_kind
def test_an_index_of_no_item_is_refused(kind):
    buffer = filled(kind, [0, 1])
    for index in (2, -3, [0, 2], torch.tensor([2]), torch.tensor([-3])):
        with refused(buffer, IndexError):
            buffer[index]
    with pytest.raises(RuntimeError):
        buffer[0, 1]
    with pytest.raises(TypeError):
        buffer[torch.tensor([0.5])]


@each_kind
def test_writes_that_do_not_fit_change_nothing(kind):
    buffer = filled(kind, [0, 1], capacity=3)
    for cursor, data, error, match in (
        (3, flat_td([7])[0], RuntimeError, "maximum capacity"),
        ([2, 3], flat_td([7, 8]), RuntimeError, "maximum capacity"),
        ([0, 1], flat_td([7, 8, 9]), ValueError, "2 places were given for 3 items"),
        (slice(0, 1), flat_td([5, 6, 7, 8]), RuntimeError, "maximum capacity"),
        (slice(None, None, -1), flat_td([5]), ValueError, "extended slice|places"),
    ):
        with refused(buffer, error, match):
            buffer.storage.set(cursor, data)
    wide = filled(kind, [0, 1])
    for cursor, data in ((3, flat_td([7])[0]), ([2, 4], flat_td([7, 8]))):
        with refused(wide, RuntimeError, "more than one item away"):
            wide.storage.set(cursor, data)
    for data in (flat_td([5]), flat_td([5, 6, 7])):
        with refused(wide, (ValueError, RuntimeError), "places"):
            wide[0:2] = data
    for batch in ({"a": torch.zeros(2)}, "text", b"bytes", 3, None, torch.zeros(())):
        with refused(wide, TypeError):
            wide.extend(batch)
    with refused(wide, RuntimeError, "at least one element"):
        wide.extend([])


@each_kind
def test_places_are_assigned(kind):
    buffer = filled(kind, [0, 1, 2])
    buffer[1] = flat_td([9])[0]
    buffer[[2, 0]] = flat_td([5, 6])
    buffer[:1] = flat_td([7])
    assert ids_of(buffer.storage) == [7, 9, 5]
    assert (len(buffer), buffer.writer.cursor, buffer.write_count) == (3, 3, 3)
    buffer.storage.set(slice(1, 3), flat_td([3]))
    assert ids_of(buffer.storage) == [7, 3]
    buffer.storage.set([2, 0], flat_td([4, 8]))
    assert ids_of(buffer.storage) == [8, 3, 4]
    buffer.empty()
    assert len(buffer) == 0
    buffer.extend(flat_td([4]))
    check_same(buffer[0], flat_td([4])[0])


@each_kind
@given(writes=st.lists(st.one_of(st.integers(1, 99), st.lists(st.integers(1, 99), min_size=1, max_size=9)), max_size=8))
def test_it_holds_what_a_ring_of_items_holds(kind, writes):
    buffer, ring, written = ReplayBuffer(storage=kind(4)), {}, 0
    for write in writes:
        many = write if isinstance(write, list) else [write]
        index = buffer.extend(flat_td(write)) if many is write else [buffer.add(flat_td([write])[0])]
        for slot, each in zip(index, many, strict=True):
            assert int(slot) == written % 4
            ring[written % 4] = each
            written += 1
    assert len(buffer) == len(ring) and buffer.write_count == written
    assert ids_of(buffer.storage) == [ring[slot] for slot in range(len(ring))]
    if ring:
        got, info = buffer.sample(6, return_info=True)
        assert got["obs"][:, 0].tolist() == [ring[slot] for slot in info["index"].tolist()]


@each_kind
def test_what_was_given_is_not_what_is_stored(kind):
    given = flat_td([1, 2])
    buffer = filled(kind, [1])
    buffer.extend(given)
    given.zero_()
    assert ids_of(buffer.storage) == [1, 1, 2]
    buffer.extend((torch.ones(3, 2, requires_grad=True) * 2,))
    assert not buffer[3].requires_grad


@each_kind
def test_a_prioritized_buffer_draws_by_priority(kind):
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=kind(5), batch_size=16)
    buffer.extend(flat_td([0, 1, 2]).set("td_error", torch.tensor([0.0, 2.0, 1.0])))
    batch = buffer.sample()
    assert set(batch["index"].tolist()) == {1, 2}
    check_same(batch["obs"][:, 0], batch["index"].float())
    batch["td_error"] = torch.where(batch["index"] == 1, 0.0, 3.0)
    buffer.update_tensordict_priority(batch)
    assert set(buffer.sample()["index"].tolist()) == {2}


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@each_kind
def test_a_copy_goes_on_apart(kind, copier):
    buffer = filled(kind, [1, 2], TensorDictReplayBuffer)
    twin = copier(buffer)
    twin.extend(flat_td([5]))
    twin[0] = flat_td([8])[0]
    assert twin.storage.max_size == 9
    assert twin["obs"][:, 0].tolist() == [8.0, 2.0, 5.0] and buffer["obs"][:, 0].tolist() == [1.0, 2.0]


@each_kind
def test_workers_are_refused(kind):
    buffer = filled(kind, [1, 2])
    with pytest.raises(RuntimeError, match=f"Cannot share a storage of type {kind.__name__}"):
        multiprocessing.get_context("spawn").Process(target=print, args=(buffer,)).start()


# ------------------------------------------------------------------ any objects


def as_they_are(items):
    return items


def objects(capacity=5, **kwargs):
    return ReplayBuffer(storage=ListStorage(capacity), collate_fn=as_they_are, **kwargs)


def unlike_items():
    return [TensorDict({"a": torch.full((size,), float(size))}) for size in (2, 3)]


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


@pytest.mark.parametrize(
    ("items", "batch"),
    [
        ([{"a": torch.ones(2), "b": (torch.ones(()),)}] * 3, {"a": torch.ones(3, 2), "b": (torch.ones(3),)}),
        ([Pair(torch.ones(2), torch.tensor(3))] * 2, Pair(torch.ones(2, 2), torch.tensor([3, 3]))),
        (plain_tensor([1, 2]), plain_tensor([1, 2])),
        (flat_td([1, 2]), flat_td([1, 2])),
        (["a", "b"], ["a", "b"]),
    ],
    ids=["dict", "named tuple", "tensor", "tensordict", "text"],
)
def test_items_of_equal_structure_are_stacked(items, batch):
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend(items)
    check_same(buffer[:], batch)


def test_what_cannot_be_stacked_needs_a_collate_function():
    buffer = ReplayBuffer(storage=ListStorage(5))
    buffer.extend([None, 3])
    for read in (lambda: buffer.sample(2), lambda: buffer[:]):
        with pytest.raises(TypeError, match="collate_fn"):
            read()
    assert buffer[1] == 3
    buffer = ReplayBuffer(storage=ListStorage(5), collate_fn=len)
    buffer.extend(list("abc"))
    assert (buffer.sample(4), buffer[:2], buffer[1]) == (4, 2, "b")  # an int is no list


def test_unlike_tensordicts_are_stacked_lazily_and_can_be_edited_freely():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=ListStorage(5))
    for item in unlike_items():
        buffer.add(item)
    batch = buffer.sample(6)
    assert isinstance(batch, LazyStackedTensorDict) and {"index", "priority_weight"} <= set(batch[0].keys())
    for place in range(6):
        batch[place]["a"].zero_()
        batch[place]["new"] = torch.ones(())
    for item, wanted in zip(buffer.storage, unlike_items(), strict=True):
        assert set(item.keys()) == {"a", "index"}
        check_same(item.exclude("index"), wanted)


def test_items_are_moved_to_a_device_only_when_asked():
    item = {"x": torch.zeros(2, device="meta")}
    alone, moved = ListStorage(2), ListStorage(2, device="meta")
    alone.set(0, item)
    moved.set(0, {"x": torch.zeros(2), "name": "n", "pair": (torch.zeros(1), 2)})
    assert alone.get(0) is item
    assert moved.get(0)["x"].device.type == moved.get(0)["pair"][0].device.type == "meta"
    assert moved.get(0)["name"] == "n" and moved.get(0)["pair"][1] == 2


def test_containment_iteration_and_length():
    assert ListStorage().max_size == sys.maxsize
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
