"""What slice samplers refuse: the kind of error, what it says, and that nothing has changed."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.interop.rows import refused


def prioritized(**choices):
    return PrioritizedSliceSampler(8, 1.0, 1.0, **choices)


MAKERS = {"slices": SliceSampler, "epochs": SliceSamplerWithoutReplacement, "priorities": prioritized}
of_each_kind = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def rows(count=8, **entries):
    data = TensorDict({"x": torch.arange(count), "next": TensorDict({}, [count])}, [count])
    for key, value in entries.items():
        data[("next", "done") if key == "done" else key] = value
    return data


def buffer_of(sampler, data, storage=LazyTensorStorage, kind=TensorDictReplayBuffer):
    buffer = kind(storage=storage(8), sampler=sampler)
    buffer.extend(data)
    return buffer


@of_each_kind
@pytest.mark.parametrize(
    ("choices", "data", "error", "match"),
    [
        ({}, rows(), RuntimeError, r"Could not get a tensordict.*'done'.*Give traj_key.*or end_key"),
        ({"traj_key": "id"}, rows(), RuntimeError, r"'id'.*'done'.*is stored.*Give traj_key"),
        ({"end_key": "over"}, rows(done=torch.ones(8, dtype=torch.bool)), RuntimeError, r"none of \['over'\]"),
        ({"end_keys": ["a", "b"]}, rows(), RuntimeError, r"none of \['a', 'b'\]"),
        (
            {"traj_key": "id"},
            rows(id=torch.zeros(8, 1, dtype=torch.int64)),
            RuntimeError,
            "1-dimensional storage",
        ),
        ({"traj_key": "id"}, rows(id=torch.zeros(8)), TypeError, "'id' must be integers, got torch.float32"),
        ({}, rows(done=torch.zeros(8)), TypeError, "must be bool, got torch.float32"),
        ({}, rows(done=torch.zeros(8, 2, dtype=torch.bool)), RuntimeError, r"one bool.*have shape \[2\]"),
        ({"traj_key": "next"}, rows(done=torch.zeros(8, dtype=torch.float64)), TypeError, "must be bool"),
    ],
)
def test_markers(make, choices, data, error, match):
    buffer = buffer_of(make(slice_len=2, **choices), data)
    with refused(buffer, error, match):
        buffer.sample(4)


@of_each_kind
def test_tensors_without_names(make):
    buffer = buffer_of(make(slice_len=1), torch.arange(3), kind=ReplayBuffer)
    with refused(
        buffer, RuntimeError, "Could not get a tensordict out of the storage.*stored in this LazyTensorStorage"
    ):
        buffer.sample(1)


@of_each_kind
def test_an_empty_storage(make):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=make(slice_len=1))
    with refused(buffer, RuntimeError, "Cannot sample from an empty storage"):
        buffer.sample(1)


@of_each_kind
@pytest.mark.parametrize(
    ("choices", "size", "error", "match"),
    [
        ({"num_slices": 3}, 8, RuntimeError, "batch_size=8 is not a multiple of num_slices=3"),
        ({"num_slices": 9}, 8, RuntimeError, "batch_size=8 is not a multiple of num_slices=9"),
        ({"slice_len": 3}, 8, RuntimeError, "batch_size=8 is not a multiple of slice_len=3"),
    ],
)
def test_batches_that_are_not_made_of_slices(make, choices, size, error, match):
    buffer = buffer_of(make(**choices), rows(done=torch.ones(8, dtype=torch.bool)))
    with refused(buffer, error, match):
        buffer.sample(size)


@pytest.mark.parametrize("make", [SliceSampler, prioritized])
def test_trajectories_that_are_too_short(make):
    done = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
    buffer = buffer_of(make(slice_len=4), rows(done=done))
    message = "no stored trajectory is long enough: their lengths are 1 to 3, slices need 4.*strict_length=False"
    for size in (4, 8, 400):
        with refused(buffer, RuntimeError, message):
            buffer.sample(size)
    buffer = buffer_of(make(slice_len=4, strict_length=False), rows(done=done))
    assert len(buffer.sample(400)) < 400


@of_each_kind
def test_given_boundaries_of_other_data(make):
    ends = torch.arange(8) == 7
    cached = {} if make is SliceSamplerWithoutReplacement else {"cache_values": True}
    short = buffer_of(make(slice_len=2, ends=ends, **cached), rows(5))
    with refused(short, RuntimeError, "are of 8 items of one dim, 5 of 1 dims are stored"):
        short.sample(4)
    lanes = ReplayBuffer(
        storage=TensorStorage(TensorDict({"x": torch.arange(8).reshape(4, 2)}, [4, 2]), ndim=2),
        sampler=make(slice_len=2, ends=ends, **cached),
    )
    with refused(lanes, RuntimeError, "8 items of one dim, 8 of 2 dims"):
        lanes.sample(4)


@pytest.mark.parametrize("span", [2, (0, 2), (3, False), [True, 2]])
def test_a_span_as_long_as_a_slice(span):
    with pytest.raises(ValueError, match="must be less than the length of slices, 2"):
        SliceSampler(slice_len=2, span=span)
    buffer = buffer_of(SliceSampler(num_slices=2, span=span), rows(done=torch.zeros(8, dtype=torch.bool)))
    with refused(buffer, ValueError, "must be less than the length of slices, 2"):
        buffer.sample(4)
    assert len(buffer.sample(16)) <= 16


def test_priorities_of_one_storage_do_not_serve_another():
    done = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
    first = buffer_of(prioritized(slice_len=2), rows(done=done))
    first.sample(4)
    second = buffer_of(first.sampler, rows(done=done))
    with pytest.raises(RuntimeError, match="another storage"):
        second.sample(4)
    second.set_sampler(prioritized(slice_len=2))
    assert len(second.sample(4)) == 4
