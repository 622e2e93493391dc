"""ImmutableDatasetWriter: what it refuses, and what goes on."""

import copy
import pickle

import pytest
import torch

from interop import (
    CompressedListStorage,
    ImmutableDatasetWriter,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.interop.rows import check_same, flat_td, refused

REFUSED = "This dataset doesn't allow writing."


def dataset(kind=ReplayBuffer, **kwargs):
    return kind(storage=TensorStorage(flat_td([0, 1, 2, 3])), writer=ImmutableDatasetWriter(), batch_size=6, **kwargs)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize(
    "write",
    [
        lambda buffer: buffer.add(flat_td([7])[0]),
        lambda buffer: buffer.extend(flat_td([7, 8])),
        lambda buffer: buffer.empty(),
        lambda buffer: buffer.empty(empty_write_count=False),
    ],
)
def test_writing_is_refused_before_anything_changes(kind, write):
    buffer = dataset(kind, sampler=PrioritizedSampler(4, 1.0, 1.0))
    buffer.update_priority([0, 1], [3.0, 2.0])
    with refused(buffer, RuntimeError, REFUSED):
        write(buffer)
    assert len(buffer) == 4 and buffer.write_count == 0
    assert buffer.sampler.priorities.tolist() == [3.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage, LazyStackStorage, CompressedListStorage])
def test_any_storage_can_be_closed(make):
    buffer = ReplayBuffer(storage=make(4))
    buffer.extend(flat_td([1, 2]))
    before = buffer.set_writer(ImmutableDatasetWriter())
    for write in (lambda: buffer.extend(flat_td([3])), lambda: buffer.add(flat_td([3])[0]), buffer.empty):
        with refused(buffer, RuntimeError, REFUSED):
            write()
    assert buffer.sample(3).batch_size == (3,) and len(buffer) == 2
    buffer.set_writer(before)
    buffer.extend(flat_td([3]))
    assert len(buffer) == 3


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_the_data_of_the_caller_stays_as_it_is(kind):
    calls = []

    class Halved(torch.nn.Module):
        def forward(self, data):
            return data

        def inv(self, data):
            calls.append(data)
            data["obs"].div_(2)
            return data

    buffer = dataset(kind, transform=Halved())
    rows = flat_td([8, 9])
    for write, data in ((buffer.extend, rows), (buffer.add, rows[0])):
        with refused(buffer, RuntimeError, REFUSED):
            write(data)
    check_same(rows, flat_td([8, 9]))
    assert calls == []


def test_what_cannot_be_written_anyway_is_refused_too():
    buffer = dataset()
    for data in (None, "text", [], torch.zeros(())):
        with refused(buffer, RuntimeError, REFUSED):
            buffer.extend(data)


def test_no_other_buffer_empties_the_storage():
    buffer = dataset()
    other = ReplayBuffer(storage=buffer.storage, writer=RoundRobinWriter())
    other.add(flat_td([9])[0])
    with refused(other, RuntimeError, REFUSED):
        other.empty()
    assert len(buffer) == 4
    buffer.set_writer(RoundRobinWriter())
    other.empty()
    assert len(buffer) == len(other) == 0


def test_items_can_be_read_and_edited():
    buffer = dataset(TensorDictReplayBuffer)
    batch = buffer.sample()
    check_same(batch["obs"][:, 0], batch["index"].float())
    buffer[0] = flat_td([9])[0]
    buffer[1:3] = flat_td([8, 7])
    buffer.set_("done", torch.ones(4, 1, dtype=torch.bool))
    assert buffer["obs"][:, 0].tolist() == [9.0, 8.0, 7.0, 3.0] and buffer["done"].all()
    assert (len(buffer), buffer.write_count) == (4, 0)


def test_batches_are_drawn_ahead():
    buffer = dataset(TensorDictReplayBuffer, prefetch=2)
    for _ in range(4):
        batch = buffer.sample()
        check_same(batch["obs"][:, 0], batch["index"].float())


def test_the_writer_itself_refuses():
    writer = ImmutableDatasetWriter()
    writer.register_storage(ListStorage(3))
    for call in (lambda: writer.add(1), lambda: writer.extend([1]), writer._empty):
        with pytest.raises(RuntimeError, match=REFUSED):
            call()
    assert writer.write_count == 0 and repr(writer) == "ImmutableDatasetWriter()"


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_refuses_too(copier):
    twin = copier(dataset())
    with refused(twin, RuntimeError, REFUSED):
        twin.extend(flat_td([1]))
    check_same(twin[:], flat_td([0, 1, 2, 3]))
