"""ImmutableDatasetWriter: what it refuses, and what goes on."""

import pytest
import torch

from interop import (
    ImmutableDatasetWriter,
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
