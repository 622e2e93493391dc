"""Calls from several threads: no row is torn, transforms hold no lock, and copies are of one moment."""

import copy
import pickle
import threading
import time

import pytest
import torch
from torch import nn

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same, flat_td, plain_tensor


def together(*calls):
    """Run calls in threads; the errors that they raised."""
    errors = []

    def guarded(call):
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def check_whole(batch):
    """All leaves of a row tell the same id."""
    ids = batch["obs"][:, 0]
    assert bool((batch["obs"] == ids[:, None]).all()) and bool((batch["done"][:, 0] == (ids % 2).bool()).all())


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_rows_are_never_torn(make, prefetch):
    buffer = TensorDictReplayBuffer(storage=make(64), batch_size=32, prefetch=prefetch)
    buffer.extend(flat_td([0] * 64))

    def write():
        for step in range(150):
            buffer.extend(flat_td([step] * 16))

    def read():
        for _ in range(150):
            check_whole(buffer.sample())

    assert together(write, write, read, read) == []
    assert buffer.write_count == 64 + 2 * 150 * 16 and len(buffer) == 64
    assert buffer.writer.cursor == buffer.write_count % 64


def test_priorities_are_updated_while_others_write_and_draw():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(64), batch_size=16)
    buffer.extend(flat_td([0] * 16))
    buffer.update_tensordict_priority(buffer.sample().set("td_error", torch.ones(16)))

    def write():
        for step in range(20):
            buffer.extend(flat_td([step] * 16))

    def learn():
        for _ in range(20):
            batch = buffer.sample()
            check_whole(batch)
            assert bool(torch.isfinite(batch["priority_weight"]).all())
            buffer.update_tensordict_priority(batch.set("td_error", batch["obs"][:, 0] + 1))

    assert together(write, learn, learn) == []
    assert bool((buffer.sampler.priorities >= 0).all())


class Watched(LazyTensorStorage):
    """Notes whether two threads were ever inside at once."""

    def __init__(self, size):
        super().__init__(size)
        self.inside, self.crowded = 0, False

    def alone(self, call):
        self.inside += 1
        time.sleep(0.002)
        self.crowded = self.crowded or self.inside > 1
        try:
            return call()
        finally:
            self.inside -= 1

    def get(self, index):
        return self.alone(lambda: super(Watched, self).get(index))

    def set(self, cursor, data, *, set_cursor=True):
        return self.alone(lambda: super(Watched, self).set(cursor, data, set_cursor=set_cursor))


def test_buffers_on_one_storage_take_turns():
    storage = Watched(8)
    one, two = (TensorDictReplayBuffer(storage=storage, batch_size=2) for _ in range(2))
    one.extend(flat_td([1, 2]))

    def write():
        for step in range(10):
            two.extend(flat_td([step]))
            two[0] = flat_td([step])[0]

    def read():
        for _ in range(10):
            one.sample()
            one[:]

    assert together(write, read) == [] and not storage.crowded


def test_a_buffer_takes_turns_on_the_storage_that_it_has_by_then():
    """Who waits for the lock of a storage that is exchanged meanwhile has to have that of the new one."""
    old, new = Watched(8), Watched(8)
    buffer, other = ReplayBuffer(storage=old), ReplayBuffer(storage=new)
    other.extend(plain_tensor([1, 2]))
    with old.lock.held():
        reader = threading.Thread(target=lambda: [buffer.sample(2) for _ in range(20)])
        reader.start()
        time.sleep(0.02)
        buffer.set_storage(new)
    for step in range(20):
        other.add(plain_tensor([step])[0])
    reader.join(20)
    assert not reader.is_alive() and not new.crowded


def test_storages_exchanged_crosswise_do_not_wait_for_each_other():
    storages = [LazyTensorStorage(4), LazyTensorStorage(4)]
    buffers = [ReplayBuffer(storage=storage) for storage in storages]

    def exchange(buffer, first):
        for step in range(300):
            buffer.set_storage(storages[(first + step) % 2])

    assert together(lambda: exchange(buffers[0], 0), lambda: exchange(buffers[1], 1)) == []


class Waiting(nn.Module):
    """A transform that goes on when it is told to, in the direction named."""

    def __init__(self, where):
        super().__init__()
        self.where, self.entered, self.go = where, threading.Event(), threading.Event()

    def wait(self, where):
        if where == self.where:
            self.entered.set()
            assert self.go.wait(60), "the other thread could not go on"

    def forward(self, data):
        self.wait("forward")
        return data

    def inv(self, data):
        self.wait("inv")
        return data


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("read", [lambda buffer: buffer.sample(2), lambda buffer: buffer[:]], ids=["sample", "index"])
def test_a_transform_on_the_way_out_keeps_no_writer_waiting(make, read):
    transform = Waiting("forward")
    buffer = ReplayBuffer(storage=make(8), transform=transform)
    buffer.extend(plain_tensor([1, 2]))
    batches = []

    def write():
        assert transform.entered.wait(60)
        buffer[:] = plain_tensor([7, 8])
        buffer.add(plain_tensor([9])[0])
        transform.go.set()

    assert together(lambda: batches.append(read(buffer)), write) == []
    assert len(buffer) == 3 and set(batches[0][:, 0].tolist()) <= {1.0, 2.0}


@pytest.mark.parametrize(
    "write",
    [
        lambda buffer: buffer.extend(plain_tensor([3])),
        lambda buffer: buffer.add(plain_tensor([3])[0]),
        lambda buffer: buffer.__setitem__(0, plain_tensor([3])[0]),
    ],
    ids=["extend", "add", "assign"],
)
def test_a_transform_on_the_way_in_keeps_no_reader_waiting(write):
    transform = Waiting("inv")
    storage = LazyTensorStorage(8)
    ReplayBuffer(storage=storage).extend(plain_tensor([1, 2]))
    buffer = ReplayBuffer(storage=storage, transform=transform, writer=RoundRobinWriter)

    def read():
        assert transform.entered.wait(60)
        assert buffer.sample(4).shape == (4, 3)
        transform.go.set()

    assert together(lambda: write(buffer), read) == []


class Slow(RandomSampler):
    """While it is copied or pickled another thread tries to write."""

    buffer = None

    def __getstate__(self):
        if Slow.buffer is not None:
            buffer, Slow.buffer = Slow.buffer, None
            self.writer = threading.Thread(target=lambda: buffer.extend(plain_tensor([8, 9])), daemon=True)
            self.writer.start()
            self.writer.join(0.2)
        return {key: value for key, value in super().__getstate__().items() if key != "writer"}


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_a_copy_is_of_one_moment(copier, make):
    buffer = ReplayBuffer(storage=make(8), sampler=Slow())
    buffer.extend(plain_tensor([1, 2]))
    Slow.buffer = buffer
    twin = copier(buffer)
    buffer.sampler.writer.join(20)
    assert (len(buffer), buffer.write_count) == (4, 4)
    assert (len(twin), twin.write_count, twin.writer.cursor) == (2, 2, 2)
    check_same(twin[:], plain_tensor([1, 2]))
    assert twin.writer.write_count == 2


def test_copies_made_together_keep_sharing_their_storage():
    storage = LazyTensorStorage(8)
    one, two = copy.deepcopy((ReplayBuffer(storage=storage), ReplayBuffer(storage=storage)))
    assert one.storage is two.storage is not storage
    one.extend(plain_tensor([1]))
    assert len(two) == 1 and len(storage) == 0
