"""Samplers, writers and storages that users write."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    Storage,
    Writer,
)
from tests.interop.rows import KINDS, check_same, plain_tensor


class Newest(Sampler):
    """The newest item, with a note."""

    def __init__(self):
        self.told = []

    def sample(self, storage, batch_size):
        return torch.full((batch_size,), len(storage) - 1), {"note": torch.arange(batch_size)}

    def add(self, index):
        self.told.append(("add", index))

    def extend(self, index):
        self.told.append(("extend", index.tolist()))

    def mark_update(self, index, *, storage=None):
        self.told.append(("mark", torch.as_tensor(index).tolist()))

    def _empty(self):
        self.told.append(("empty",))


class Column(Storage):
    """A storage of floats in a list."""

    def __init__(self, max_size):
        super().__init__(max_size)
        self.held = {}

    def set(self, cursor, data, *, set_cursor=True):
        places = [cursor] if isinstance(cursor, int) else torch.as_tensor(cursor).tolist()
        for place, value in zip(places, [data] if isinstance(cursor, int) else data, strict=True):
            self.held[place] = float(value)

    def get(self, index):
        if isinstance(index, slice):
            index = range(len(self))[index]
        if isinstance(index, int):
            return self.held[index]
        return [self.held[int(place)] for place in index]

    def __len__(self):
        return len(self.held)

    def _empty(self):
        self.held = {}


class Reversed(Writer):
    """Writes from the end."""

    def add(self, data):
        slot = self._storage.max_size - 1
        self._storage.set(slot, data)
        return slot

    def extend(self, data):
        index = torch.arange(self._storage.max_size - 1, self._storage.max_size - 1 - len(data), -1)
        self._storage.set(index, data)
        return index

    def _empty(self, empty_write_count=True):
        pass


def test_a_sampler_of_ones_own_draws_and_is_told_what_changes():
    sampler = Newest()
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=3)
    buffer.extend(plain_tensor([1, 2]))
    buffer.add(plain_tensor([3])[0])
    batch, info = buffer.sample(return_info=True)
    check_same(batch, plain_tensor([3, 3, 3]))
    assert set(info) == {"index", "note"}
    buffer.mark_update(torch.tensor([1]))
    buffer.empty()
    assert sampler.told == [("mark", [0, 1]), ("extend", [0, 1]), ("mark", 2), ("add", 2), ("mark", [1]), ("empty",)]


def test_a_sampler_may_name_items_by_a_list_range_or_tuple():
    class Named(Sampler):
        index = None

        def sample(self, storage, batch_size):
            return self.index, {}

    sampler = Named()
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler)
    buffer.extend(plain_tensor([5, 6, 7]))
    for sampler.index in ([2, 0], torch.tensor([2, 0]), (torch.tensor([2, 0]),), range(2, -1, -2)):
        check_same(buffer.sample(2), plain_tensor([7, 5]))


@pytest.mark.parametrize("kind", [RandomSampler, PrioritizedSampler])
def test_a_subclass_that_draws_differently_is_asked(kind):
    class First(kind):
        def sample(self, storage, batch_size):
            index, info = super().sample(storage, batch_size)
            return torch.zeros_like(index), {**info, "mine": index}

    sampler = First() if kind is RandomSampler else First(8, 1.0, 1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler)
    buffer.extend(plain_tensor(list(range(8))))
    batch, info = buffer.sample(16, return_info=True)
    check_same(batch, plain_tensor([0] * 16))
    assert "mine" in info and ("priority_weight" in info) == (kind is PrioritizedSampler)


@pytest.mark.parametrize("base", [LazyTensorStorage, LazyMemmapStorage])
def test_a_subclass_that_reads_differently_is_asked(base):
    class Doubled(base):
        def get(self, index):
            return super().get(index) * 2

    buffer = ReplayBuffer(storage=Doubled(4))
    buffer.extend(plain_tensor([1, 1]))
    check_same(buffer.sample(3), plain_tensor([2, 2, 2]))
    check_same(buffer[:], plain_tensor([2, 2]))


def test_edits_by_key_reach_a_storage_that_returns_copies():
    class Half(LazyTensorStorage):
        def set(self, cursor, data, *, set_cursor=True):
            super().set(cursor, data.half(), set_cursor=set_cursor)

        def get(self, index):
            return super().get(index).float()

    buffer = ReplayBuffer(storage=Half(8))
    buffer.extend(TensorDict({"x": torch.arange(4.0)}, [4]))
    for edit in (
        lambda: buffer.update_({"x": buffer[:]["x"] + 1}),
        lambda: buffer.set_("x", buffer[:]["x"] + 1),
        lambda: buffer.__setitem__("x", buffer[:]["x"] + 1),
    ):
        wanted = buffer[:]["x"] + 1
        edit()
        check_same(buffer[:]["x"], wanted)
    lanes = ReplayBuffer(storage=Half(12, ndim=2))
    lanes.extend(TensorDict({"x": torch.arange(6.0).reshape(2, 3)}, [2, 3]))
    lanes["x"] = lanes[:]["x"] + 1
    check_same(lanes[:]["x"], torch.arange(6.0).reshape(2, 3) + 1)


@pytest.mark.parametrize("kind", ["tensor", "tensordict", "dict", "tuple", "namedtuple"])
@pytest.mark.parametrize("count", [3, 11])
def test_a_subclass_that_writes_differently_is_asked(kind, count):
    class Noting(LazyTensorStorage):
        def set(self, cursor, data, *, set_cursor=True):
            self.noted = [*getattr(self, "noted", []), cursor]
            super().set(cursor, data, set_cursor=set_cursor)

    buffer = ReplayBuffer(storage=Noting(4))
    buffer.extend(KINDS[kind](list(range(count))))
    assert buffer.storage.noted and buffer.write_count == count and len(buffer) == min(count, 4)
    check_same(buffer[:], KINDS[kind]([0, 1, 2] if count == 3 else [8, 9, 10, 7]))


def test_a_storage_of_ones_own_takes_part():
    buffer = ReplayBuffer(storage=Column(3), collate_fn=torch.tensor)
    assert buffer.add(5) == 0
    check_same(buffer.extend([6, 7, 8]), torch.tensor([1, 2, 0]))
    check_same(buffer[:], torch.tensor([8.0, 6.0, 7.0]))
    assert set(buffer.sample(30).tolist()) == {6.0, 7.0, 8.0} and len(buffer) == 3 and buffer.write_count == 4
    assert buffer[1] == 6.0
    buffer[1] = 9
    assert buffer[1] == 9.0
    buffer.empty()
    assert len(buffer) == 0


def test_a_storage_without_a_default_collate_function_needs_one():
    with pytest.raises(NotImplementedError):
        ReplayBuffer(storage=Column(3))


def test_a_writer_of_ones_own_chooses_the_slots():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=Reversed())
    check_same(buffer.extend(plain_tensor([1, 2, 3, 4])), torch.tensor([3, 2, 1, 0]))
    check_same(buffer[:], plain_tensor([4, 3, 2, 1]))
    assert buffer.add(plain_tensor([9])[0]) == 3
    assert set(buffer.sample(64)[:, 0].tolist()) == {9.0, 3.0, 2.0, 4.0}


def test_a_writer_that_refuses_items_names_them_by_minus_one():
    class Even(RoundRobinWriter):
        def extend(self, data):
            kept = data[:, 0] % 2 == 0
            index = torch.full((len(data),), -1)
            if kept.any():
                index[kept] = super().extend(data[kept])
            return index

    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, 1.0, 1.0), writer=Even())
    check_same(buffer.extend(plain_tensor([1, 2, 3, 4])), torch.tensor([-1, 0, -1, 1]))
    assert len(buffer) == 2 and buffer.write_count == 2
    check_same(buffer.sampler.priorities, torch.ones(2))
    assert set(buffer.sample(64)[:, 0].tolist()) == {2.0, 4.0}
