"""What belongs to whom: the caller's data, the storage, samples, copies of a buffer."""

import copy
import pickle

import pytest
import torch

from interop import LazyTensorStorage, ListStorage, ReplayBuffer
from tests.interop.rows import KINDS, STORAGES, check_same, flat_td, plain_tensor, state_of, tensors_of


@pytest.fixture(params=STORAGES)
def storage(request):
    return STORAGES[request.param]


@pytest.fixture(params=KINDS)
def rows(request):
    return KINDS[request.param]


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_a_copy_goes_on_alike_and_apart(copier, make):
    buffer = ReplayBuffer(storage=make(6), batch_size=4, generator=torch.Generator().manual_seed(0))
    buffer.extend(flat_td([0, 1, 2, 3]))
    buffer.sample()
    twin = copier(buffer)
    check_same(twin.storage[:], buffer.storage[:])
    assert (len(twin), twin.write_count, twin.writer.cursor, twin.batch_size) == (4, 4, 4, 4)
    check_same(twin.sample(), buffer.sample())
    kept = state_of(buffer)
    twin.extend(flat_td([8, 9, 10, 11]))
    check_same(state_of(buffer), {**kept, "generator": buffer.generator.get_state()})
    assert len(twin) == 6 and len(buffer) == 4


def test_what_the_caller_holds_is_not_the_storage(storage, rows):
    buffer = ReplayBuffer(storage=storage(6))
    given = rows([1, 2, 3])
    buffer.extend(given)
    for leaf in tensors_of(given):
        leaf.zero_()
    check_same(buffer[:], rows([1, 2, 3]))


def test_samples_can_be_edited_freely(storage, rows):
    buffer = ReplayBuffer(storage=storage(6))
    buffer.extend(rows([1, 2, 3]))
    batch, info = buffer.sample(5, return_info=True)
    for leaf in [*tensors_of(batch), info["index"]]:
        leaf.zero_()
    assert all(not leaf.any() for leaf in tensors_of(batch))
    check_same(buffer[:], rows([1, 2, 3]))
    check_same(buffer.extend(rows([4])), torch.tensor([3]))


def test_the_tensors_of_a_sample_are_apart_from_each_other():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    same = plain_tensor([1, 2])
    buffer.extend({"a": same, "b": same})
    batch = buffer.sample(3)
    batch["a"].zero_()
    assert batch["b"].all()
