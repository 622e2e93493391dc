"""LazyTensorStorage: memory allocated at the first write."""

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer
from tests.interop.rows import KINDS, check_same, first_of, nested_td, plain_tensor, tensors_of


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "trajectories"])
def test_add_and_extend_allocate_the_same(kind):
    rows = KINDS[kind]
    one, two = ReplayBuffer(storage=LazyTensorStorage(4)), ReplayBuffer(storage=LazyTensorStorage(4))
    one.extend(rows([3]))
    two.add(first_of(rows([3])))
    check_same(two[:], one[:])
    one.extend(rows([4, 5]))
    two.extend(rows([4, 5]))
    check_same(two[:], one[:])


def test_the_first_write_that_is_refused_fixes_nothing():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises((RuntimeError, ValueError)):
        buffer.extend({"a": torch.zeros(3), "b": torch.zeros(2)})
    assert not buffer.storage.initialized and len(buffer) == 0 and buffer.write_count == 0
    buffer.extend({"c": torch.ones(3)})
    check_same(buffer[:], {"c": torch.ones(3)})


def test_consolidated_tensordicts_share_one_piece_of_memory():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4, consolidated=True))
    buffer.extend(nested_td([0, 1, 2]))
    buffer.extend(nested_td([3, 4]))
    check_same(buffer[:], nested_td([4, 1, 2, 3]))
    assert len({leaf.untyped_storage().data_ptr() for leaf in tensors_of(buffer[:])}) == 1
    batch, info = buffer.sample(6, return_info=True)
    check_same(batch, nested_td(torch.tensor([4, 1, 2, 3])[info["index"]]))
    buffer = ReplayBuffer(storage=LazyTensorStorage(4, consolidated=True))
    with pytest.raises(ValueError):
        buffer.extend(plain_tensor([1, 2]))
    assert len(buffer) == 0 and buffer.write_count == 0


@pytest.mark.parametrize("size", [0, -5, 2.5, "5", True, None])
def test_a_capacity_that_is_no_int_above_zero_is_refused(size):
    with pytest.raises((TypeError, ValueError)):
        LazyTensorStorage(size)


def test_a_partly_filled_full_and_emptied_storage_tells_its_shape():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(plain_tensor([0, 1]))
    assert buffer.storage.shape == torch.Size([2]) and not buffer.storage.is_full
    buffer.extend(plain_tensor([0, 1, 2]))
    assert buffer.storage.shape == torch.Size([4]) and buffer.storage.is_full
    memory = buffer.storage[:].data_ptr()
    buffer.empty()
    assert buffer.storage.shape == torch.Size([0]) and buffer.storage.initialized
    buffer.extend(plain_tensor([5, 6]))
    assert buffer.storage[:].data_ptr() == memory


def test_the_batch_size_of_nested_tensordicts_is_kept():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    inner = TensorDict({"x": torch.zeros(3, 4, 2)}, [3, 4])
    buffer.extend(TensorDict({"inner": inner, "y": torch.zeros(3)}, [3]))
    assert buffer[:]["inner"].batch_size == (3, 4)
    assert buffer.sample(6)["inner"].batch_size == (6, 4)
    assert buffer[0]["inner"].batch_size == (4,)
