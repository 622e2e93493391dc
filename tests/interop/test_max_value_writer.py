"""TensorDictMaxValueWriter: what it keeps is what ranks highest, whatever happens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same, refused

STORAGES = {
    "memory": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "list": ListStorage,
    "stack": LazyStackStorage,
    "compressed": CompressedListStorage,
}
in_each_storage = pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
into_each_kind = pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])


def ranked(ranks, ids=None):
    """Rows whose id is their place in the batch, unless given."""
    ranks = torch.as_tensor(ranks)
    ids = torch.arange(len(ranks)) if ids is None else torch.as_tensor(ids)
    return TensorDict(key=ranks, id=ids, batch_size=[len(ranks)])


def best(capacity, make=LazyTensorStorage, kind=ReplayBuffer, rank_key="key", reduction="sum", **kwargs):
    return kind(storage=make(capacity), writer=TensorDictMaxValueWriter(rank_key, reduction), **kwargs)


def held(buffer, key="key"):
    """An entry of each stored item, by slot."""
    return [item[key].tolist() for item in buffer.storage]


def kept(buffer):
    """The rank and the slot of each stored item, by slot."""
    return sorted(buffer.writer.state()["_current_top_values"].tolist(), key=lambda each: each[1])


class Model:
    """One item after the other, by brute force."""

    def __init__(self, capacity):
        self.capacity, self.ranks, self.ids, self.written = capacity, [], [], 0

    def write(self, rank, each):
        if len(self.ranks) < self.capacity:
            self.ranks.append(rank)
            self.ids.append(each)
            slot = len(self.ranks) - 1
        else:
            slot = min(range(self.capacity), key=lambda place: (self.ranks[place], place))
            if not rank > self.ranks[slot]:
                return -1
            self.ranks[slot], self.ids[slot] = rank, each
        self.written += 1
        return slot

    def extend(self, ranks, ids):
        slots = [self.write(*each) for each in zip(ranks, ids, strict=True)]
        return [-1 if slot in slots[place + 1 :] else slot for place, slot in enumerate(slots)]


# Few values, so that many are equal.
ranks = st.integers(-3, 6).map(float) | st.sampled_from([float("inf"), -float("inf"), 0.5, -0.0, 1e300])
writes = st.lists(st.one_of(ranks, st.lists(ranks, max_size=9)), max_size=8)


@in_each_storage
@settings(max_examples=50)
@given(writes=writes, capacity=st.integers(1, 5))
def test_it_keeps_what_one_item_after_the_other_would(make, writes, capacity):
    buffer, model, ids = best(capacity, make), Model(capacity), 0
    for write in writes:
        many = write if isinstance(write, list) else [write]
        numbers = list(range(ids, ids + len(many)))
        ids += len(many)
        rows = ranked(torch.tensor(many, dtype=torch.float64), numbers)
        wanted = model.extend(many, numbers)
        if isinstance(write, list):
            index = buffer.extend(rows)
            assert index.dtype == torch.int64 and index.tolist() == wanted
        else:
            assert buffer.add(rows[0]) == (wanted[0] if wanted[0] >= 0 else None)
        assert held(buffer, "id") == model.ids and held(buffer) == model.ranks
        assert buffer.write_count == model.written and len(buffer) == len(model.ids)


@into_each_kind
@in_each_storage
def test_the_documented_example(make, kind):
    buffer = best(1, make, kind, batch_size=1)
    check_same(buffer.extend(ranked(range(10))), torch.tensor([-1] * 9 + [0]))
    assert held(buffer) == [9] and buffer.write_count == 10
    buffer.extend(ranked(range(10, 20)))
    assert held(buffer) == [19] and int(buffer.sample()["id"]) == 9
    check_same(buffer.extend(ranked(range(10))), torch.full((10,), -1))
    assert held(buffer) == [19] and buffer.write_count == 20


# ------------------------------------------------------------------ ranks


@pytest.mark.parametrize(
    ("reduction", "wanted"),
    [("sum", [12.0, 9]), ("max", [5.0, 3]), ("min", [1.0, 0]), ("mean", [3, 2.25]), ("median", [2, 3])],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_several_values_make_one_rank(reduction, wanted, dtype, shape):
    values = torch.tensor([[1, 5, 2, 4], [3, 3, 3, 0]]).to(dtype).reshape(2, *shape)
    rows = TensorDict(key=values, batch_size=[2])
    for batch in (rows, list(rows.unbind(0))):
        buffer = best(2, reduction=reduction)
        buffer.extend(batch)
        assert kept(buffer) == [[wanted[0], 0], [wanted[1], 1]]


def test_the_reward_of_the_step_ranks_by_default():
    buffer = ReplayBuffer(storage=LazyTensorStorage(1), writer=TensorDictMaxValueWriter())
    buffer.extend(TensorDict(next=TensorDict(reward=torch.tensor([[1.0], [3.0], [2.0]])), batch_size=[3]))
    assert buffer["next", "reward"].tolist() == [[3.0]] and buffer.writer.rank_key == ("next", "reward")


@in_each_storage
def test_trajectories_are_ranked_as_a_whole(make):
    rows = TensorDict(
        key=torch.tensor([[1.0, 1.0], [0.0, 5.0], [2.0, 1.0]]), id=torch.arange(6).reshape(3, 2), batch_size=[3, 2]
    )
    buffer = best(2, make)
    check_same(buffer.extend(rows), torch.tensor([-1, 1, 0]))
    assert held(buffer, "id") == [[4, 5], [2, 3]]
    assert buffer.writer.write_count == 3
    with pytest.warns(UserWarning, match="extend"):  # a batch as one item
        assert buffer.add(rows[1].clone().set("key", torch.tensor([9.0, 9.0]))) == 0
    with refused(buffer, RuntimeError, "one batch dim"):
        buffer.extend(rows.unsqueeze(-1))
    with pytest.warns(UserWarning, match="extend"), refused(buffer, RuntimeError, "one batch dim"):
        buffer.add(rows)


# ------------------------------------------------------------------ what is refused


@in_each_storage
@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (ranked([9.0, float("nan")]), ValueError),
        (TensorDict(id=torch.arange(2), batch_size=[2]), KeyError),
        (TensorDict(key="high", id=torch.arange(2), batch_size=[2]), TypeError),
        (ranked([9.0])[0], RuntimeError),
        (torch.zeros(2), RuntimeError),
        ([ranked([9.0])[0], torch.zeros(2)], RuntimeError),
    ],
)
def test_what_cannot_be_ranked_changes_nothing(make, batch, error):
    buffer = best(2, make)
    buffer.extend(ranked([1.0, 2.0]))
    with refused(buffer, error):
        buffer.extend(batch)
    check_same(buffer.extend(ranked([1.5, 3.0])), torch.tensor([-1, 0]))  # both go where 1 was
    assert held(buffer) == [3.0, 2.0]


def test_a_storage_that_fails_leaves_the_ranks():
    class Failing(ListStorage):
        fails = False

        def set(self, cursor, data, *, set_cursor=True):
            if self.fails:
                raise OSError("no room")
            super().set(cursor, data, set_cursor=set_cursor)

    buffer = best(3, Failing)
    buffer.extend(ranked([1, 2]))
    buffer.storage.fails = True
    for batch in (ranked([9, 8, 7, 6]), ranked([5]), ranked([3, 4, 0, 5])):
        with pytest.raises(OSError, match="no room"):
            buffer.extend(batch)
    buffer.storage.fails = False
    assert buffer.write_count == 2 and kept(buffer) == [[1.0, 0], [2.0, 1]]
    check_same(buffer.extend(ranked([0, 3])), torch.tensor([-1, 2]))
    assert held(buffer) == [1, 2, 3]


def test_several_item_dims_are_refused_before_anything_changes():
    with pytest.raises(ValueError, match="ndim=2"):
        best(4, lambda capacity: LazyTensorStorage(capacity, ndim=2))
    buffer = best(4, sampler=PrioritizedSampler(4, 1.0, 1.0))
    buffer.extend(ranked([1.0, 2.0]))
    buffer.update_priority([0, 1], [5.0, 6.0])
    with refused(buffer, ValueError, "ndim=2"):
        buffer.set_storage(LazyTensorStorage(4, ndim=2))
    other = ReplayBuffer(storage=LazyTensorStorage(4, ndim=2))
    with refused(other, ValueError, "ndim=2"):
        other.set_writer(TensorDictMaxValueWriter("key"))
