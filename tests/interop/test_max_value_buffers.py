"""TensorDictMaxValueWriter beside other components: rows of others, samplers, copies, processes."""

import copy
import multiprocessing
import os
import pickle

import pytest
import torch

from interop import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.interop.rows import check_same, flat_td, plain_tensor, refused
from tests.interop.test_max_value_writer import best, held, in_each_storage, into_each_kind, ranked

# ------------------------------------------------------------------ rows of elsewhere


@pytest.mark.parametrize("first", ["add", "extend"])
def test_rows_that_are_there_already_are_ranked(first):
    buffer = ReplayBuffer(storage=TensorStorage(ranked([5, 1, 3])), writer=TensorDictMaxValueWriter("key"))
    if first == "add":
        assert buffer.add(ranked([0])[0]) is None and buffer.add(ranked([2])[0]) == 1
    else:
        check_same(buffer.extend(ranked([-1, 0, 1, 2])), torch.tensor([-1, -1, -1, 1]))
    assert held(buffer) == [5, 2, 3] and buffer.write_count == 1


@in_each_storage
def test_rows_of_another_writer_are_ranked(make):
    buffer = ReplayBuffer(storage=make(4))
    buffer.extend(ranked([5, 1]))
    before = buffer.set_writer(TensorDictMaxValueWriter("key"))
    check_same(buffer.extend(ranked([3, 4, 2])), torch.tensor([2, 3, 1]))
    assert held(buffer) == [5, 2, 3, 4]
    other = ReplayBuffer(storage=buffer.storage, writer=RoundRobinWriter())
    assert len(other) == 4
    buffer.set_writer(before)
    buffer.extend(ranked([0]))
    assert 0 in held(buffer) and before.write_count == 3


@in_each_storage
def test_rows_that_cannot_be_ranked_are_refused(make):
    storage = make(4)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(flat_td([1, 2]) if make is not ListStorage else plain_tensor([1, 2]))
    buffer.set_writer(TensorDictMaxValueWriter("key"))
    with refused(buffer, (KeyError, RuntimeError)):
        buffer.extend(ranked([3]))


@in_each_storage
def test_emptying_forgets_the_ranks(make):
    buffer = best(2, make)
    buffer.extend(ranked([8, 9]))
    buffer.empty(empty_write_count=False)
    assert buffer.write_count == 2
    check_same(buffer.extend(ranked([1, 3, 2])), torch.tensor([-1, 1, 0]))
    buffer.empty()
    assert (buffer.write_count, len(buffer), buffer.writer._cursor) == (0, 0, 0)
    buffer.extend(ranked([8, 9]))
    ReplayBuffer(storage=buffer.storage).empty()  # through another buffer
    assert buffer.add(ranked([1])[0]) == 0 and held(buffer) == [1]
    buffer.storage._empty()
    assert buffer.add(ranked([0])[0]) == 0


def test_another_storage_begins_anew():
    buffer = best(2)
    buffer.extend(ranked([8, 9]))
    buffer.set_storage(LazyTensorStorage(2))
    check_same(buffer.extend(ranked([1, 2])), torch.arange(2))


# ------------------------------------------------------------------ "index"


@into_each_kind
@in_each_storage
def test_the_slot_is_noted_where_an_item_was_added(make, kind):
    buffer = best(2, make, kind)
    rows = ranked([1, 2, 3])
    buffer.extend(rows[:2])
    assert "index" not in rows
    item = rows[2]
    assert buffer.add(item) == 0
    assert ("index" in item) == (kind is ReplayBuffer) and item.get("index", torch.tensor(0)) == 0
    lower = rows[0]
    assert buffer.add(lower) is None and "index" not in lower
    assert all("index" not in each for each in buffer.storage)
    item["key"] += 4  # the same object again
    assert buffer.add(item) == 1 and buffer.add(buffer.sample(1)[0].clone().set("key", torch.tensor(8))) == 0
    assert held(buffer) == [8, 7]
    assert set(buffer.sample(4).keys()) == {"key", "id"} | ({"index"} if kind is TensorDictReplayBuffer else set())


@in_each_storage
def test_where_rows_have_an_index_it_is_their_slot(make):
    buffer = TensorDictReplayBuffer(storage=make(3))
    buffer.extend(ranked([1, 2, 3]))
    buffer.set_writer(TensorDictMaxValueWriter("key"))
    buffer.extend(ranked([9, 0, 8]))
    buffer.add(ranked([7])[0])
    buffer.extend(buffer.sample(3).set("key", torch.tensor([5, 20, 4])))
    assert held(buffer) == [9, 8, 20] and held(buffer, "index") == [0, 1, 2]
    buffer[0] = ranked([6])[0]
    assert held(buffer, "index") == [0, 1, 2] and held(buffer)[0] == 6


# ------------------------------------------------------------------ with samplers and transforms


@in_each_storage
def test_kept_items_get_their_priorities(make):
    buffer = best(
        3, make, TensorDictReplayBuffer, sampler=PrioritizedSampler(3, 1.0, 1.0, eps=0.0), priority_key="td_error"
    )
    rows = ranked([1.0, 5.0, 4.0, 0.0, 3.0]).set("td_error", torch.tensor([7.0, 2.0, 3.0, 9.0, 5.0]))
    check_same(buffer.extend(rows), torch.tensor([-1, 1, 2, -1, 0]))
    assert buffer.sampler.priorities.tolist() == [5.0, 2.0, 3.0] and buffer.sampler.default_priority == 5.0
    rejected = ranked([0.0, 1.0]).set("td_error", torch.tensor([50.0, 60.0]))
    check_same(buffer.extend(rejected), torch.tensor([-1, -1]))
    assert buffer.add(rejected[0]) is None
    assert buffer.sampler.priorities.tolist() == [5.0, 2.0, 3.0] and buffer.sampler.default_priority == 5.0
    assert buffer.add(rows[1].set("td_error", torch.tensor(8.0)).set("key", torch.tensor(6.0))) == 0
    assert buffer.sampler.priorities.tolist() == [8.0, 2.0, 3.0]
    buffer.extend(ranked([7.0]).set("td_error", torch.tensor([1.0])), update_priority=False)
    assert buffer.sampler.priorities.tolist() == [8.0, 2.0, 8.0]
    batch = buffer.sample(32)
    assert set(batch["index"].tolist()) == {0, 1, 2}


def test_kept_items_of_a_plain_prioritized_buffer_get_the_default_priority():
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(2))
    buffer.set_writer(TensorDictMaxValueWriter("key"))
    buffer.extend(ranked([1, 2]))
    buffer.update_priority([0, 1], [3.0, 2.0])
    assert buffer.add(ranked([0])[0]) is None
    check_same(buffer.extend(ranked([0, 5])), torch.tensor([-1, 0]))
    assert buffer.sampler.priorities.tolist() == [3.0, 2.0]
    buffer.update_priority(buffer.extend(ranked([0, 6])), torch.tensor([9.0, 4.0]))
    assert buffer.sampler.priorities.tolist() == [3.0, 4.0]


def test_what_transforms_make_is_ranked():
    class Negated(torch.nn.Module):
        def forward(self, data):
            return data

        def inv(self, data):
            return data.set("key", -data["key"])

    buffer = best(1, transform=Negated())
    buffer.extend(ranked([3, 1, 2]))
    assert held(buffer, "id") == [1] and held(buffer) == [-1]


@pytest.mark.parametrize("prefetch", [None, 2])
def test_batches_are_drawn_of_what_is_kept(prefetch):
    buffer = best(4, kind=TensorDictReplayBuffer, batch_size=8, prefetch=prefetch)
    buffer.extend(ranked(range(20)))
    for _ in range(5):
        batch = buffer.sample()
        assert batch["key"].min() >= 16
        check_same(batch["key"], buffer["key"][batch["index"]])


# ------------------------------------------------------------------ copies and processes


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@in_each_storage
def test_a_copy_goes_on_apart(make, copier):
    buffer = best(2, make)
    buffer.extend(ranked([1, 2]))
    twin = copier(buffer)
    check_same(twin.extend(ranked([0, 5])), torch.tensor([-1, 0]))
    assert (held(twin), twin.write_count) == ([5, 2], 3)
    assert (held(buffer), buffer.write_count) == ([1, 2], 2)
    check_same(buffer.extend(ranked([0, 3])), torch.tensor([-1, 0]))


def test_spawned_workers_are_refused():
    buffer = best(2, LazyMemmapStorage)
    buffer.extend(ranked([1, 2]))
    for each in (buffer, buffer.writer):
        with pytest.raises(RuntimeError, match="cannot be shared between processes"):
            multiprocessing.get_context("spawn").Process(target=print, args=(each,)).start()


@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.parametrize("make", [LazyMemmapStorage, LazyTensorStorage, ListStorage])
def test_forked_workers_are_refused(make):
    buffer = best(2, make)
    buffer.extend(ranked([1, 2]))
    child = os.fork()
    if child == 0:
        refusals = 0
        for write in (lambda: buffer.extend(ranked([5])), lambda: buffer.add(ranked([5])[0])):
            try:
                write()
            except RuntimeError:
                refusals += 1
        os._exit(refusals)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert held(buffer) == [1, 2] and buffer.add(ranked([3])[0]) == 0


def test_another_default_device_makes_no_difference():
    rows = ranked([1, 3, 2])
    with torch.device("meta"):
        for make in (LazyTensorStorage, ListStorage, LazyStackStorage, CompressedListStorage):
            buffer = best(2, make)
            index = buffer.extend(rows)
            assert index.device.type == "cpu"
            assert buffer.add(rows[1].clone()) == 0
            assert held(buffer) == [3, 3] and index.tolist() == [-1, 1, 0]


def test_the_representation_shows_what_it_ranks_by():
    assert repr(TensorDictMaxValueWriter()) == (
        "TensorDictMaxValueWriter(cursor=0, full_storage=False, rank_key=('next', 'reward'), reduction=sum)"
    )
    buffer = best(2, reduction="max")
    buffer.add(ranked([1])[0])
    assert repr(buffer.writer) == "TensorDictMaxValueWriter(cursor=1, full_storage=False, rank_key=key, reduction=max)"
    buffer.extend(ranked([1, 2]))
    assert repr(buffer.writer) == "TensorDictMaxValueWriter(cursor=0, full_storage=True, rank_key=key, reduction=max)"
