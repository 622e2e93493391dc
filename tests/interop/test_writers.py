"""RoundRobinWriter and TensorDictRoundRobinWriter."""

import pytest
import torch

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
)
from tests.interop.rows import check_same, flat_td, plain_tensor, trajectories


def writing(kind=RoundRobinWriter, storage=None, **kwargs):
    writer = kind(**kwargs)
    writer.register_storage(LazyTensorStorage(5) if storage is None else storage)
    return writer


@pytest.mark.parametrize("compilable", [False, True])
@pytest.mark.parametrize("kind", [RoundRobinWriter, TensorDictRoundRobinWriter])
def test_slots_follow_each_other_around_the_ring(kind, compilable):
    writer = writing(kind, compilable=compilable)
    check_same(writer.extend(flat_td([0, 1, 2])), torch.arange(3))
    assert writer.add(flat_td([3])[0]) == 3
    check_same(writer.extend(flat_td([4, 5, 6])), torch.tensor([4, 0, 1]))
    assert writer.cursor == 2 and writer.write_count == 7
    assert writer.add(flat_td([7])[0]) == 2


def test_an_empty_batch_is_refused_by_the_plain_writer_alone():
    with pytest.raises(RuntimeError, match="at least one element"):
        writing().extend(plain_tensor([]))
    with pytest.raises(RuntimeError, match="at least one element"):
        writing().extend([])
    index = writing(TensorDictRoundRobinWriter).extend(flat_td([]))
    assert index.shape == (0,) and index.dtype == torch.int64


def test_a_refused_write_moves_nothing():
    storage = LazyTensorStorage(5)
    writer = writing(storage=storage)
    writer.extend(plain_tensor([0, 1]))
    for call, data in ((writer.extend, torch.zeros(2, 4)), (writer.add, torch.zeros(4)), (writer.add, "text")):
        with pytest.raises((RuntimeError, TypeError)):
            call(data)
    assert writer.cursor == 2 and writer.write_count == 2 and len(storage) == 2


def test_emptying_resets_the_count_only_when_asked():
    writer = writing()
    writer.extend(plain_tensor([0, 1]))
    writer._empty(empty_write_count=False)
    assert writer.cursor == 0 and writer.write_count == 2
    writer._empty()
    assert writer.write_count == 0


def test_the_row_number_is_stored_beside_tensordicts():
    storage = LazyTensorStorage(5)
    writer = writing(TensorDictRoundRobinWriter, storage)
    writer.extend(trajectories([0, 1, 2]))
    writer.add(trajectories([3])[0])
    writer.extend(trajectories([4, 5]))
    wanted = torch.arange(5)[:, None].expand(5, 4)
    check_same(storage[:]["index"], wanted)
    assert storage[:]["index"].dtype == torch.int64


def test_cursor_and_length_go_past_two_to_the_thirty_one():
    storage = LazyMemmapStorage(2**31 + 10)
    buffer = ReplayBuffer(storage=storage)
    buffer.writer.cursor = 2**31 - 1
    check_same(buffer.extend(torch.tensor([1, 2, 3], dtype=torch.uint8)), torch.arange(2**31 - 1, 2**31 + 2))
    assert buffer.writer.cursor == 2**31 + 2 and len(buffer) == 2**31 + 2
    check_same(buffer[2**31 - 1 :], torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert buffer.add(torch.tensor(4, dtype=torch.uint8)) == 2**31 + 2
    assert int(buffer[-1]) == 4 and int(buffer[2**31]) == 2
