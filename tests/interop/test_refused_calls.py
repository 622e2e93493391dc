"""Calls that are refused: before anything is written or drawn, with what to do about it."""

import gc
import weakref

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorStorage,
    TensorStorageCheckpointer,
)
from tests.interop.rows import flat_td, plain_tensor, refused


def tensordicts(storage=LazyTensorStorage, **kwargs):
    return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage(8), **kwargs)


# ------------------------------------------------------------------ priorities


BAD = {
    "too large for the dtype": torch.tensor([1e300, 1.0], dtype=torch.float64),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1j, 1j]),
    "text": "text",
    "tensordict": TensorDict({"x": torch.ones(2)}, [2]),
    "too many": torch.ones(2, 3),
    "none": torch.ones(2, 0),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_priorities_that_cannot_be_used_refuse_the_rows(bad, storage):
    buffer = tensordicts(storage)
    rows = flat_td([0, 1]).set("td_error", BAD[bad])
    with refused(buffer, RuntimeError, "update_priority=False"):
        buffer.extend(rows)
    if bad != "too many":  # several values of one item are reduced
        with refused(buffer, RuntimeError, "cannot be used"):
            buffer.add(rows[0])
    if storage is ListStorage:
        buffer.extend(rows, update_priority=False)
        assert len(buffer) == 2


# ------------------------------------------------------------------ draws


@pytest.mark.parametrize("generator", [None, 3])
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_refused_draw_leaves_the_generator_alone(generator, prefetch, storage):
    generator = None if generator is None else torch.Generator().manual_seed(generator)
    sampler = PrioritizedSampler(8, 0.6, 0.4, eps=0)
    buffer = ReplayBuffer(storage=storage(8), sampler=sampler, generator=generator, batch_size=2, prefetch=prefetch)
    with refused(buffer, RuntimeError, "empty"):
        buffer.sample()
    buffer.extend(plain_tensor([0, 1]))
    buffer.update_priority(torch.arange(2), 0.0)
    with refused(buffer, RuntimeError, "p_sum"):
        buffer.sample()
    buffer.update_priority(torch.arange(2), 1.0)
    assert buffer.sample().shape == (2, 3)


def test_a_sampler_that_names_what_is_not_stored_leaves_the_generator_alone():
    class Beyond(RandomSampler):
        def sample(self, storage, batch_size):
            return super().sample(storage, batch_size)[0] + 10, {}

    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=Beyond())
    buffer.extend(plain_tensor([0, 1]))
    with refused(buffer, IndexError):
        buffer.sample(3)


# ------------------------------------------------------------------ components


@pytest.mark.parametrize(
    "bad",
    [{"generator": 42}, {"collate_fn": 3}, {"dim_extend": 1.5}, {"dim_extend": True}, {"generator": "seed"}],
    ids=repr,
)
def test_arguments_of_the_wrong_kind_are_refused(bad):
    with pytest.raises(TypeError, match=next(iter(bad))):
        ReplayBuffer(**bad)


def test_a_refused_constructor_leaves_the_storage_alone():
    storage = LazyTensorStorage(10)
    storage.checkpointer = mine = TensorStorageCheckpointer()
    for bad in ({"sampler": PrioritizedSampler(5, 1.0, 1.0)}, {"writer": 5}, {"transform": 5}):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            ReplayBuffer(storage=storage, **bad)
        assert storage.checkpointer is mine and storage.attached() == []


def test_making_components_late_is_tried_again():
    tries = []

    def flaky():
        tries.append(1)
        if len(tries) == 1:
            raise OSError("disk")
        return LazyTensorStorage(4)

    buffer = ReplayBuffer(storage=flaky, delayed_init=True)
    with pytest.raises(OSError, match="disk"):
        len(buffer)
    assert not buffer.initialized
    buffer.extend(plain_tensor([1]))
    assert len(buffer) == 1 and buffer.initialized and len(tries) == 2


# ------------------------------------------------------------------ one storage, several buffers


@pytest.mark.parametrize("storage", [LazyTensorStorage(4), LazyMemmapStorage(4), TensorStorage(torch.zeros(4))])
def test_a_storage_keeps_no_buffer_alive(storage):
    buffer = ReplayBuffer(storage=storage, prefetch=1, batch_size=1)
    gone = weakref.ref(buffer)
    assert storage.attached() == [buffer]
    del buffer
    gc.collect()
    assert gone() is None and storage.attached() == []
