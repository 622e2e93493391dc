"""Transforms: functions on the way out, and on the way in where they are inverted."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    Compose,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

each_storage = pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage, ListStorage])


@each_storage
@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
def test_an_inverted_transform_runs_when_writing(buffer, storage):
    rb = buffer(storage=storage(10), batch_size=4)
    data = TensorDict({"a": torch.zeros(10)}, [10])

    def t(data):
        data += 1
        return data

    assert rb.append_transform(t, invert=True) is rb
    rb.extend(data)
    assert (data == 1).all()
    assert rb[:]["a"].tolist() == [1] * 10
    assert rb.sample()["a"].tolist() == [1] * 4
    assert rb[:]["a"].tolist() == [1] * 10  # reading runs the other direction, which does nothing


@each_storage
def test_a_function_runs_when_reading_and_leaves_the_storage_alone(storage):
    rb = ReplayBuffer(storage=storage(10), batch_size=4)
    rb.extend(TensorDict({"a": torch.zeros(10)}, [10]))

    def t(data):
        data["a"] += 1
        return data

    rb.append_transform(t)
    for _ in range(2):
        assert rb[:]["a"].tolist() == [1] * 10
        assert rb[0]["a"] == 1
        assert rb[2:4]["a"].tolist() == [1, 1]
        assert rb[[0, 1]]["a"].tolist() == [1, 1]
        assert rb.sample()["a"].tolist() == [1] * 4


def test_transforms_are_executed_in_order_when_sample_is_called():
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=lambda data: data + 1, batch_size=3)
    rb.append_transform(lambda data: data * 10)
    rb.insert_transform(0, lambda data: data - 5)
    rb.extend(torch.zeros(10))
    assert isinstance(rb.transform, Compose) and len(rb.transform) == 3
    assert rb.sample().tolist() == [-40] * 3
    assert rb[0] == -40
    assert rb.storage[0] == 0


def test_a_module_with_an_inverse_runs_both_ways():
    class Scale(torch.nn.Module):
        def forward(self, data):
            return data * 10

        def inv(self, data):
            return data / 10

    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=Scale())
    rb.extend(torch.full((4,), 20.0))
    assert rb.storage[0:4].tolist() == [2] * 4
    assert rb[:].tolist() == [20] * 4
    rb[1] = torch.tensor(50.0)
    assert rb.storage[1] == 5
    assert rb[1] == 50
