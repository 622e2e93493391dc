"""TensorDictMaxValueWriter beside other components: rows of others, samplers, copies, processes."""

import pytest
import torch

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same
from tests.interop.test_max_value_writer import best, held, in_each_storage, into_each_kind, ranked

# ------------------------------------------------------------------ rows of elsewhere


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


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
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


# ------------------------------------------------------------------ copies and processes
