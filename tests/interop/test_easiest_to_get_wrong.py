"""What is easiest to get wrong about replay buffers, a test each."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def rows(count, first=0, **entries):
    return TensorDict({"x": torch.arange(first, first + count), **entries}, [count])


def prioritized(capacity=8, **choices):
    return TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.9, eps=0, storage=LazyTensorStorage(capacity), **choices)


def test_weights_are_relative_to_the_smallest_of_the_buffer_and_not_of_the_batch():
    buffer = prioritized()
    buffer.extend(rows(4))
    buffer.update_priority(torch.arange(4), torch.tensor([1e-6, 4.0, 9, 16]))
    batch = buffer.sample(64)
    assert batch["x"].min() > 0  # the smallest is not in the batch
    stored = torch.tensor([1e-6, 4.0, 9, 16]) ** 0.5
    torch.testing.assert_close(batch["priority_weight"], (stored[batch["x"]] / stored[0]) ** -0.9)
    assert "_weight" not in batch.keys()  # noqa: SIM118


def test_a_new_item_has_the_greatest_raw_priority_raised_to_alpha_once():
    buffer = prioritized()
    buffer.extend(rows(2, td_error=torch.tensor([0.1, 0.2])))
    assert buffer.sampler.default_priority == 1  # the write itself counted as 1
    new = rows(1, td_error=torch.zeros(1))
    buffer.extend(new, update_priority=False)
    torch.testing.assert_close(buffer.sampler.priorities[:3], torch.tensor([0.1, 0.2, 1]))
    buffer.update_priority(0, 16.0)
    assert buffer.sampler.default_priority == 16
    buffer.extend(new, update_priority=False)
    assert buffer.sampler.state.tree.leaves[3] == 4


def test_extend_does_not_reduce_priorities_and_their_update_does():
    buffer = prioritized()
    with pytest.raises(RuntimeError, match="update_priority=False"):
        buffer.extend(rows(2, td_error=torch.ones(2, 3)))
    assert len(buffer) == 0
    buffer.extend(rows(2, td_error=torch.ones(2, 1)))
    batch = buffer.sample(4)
    buffer.update_tensordict_priority(batch.set("td_error", torch.tensor([[1.0, 7, 2]] * 4)))
    assert (buffer.sampler.priorities[batch["index"]] == 7).all()


def test_the_last_batch_of_an_epoch_is_short_and_next_is_none_between_epochs():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=3)
    buffer.extend(torch.arange(10))
    for _ in range(2):
        batches = list(buffer)
        assert [len(batch) for batch in batches] == [3, 3, 3, 1]
        assert torch.cat(batches).sort().values.tolist() == list(range(10))
    stepped = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(drop_last=True), batch_size=3
    )
    stepped.extend(rows(10))
    for _ in range(2):
        assert [None if (batch := stepped.next()) is None else len(batch) for _ in range(4)] == [3, 3, 3, None]


def test_several_item_dims_are_swapped_and_the_capacity_is_rounded_up():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2))
    assert buffer.storage.max_size == 100
    index = buffer.extend(torch.arange(12).reshape(3, 4))
    assert buffer.storage.max_size == 102 and len(buffer) == 12 and buffer.write_count == 4
    assert index.shape == (12, 2) and index[:4].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert buffer.storage[1].tolist() == [1, 5, 9]
    batch, info = buffer.sample(5, return_info=True)
    assert isinstance(info["index"], tuple) and [each.shape for each in info["index"]] == [(5,), (5,)]
    assert torch.equal(buffer.storage[info["index"]], batch)
    third = ReplayBuffer(storage=LazyTensorStorage(24, ndim=3))
    data = torch.arange(24).reshape(2, 3, 4)
    third.extend(data)
    assert torch.equal(third.storage[:], data.transpose(0, 2)) and torch.equal(third[:], data)


def test_a_list_at_the_root_is_a_stack_and_a_tuple_is_a_pytree():
    stacked = ReplayBuffer(storage=LazyTensorStorage(10))
    assert stacked.extend([torch.zeros(3), torch.ones(3)]).tolist() == [0, 1]
    assert stacked[:].shape == (2, 3)
    pytree = ReplayBuffer(storage=LazyTensorStorage(10))
    pytree.extend((torch.zeros(3), torch.ones(3, 2)))
    assert len(pytree) == 3 and isinstance(pytree[:], tuple)
    listed = ReplayBuffer(storage=ListStorage(10), collate_fn=lambda items: items)
    assert listed.extend(range(3)).tolist() == [0, 1, 2] and listed[:] == [0, 1, 2]
    with pytest.raises(TypeError, match="dict"):
        listed.extend({"a": torch.zeros(3)})


def test_what_is_extended_keeps_its_keys_and_what_is_stored_has_an_index():
    buffer, data = TensorDictReplayBuffer(storage=LazyTensorStorage(10)), rows(3)
    buffer.extend(data)
    assert set(data.keys()) == {"x"}
    assert buffer[:]["index"].tolist() == [0, 1, 2]
    batch = buffer.sample(5)
    assert torch.equal(batch["index"], batch["x"])


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
def test_a_slice_is_a_view_and_a_sample_a_copy(make):
    buffer = TensorDictReplayBuffer(storage=make(10), batch_size=4)
    buffer.extend(rows(5))
    buffer[1:3]["x"].fill_(70)
    assert buffer[:]["x"].tolist() == [0, 70, 70, 3, 4]
    buffer.sample()["x"].fill_(-1)
    assert buffer[:]["x"].min() == 0
    buffer[4] = buffer[0]
    assert buffer[:]["x"].tolist() == [0, 70, 70, 3, 0]
    assert len(buffer) == 5 and buffer.extend(rows(1)).tolist() == [5]


def test_the_count_of_writes_is_of_rows_and_has_no_bound():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    buffer.extend(torch.zeros(2, 30))
    assert buffer.write_count == 30 and len(buffer) == 8
    buffer.empty(empty_write_count=False)
    assert buffer.write_count == 30 and len(buffer) == 0
    buffer.empty()
    assert buffer.write_count == 0
