"""CompressedListStorage: a list like any other, from outside."""

import copy
import multiprocessing
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict

from interop import (
    CompressedListStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same, flat_td, nested_td, plain_tensor, refused


def buffer_of(items, kind=ReplayBuffer, capacity=9, **kwargs):
    buffer = kind(storage=CompressedListStorage(capacity), **kwargs)
    buffer.extend(items)
    return buffer


def images(count):
    return TensorDict(
        obs=torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1).repeat(1, 3, 84, 84), batch_size=count
    )


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ([3, 0], [3, 0]),
        (range(2), [0, 1]),
        (np.array([2, 2]), [2, 2]),
        (torch.tensor([-1, 0]), [3, 0]),
        (torch.tensor([True, False, False, True]), [0, 3]),
    ],
    ids=str,
)
def test_every_kind_of_index(index, wanted):
    buffer = buffer_of(flat_td([0, 1, 2, 3]))
    got = buffer[index]
    assert isinstance(got, LazyStackedTensorDict)
    check_same(got.contiguous(), flat_td(wanted))
    assert [int(item["obs"][0]) for item in buffer.storage.get(index)] == wanted
    check_same(buffer[int(wanted[0])], flat_td(wanted)[0])


@pytest.mark.parametrize("index", [2, -3, [0, 2], torch.tensor([-3])], ids=str)
def test_a_slot_that_was_never_written_is_refused(index):
    buffer = buffer_of(flat_td([0, 1]))
    with refused(buffer, IndexError):
        buffer[index]


def test_writes_that_do_not_fit_change_nothing():
    buffer = buffer_of(flat_td([0, 1]), capacity=3)
    storage = buffer.storage
    for cursor, data, error in (
        (5, flat_td([7])[0], RuntimeError),
        ([0, 1], flat_td([7, 8, 9]), ValueError),
        ([0, 3], flat_td([7, 8]), RuntimeError),
        (slice(0, 1), flat_td([5, 6, 7, 8]), RuntimeError),
        (slice(None, None, -1), flat_td([5]), ValueError),
    ):
        with refused(buffer, error):
            storage.set(cursor, data)
        assert len(storage._metadata) == len(storage) == 2


def test_places_are_assigned():
    buffer = buffer_of(flat_td([0, 1, 2]))
    buffer[1] = plain_tensor([9])[0]
    buffer[[2, 0]] = flat_td([5, 6])
    buffer[:1] = flat_td([7])
    check_same(buffer[1], plain_tensor([9])[0])
    assert [int(buffer[slot]["obs"][0]) for slot in (0, 2)] == [7, 5]
    buffer.storage.set(slice(1, 3), flat_td([3]))
    assert buffer[:]["obs"][:, 0].tolist() == [7.0, 3.0] and len(buffer.storage._metadata) == 2
    buffer.empty()
    assert len(buffer) == 0 and buffer.storage._metadata == []
    buffer.extend(flat_td([4]))
    check_same(buffer[0], flat_td([4])[0])


@given(st.lists(st.one_of(st.integers(0, 99), st.lists(st.integers(0, 99), min_size=1, max_size=6)), max_size=8))
def test_it_holds_what_a_plain_list_holds(writes):
    buffer, plain = ReplayBuffer(storage=CompressedListStorage(4)), ReplayBuffer(storage=ListStorage(4))
    for write in writes:
        for each in (buffer, plain):
            _ = each.extend(nested_td(write)) if isinstance(write, list) else each.add(nested_td([write])[0])
    assert len(buffer) == len(plain) and len(buffer.storage._metadata) == len(plain)
    if len(plain):
        check_same(buffer[:].contiguous(), plain[:])


def test_samples_are_copies():
    buffer = buffer_of(flat_td([1, 2, 3]), transform=lambda data: data.zero_())
    for got in (buffer.sample(5), buffer[:], buffer[[0, 0]], buffer[1]):
        assert not got["obs"].any()
    assert [int(item["obs"][0]) for item in buffer.storage] == [1, 2, 3]
    kept = ReplayBuffer(storage=CompressedListStorage(3), collate_fn=lambda items: items)
    kept.extend([{"a": torch.ones(2)}])
    kept[0]["a"].zero_()
    kept.sample(2)[0]["a"].zero_()
    assert kept[0]["a"].all()


def test_tensors_and_dicts_are_stacked():
    buffer = buffer_of(plain_tensor([1, 2, 3]))
    check_same(buffer[:], plain_tensor([1, 2, 3]))
    buffer = buffer_of([{"a": torch.ones(2)}, {"a": torch.zeros(2)}])
    check_same(buffer[:], {"a": torch.tensor([[1.0, 1.0], [0.0, 0.0]])})
    with pytest.raises(TypeError, match="collate_fn"):
        buffer_of([None, None])[:]


def test_images_are_sampled_as_documented():
    buffer = buffer_of(images(10), batch_size=3)
    batch, info = buffer.sample(return_info=True)
    assert isinstance(batch, LazyStackedTensorDict)
    check_same(batch["obs"], images(10)["obs"][info["index"]])


# ------------------------------------------------------------------ in buffers


def test_a_buffer_of_tensordicts_marks_its_samples():
    buffer = buffer_of(flat_td([0, 1, 2, 3, 4]), capacity=3, kind=TensorDictReplayBuffer, batch_size=4, prefetch=2)
    assert buffer[:]["index"].tolist() == [0, 1, 2] and buffer["obs"][:, 0].tolist() == [3.0, 4.0, 2.0]
    for _ in range(5):
        got = buffer.sample()
        check_same(got["obs"], buffer["obs"][got["index"]])
    assert buffer.next()["index"].shape == (4,)


def test_a_prioritized_buffer_draws_by_priority():
    storage = CompressedListStorage(5)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=storage, batch_size=16)
    buffer.extend(flat_td([0, 1, 2]).set("td_error", torch.tensor([0.0, 2.0, 1.0])))
    batch = buffer.sample()
    assert set(batch["index"].tolist()) == {1, 2}
    batch["td_error"] = torch.where(batch["index"] == 1, 0.0, 3.0)
    buffer.update_tensordict_priority(batch)
    assert set(buffer.sample()["index"].tolist()) == {2}


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_goes_on_apart(copier):
    buffer = buffer_of(nested_td([1, 2]), kind=TensorDictReplayBuffer)
    twin = copier(buffer)
    twin.extend(nested_td([5]))
    twin[0] = nested_td([8])[0]
    assert twin["obs"][:, 0].tolist() == [8.0, 2.0, 5.0] and buffer["obs"][:, 0].tolist() == [1.0, 2.0]


def test_workers_are_refused():
    buffer = buffer_of(flat_td([1, 2]))
    with pytest.raises(RuntimeError, match="Cannot share a storage of type CompressedListStorage"):
        multiprocessing.get_context("spawn").Process(target=print, args=(buffer,)).start()


def test_threads_read_and_write_at_once():
    buffer = buffer_of(images(8), kind=TensorDictReplayBuffer, batch_size=8)
    failed = []

    def use(write):
        try:
            for _ in range(15):
                if write:
                    buffer.extend(images(4))
                obs = buffer.sample()["obs"]
                assert (obs == obs[:, :1, :1, :1]).all()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(write,)) for write in (True, False, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_another_default_device_makes_no_difference():
    item, batch = nested_td([1])[0], nested_td([2, 3])
    with torch.device("meta"):
        buffer = TensorDictReplayBuffer(storage=CompressedListStorage(3), batch_size=5)
        buffer.add(item)
        buffer.extend(batch)
        got = buffer.sample()
    check_same(got["obs"][:, 0], got["index"].double() + 1)
    check_same(buffer[0].exclude("index"), item)


def test_the_representation_shows_the_first_item():
    assert repr(CompressedListStorage(3)) == "CompressedListStorage()"
    assert repr(buffer_of(flat_td([1])).storage).startswith("CompressedListStorage(items=[TensorDict(")
