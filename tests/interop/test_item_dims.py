"""Storages of several item dims (ndim), and the dim along which data extends (dim_extend)."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from tests.interop.rows import check_same, refused

LANES, STEPS = 3, 4


def stream(start=0, steps=STEPS, lanes=LANES):
    """[lanes, steps] rows with values 100 * lane + time."""
    values = 100 * torch.arange(lanes)[:, None] + torch.arange(start, start + steps)[None]
    return TensorDict({"x": values, "y": values[..., None].float()}, [lanes, steps])


def values(data):
    return data["x"]


@pytest.fixture(params=[LazyTensorStorage, LazyMemmapStorage])
def make(request):
    return request.param


def test_data_is_stored_by_time_and_read_in_the_layout_of_the_user(make):
    buffer = ReplayBuffer(storage=make(30, ndim=2))
    assert buffer.dim_extend == 1 and buffer.storage.shape is None and buffer.storage.max_size == 30
    index = buffer.extend(stream())
    wanted = torch.tensor([[time, lane] for time in range(STEPS) for lane in range(LANES)])
    check_same(index, wanted)
    assert len(buffer) == 12 and buffer.write_count == 4 and buffer.writer.cursor == 4
    assert buffer.storage.shape == torch.Size([4, 3])
    check_same(buffer[:], stream())
    check_same(buffer.storage[:], stream().transpose(0, 1).clone())
    check_same(buffer.storage[1], stream()[:, 1].clone())


def test_the_capacity_is_rounded_up_to_whole_rows(make):
    buffer = ReplayBuffer(storage=make(100, ndim=2))
    buffer.extend(stream())
    assert buffer.storage.max_size == 102
    buffer.extend(stream(4, 40))
    assert len(buffer) == 102 and buffer.storage.is_full and buffer.storage.shape == torch.Size([34, 3])
    assert buffer.write_count == 44 and buffer.writer.cursor == 10
    check_same(values(buffer[:])[1], 100 + torch.cat([torch.arange(34, 44), torch.arange(10, 34)]))


def test_add_writes_one_row_of_time(make, monkeypatch):
    monkeypatch.setenv("RL_WARNINGS", "0")
    one, two = ReplayBuffer(storage=make(12, ndim=2)), ReplayBuffer(storage=make(12, ndim=2))
    one.extend(stream(steps=6))
    for time, row in enumerate(stream(steps=6).unbind(1)):
        index = two.add(row)
        check_same(index, torch.tensor([[time % 4, lane] for lane in range(LANES)]))
    check_same(two[:], one[:])
    assert two.write_count == 6 and len(two) == 12


def test_samples_are_single_items_under_coordinates(make):
    buffer = ReplayBuffer(storage=make(30, ndim=2))
    buffer.extend(stream())
    batch, info = buffer.sample(40, return_info=True)
    time, lane = info["index"]
    assert isinstance(info["index"], tuple) and time.dtype == lane.dtype == torch.int64 and time.shape == (40,)
    assert batch.batch_size == (40,)
    check_same(values(batch), 100 * lane + time)
    assert set(time.tolist()) == set(range(4)) and set(lane.tolist()) == {0, 1, 2}
    check_same(buffer.storage[info["index"]], batch)


@pytest.mark.parametrize(
    "index", [slice(0, 2), slice(None, None, 2), [2, 0], torch.tensor([1]), torch.tensor([True, False, True])], ids=repr
)
def test_an_index_goes_along_the_first_dim_of_the_user(make, index):
    buffer = ReplayBuffer(storage=make(30, ndim=2))
    buffer.extend(stream())
    check_same(buffer[index], stream()[index].clone())


def test_three_item_dims_swap_the_first_and_the_last(make):
    data = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    buffer = ReplayBuffer(storage=make(100, ndim=3))
    index = buffer.extend(data)
    assert buffer.dim_extend == 2 and index.shape == (24, 3)
    assert buffer.storage.shape == torch.Size([4, 3, 2]) and buffer.storage.max_size == 102
    check_same(buffer.storage[:], data.transpose(0, 2).clone())
    check_same(buffer[:], data)
    batch, info = buffer.sample(30, return_info=True)
    assert len(info["index"]) == 3
    check_same(batch, data.transpose(0, 2)[info["index"]])
    check_same(index[:7], torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0]]))


def test_the_dim_that_extends_is_fixed():
    buffer = ReplayBuffer(storage=LazyTensorStorage(30, ndim=2))
    buffer.dim_extend = 1
    with refused(buffer, RuntimeError):
        buffer.dim_extend = 0
    assert buffer.dim_extend == 1
    with pytest.raises(ValueError):
        ReplayBuffer(storage=LazyTensorStorage(30, ndim=2), dim_extend=-1)


def test_other_lanes_are_refused(make):
    buffer = ReplayBuffer(storage=make(30, ndim=2))
    buffer.extend(stream())
    for lanes in (1, 2, 4):
        with refused(buffer, RuntimeError):
            buffer.extend(stream(lanes=lanes))
        with refused(buffer, RuntimeError), pytest.MonkeyPatch.context() as patch:
            patch.setenv("RL_WARNINGS", "0")
            buffer.add(stream(lanes=lanes)[:, 0])


def test_data_of_too_few_dims_is_refused(make):
    buffer = ReplayBuffer(storage=make(30, ndim=2))
    with pytest.raises(RuntimeError, match="dims"):
        buffer.extend(torch.zeros(4))
    assert len(buffer) == 0 and buffer.write_count == 0 and not buffer.storage.initialized
    buffer.extend(stream())
    with refused(buffer, RuntimeError, "dims"):
        buffer.extend(stream()[0])


def test_priorities_by_coordinates(make):
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=make(24, ndim=2))
    buffer.extend(stream(steps=8))
    check_same(buffer.sampler.priorities, torch.ones(24))
    buffer.update_priority(torch.tensor([[t, lane] for t in range(8) for lane in range(3)]), torch.zeros(24))
    buffer.update_priority((torch.tensor([5, 2]), torch.tensor([1, 0])), torch.tensor([1.0, 3.0]))
    batch, info = buffer.sample(64, return_info=True)
    assert set(values(batch).tolist()) == {105, 2}
    check_same(values(batch), 100 * info["index"][1] + info["index"][0])
    torch.testing.assert_close(info["priority_weight"], torch.where(values(batch) == 2, 1 / 3, 1.0))


@pytest.mark.parametrize("shape", [(3, 8), (3, 8, 1)])
def test_extend_takes_priorities_in_the_layout_of_the_user(shape):
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(24, ndim=2))
    given = torch.arange(24.0).reshape(3, 8)
    buffer.extend(stream(steps=8).set("td_error", given.reshape(shape)))
    check_same(buffer.sampler.priorities, given.t().reshape(-1))


def test_add_takes_a_priority_for_each_lane(monkeypatch):
    monkeypatch.setenv("RL_WARNINGS", "0")
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(24, ndim=2))
    buffer.add(stream()[:, 0].set("td_error", torch.tensor([1.0, 2.0, 3.0])))
    check_same(buffer.sampler.priorities, torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("index", [[[8, 0]], [[0, 3]], [[-1, 0]], [[0, -2]]])
def test_coordinates_out_of_range_are_refused(index):
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(30, ndim=2))
    buffer.extend(stream(steps=8))
    with refused(buffer, IndexError):
        buffer.update_priority(torch.tensor(index), 5.0)
