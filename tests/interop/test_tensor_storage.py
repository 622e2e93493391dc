"""TensorStorage: what can be stored, how it is indexed, views and copies."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer, TensorStorage
from tests.interop.rows import (
    KINDS,
    STORAGES,
    check_same,
    dicts,
    nested_td,
    plain_tensor,
    refused,
    tensors_of,
)

INDICES = {
    "list": [2, 0],
    "array": np.array([3, 3, 1]),
    "tensor": torch.tensor([1, 2]),
    "negative": torch.tensor([-1, 0]),
    "mask": torch.tensor([True, False, True, True]),
    "two dims": torch.tensor([[0, 1], [2, 3]]),
    "tuple of one": (torch.tensor([1, 3]),),
}


def as_index(index):
    index = index[0] if isinstance(index, tuple) else index
    return list(index) if isinstance(index, range) else index


FEW = ("tensor", "nested tensordict", "dict")  # kinds of one leaf, of several, and of no tensordict


@pytest.fixture(params=STORAGES)
def storage(request):
    return STORAGES[request.param]


@pytest.mark.parametrize("kind", KINDS)
def test_given_memory_is_full(kind):
    rows = KINDS[kind]
    storage = TensorStorage(rows([1, 2, 3]))
    assert storage.initialized and len(storage) == storage.max_size == 3 and storage.is_full
    assert storage.shape == torch.Size([3])
    check_same(storage[:], rows([1, 2, 3]))
    check_same(storage.get(torch.tensor([2, 0])), rows([3, 1]))


def test_memory_or_a_size_is_needed_and_they_must_agree():
    with pytest.raises(ValueError):
        TensorStorage(None)
    with pytest.raises(ValueError, match="4"):
        TensorStorage(torch.zeros(3), max_size=4)
    assert TensorStorage(torch.zeros(3), max_size=3).max_size == 3
    with pytest.raises(ValueError):
        TensorStorage(torch.zeros(1).expand(5))
    with pytest.raises(ValueError):
        TensorStorage(torch.zeros(3), ndim=0)
    with pytest.raises(RuntimeError):
        TensorStorage({"a": torch.zeros(3), "b": torch.zeros(4)})


def test_a_storage_without_memory_cannot_be_written():
    storage = TensorStorage(None, max_size=3)
    assert not storage.initialized and len(storage) == 0
    with pytest.raises((RuntimeError, NotImplementedError)):
        storage.set(0, torch.zeros(2))
    assert not storage.initialized and len(storage) == 0


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("index", INDICES)
def test_arrays_and_masks_give_copies(storage, kind, index):
    rows, index = KINDS[kind], INDICES[index]
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(rows([10, 11, 12, 13]))
    got = buffer[index]
    ids = torch.arange(10, 14)[as_index(index)]
    wanted = rows(ids.reshape(-1))
    for one, other in zip(tensors_of(got), tensors_of(wanted), strict=True):
        check_same(one, other.reshape(*ids.shape, *other.shape[1:]))
    for leaf in tensors_of(got):
        leaf.zero_()
    check_same(buffer[:], rows([10, 11, 12, 13]))


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize(
    ("index", "ids"),
    [(slice(None), [0, 1, 2, 3]), (slice(1, 3), [1, 2]), (slice(None, None, 2), [0, 2]), (slice(-2, None), [2, 3])],
    ids=str,
)
def test_slices_give_views(storage, kind, index, ids):
    rows = KINDS[kind]
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(rows([0, 1, 2, 3]))
    got = buffer[index]
    check_same(got, rows(ids))
    for leaf in tensors_of(got):
        leaf.zero_()
    check_same(buffer[index], rows([0] * len(ids)))


@pytest.mark.parametrize("index", [1, -3, np.int64(1), (1,), torch.tensor(1)], ids=repr)
def test_ints_give_views_of_one_item(storage, index):
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(nested_td([0, 1, 2, 3]))
    got = buffer[index]
    check_same(got, nested_td([1])[0])
    got["obs"].fill_(8)
    check_same(buffer[1]["obs"], torch.full((3,), 8.0, dtype=torch.float64))


def test_keys_name_entries_of_all_rows(storage):
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(nested_td([0, 1]))
    check_same(buffer["obs"], nested_td([0, 1])["obs"])
    check_same(buffer["next", "reward"], torch.tensor([0.0, 1.0]))
    check_same(buffer["next"], nested_td([0, 1])["next"])
    with refused(buffer, KeyError):
        buffer["nothing"]


@pytest.mark.parametrize(
    "index", [4, -5, 5, [0, 4], torch.tensor([-5]), np.array([4]), torch.tensor([True] * 6)], ids=repr
)
def test_an_index_out_of_the_filled_part_is_refused(storage, index):
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(plain_tensor([0, 1, 2, 3]))
    with refused(buffer, IndexError):
        buffer[index]


@pytest.mark.parametrize("index", [1.0, torch.tensor([1.0]), np.array([0.5]), None.__class__], ids=repr)
def test_an_index_that_is_none_is_refused(storage, index):
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(plain_tensor([0, 1, 2, 3]))
    with refused(buffer, TypeError):
        buffer[index]


def test_containment_and_shape():
    storage = LazyTensorStorage(5)
    assert storage.shape is None and not storage.initialized
    storage.set(slice(0, 3), plain_tensor([0, 1, 2]))
    assert storage.shape == torch.Size([3]) and storage.initialized and storage.flatten() is storage
    assert 2 in storage and -3 in storage and 3 not in storage
    check_same(storage.contains(torch.tensor([0, 3, -3, -4])), torch.tensor([True, False, True, False]))
    with pytest.raises(NotImplementedError):
        storage.contains("a")


def test_reading_before_the_first_write_is_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    for read in (lambda: buffer[0], lambda: buffer[:], lambda: buffer["a"], lambda: buffer.storage.flatten()):
        with refused(buffer, RuntimeError, "non-initialized"):
            read()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                                   torch.half, torch.bfloat16, torch.float32, torch.float64, torch.complex64])  # fmt: skip
def test_every_dtype_is_kept_exactly(storage, dtype):
    buffer = ReplayBuffer(storage=storage(6))
    rows = torch.tensor([[0, 1], [1, 1], [1, 0]]).to(dtype)
    if dtype is torch.int64:
        rows = rows * (2**62 + 1)
    if dtype is torch.float64:
        rows = rows * (1 + 2.0**-50)
    buffer.extend(rows)
    batch, info = buffer.sample(8, return_info=True)
    check_same(batch, rows[info["index"]])
    check_same(buffer[:], rows)


def test_a_list_is_a_stack_of_items_and_a_tuple_a_pytree(storage):
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend([dicts([step])["x"][0] for step in range(3)])
    check_same(buffer[:], dicts([0, 1, 2])["x"])
    pytrees = ReplayBuffer(storage=storage(6))
    pytrees.extend((torch.zeros(3), torch.ones(3, 2)))
    assert len(pytrees) == 3 and isinstance(pytrees[:], tuple)


def test_the_representation_shows_data_shape_and_sizes():
    storage = LazyTensorStorage(5)
    assert "data=<empty>" in repr(storage) and "max_size=5" in repr(storage)
    storage.set(slice(0, 2), TensorDict({"alpha": torch.zeros(2)}, [2]))
    for part in ("LazyTensorStorage(", "alpha", "shape=torch.Size([2])", "len=2", "max_size=5"):
        assert part in repr(storage)
