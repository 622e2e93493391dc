"""RoundRobinWriter and TensorDictRoundRobinWriter."""

import copy
import pickle

import pytest
import torch

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
    TensorStorage,
    Writer,
)
from tests.interop.rows import check_same, dicts, flat_td, plain_tensor, steps, trajectories


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
    assert writer._cursor == 2 and writer.write_count == 7
    assert writer.add(flat_td([7])[0]) == 2


def test_what_the_storage_remembers_as_last_written():
    storage = LazyTensorStorage(5)
    writer = writing(storage=storage)
    writer.extend(plain_tensor([0, 1, 2]))
    assert torch.as_tensor(storage._last_cursor).reshape(-1)[-1] == 2
    writer.add(plain_tensor([3])[0])
    assert torch.as_tensor(storage._last_cursor).reshape(-1)[-1] == 3
    writer.extend(plain_tensor([4, 5, 6]))
    assert torch.as_tensor(storage._last_cursor).reshape(-1)[-1] == 1
    storage[0] = plain_tensor([9])[0]
    assert torch.as_tensor(storage._last_cursor).reshape(-1)[-1] == 1


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
    assert writer._cursor == 2 and writer.write_count == 2 and len(storage) == 2


def test_emptying_resets_the_count_only_when_asked():
    writer = writing()
    writer.extend(plain_tensor([0, 1]))
    writer._empty(empty_write_count=False)
    assert writer._cursor == 0 and writer.write_count == 2
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


def test_of_more_rows_than_slots_the_row_numbers_stay_right():
    storage = LazyTensorStorage(5)
    writing(TensorDictRoundRobinWriter, storage).extend(flat_td(list(range(13))))
    check_same(storage[:]["index"], torch.arange(5))
    check_same(storage[:]["obs"][:, 0], torch.tensor([10.0, 11.0, 12.0, 8.0, 9.0]))


@pytest.mark.parametrize("rows", [steps, dicts, plain_tensor])
def test_other_data_is_left_alone(rows):
    storage = LazyTensorStorage(5)
    writing(TensorDictRoundRobinWriter, storage).extend(rows([0, 1]))
    check_same(storage[:], rows([0, 1]))


def test_a_list_of_tensordicts_gets_row_numbers():
    for storage in (LazyTensorStorage(5), ListStorage(5)):
        buffer = ReplayBuffer(storage=storage, writer=TensorDictRoundRobinWriter())
        buffer.extend([flat_td([3])[0], flat_td([4])[0]])
        check_same(buffer[:]["index"], torch.arange(2))
        check_same(buffer[:].exclude("index"), flat_td([3, 4]))


def test_the_data_of_a_plain_buffer_receives_the_row_number():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), writer=TensorDictRoundRobinWriter())
    given = flat_td([0, 1])
    buffer.extend(given)
    check_same(given["index"], torch.arange(2))


def test_a_write_to_a_given_storage_starts_at_its_first_row():
    storage = TensorStorage(plain_tensor([0, 1, 2]))
    writer = writing(storage=storage)
    check_same(writer.extend(plain_tensor([7, 8])), torch.arange(2))
    check_same(storage[:], plain_tensor([7, 8, 2]))


def test_counts_go_past_two_to_the_thirty_one():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.storage.ring.count = 2**31 - 2
    buffer.extend(plain_tensor([0, 1, 2]))
    buffer.add(plain_tensor([3])[0])
    assert buffer.write_count == 2**31 + 2 and len(buffer) == 4
    buffer.storage.ring.count = 2**62
    buffer.extend(plain_tensor([0, 1, 2]))
    assert buffer.write_count == 2**62 + 3 and pickle.loads(pickle.dumps(buffer)).write_count == 2**62 + 3
    assert buffer.sample(4).shape == (4, 3)


def test_cursor_and_length_go_past_two_to_the_thirty_one():
    storage = LazyMemmapStorage(2**31 + 10)
    buffer = ReplayBuffer(storage=storage)
    buffer.writer._cursor = 2**31 - 1
    check_same(buffer.extend(torch.tensor([1, 2, 3], dtype=torch.uint8)), torch.arange(2**31 - 1, 2**31 + 2))
    assert buffer.writer._cursor == 2**31 + 2 and len(buffer) == 2**31 + 2
    check_same(buffer[2**31 - 1 :], torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert buffer.add(torch.tensor(4, dtype=torch.uint8)) == 2**31 + 2
    assert int(buffer[-1]) == 4 and int(buffer[2**31]) == 2


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda writer: pickle.loads(pickle.dumps(writer))])
@pytest.mark.parametrize("compilable", [False, True])
def test_copies_count_on_their_own(copier, compilable):
    writer = RoundRobinWriter(compilable=compilable)
    writer.register_storage(LazyTensorStorage(5))
    writer.extend(plain_tensor([0, 1]))
    twin = copier(writer)
    assert twin._cursor == 2 and twin.write_count == 2
    twin.extend(plain_tensor([0]))
    assert twin.write_count == 3 and writer.write_count == 2 and writer._cursor == 2
    twin.register_storage(LazyTensorStorage(5))
    assert (twin.write_count, twin._cursor) == (0, 0)


def test_the_representation_shows_cursor_and_fullness():
    writer = RoundRobinWriter()
    assert repr(writer) == "RoundRobinWriter(cursor=0, full_storage=False)"
    writer.register_storage(LazyTensorStorage(2))
    writer.extend(plain_tensor([0, 1, 2]))
    assert repr(writer) == "RoundRobinWriter(cursor=1, full_storage=True)"


def test_a_writer_needs_add_and_extend():
    with pytest.raises(TypeError):
        Writer()
