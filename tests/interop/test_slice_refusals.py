"""What slice samplers refuse at the draw: the kind of error, its text, and that nothing has changed."""

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
DONE = torch.tensor([0, 0, 1, 1, 0, 1, 0, 1], dtype=torch.bool)


def rows(count=8, **entries):
    data = TensorDict({"x": torch.arange(count), "next": TensorDict({}, [count])}, [count])
    for key, value in entries.items():
        data[("next", "done") if key == "done" else key] = value
    return data


def buffer_of(sampler, data, kind=TensorDictReplayBuffer):
    buffer = kind(storage=LazyTensorStorage(8), sampler=sampler)
    if data is not None:
        buffer.extend(data)
    return buffer


@pytest.mark.parametrize(
    ("choices", "data", "error", "match"),
    [
        ({}, None, RuntimeError, "Cannot sample from an empty storage"),
        ({}, rows(), RuntimeError, r"Could not get a tensordict.*'done'.*Give traj_key.*or end_key"),
        ({}, torch.arange(3), RuntimeError, "Could not get a tensordict out of the storage.*this LazyTensorStorage"),
        ({"end_keys": ["a", "b"], "only_named_keys": True}, rows(done=DONE), RuntimeError, r"none of \['a', 'b'\]"),
        ({"traj_key": "id"}, rows(id=torch.zeros(8, 1).long()), RuntimeError, "1-dimensional storage"),
        ({"traj_key": "id"}, rows(id=torch.zeros(8) * 1j), TypeError, "'id' must be integers, got torch.complex64"),
        ({"end_key": "id"}, rows(id=torch.zeros(8) * 1j), TypeError, "must be bool, got torch.complex64"),
        ({"end_key": "id"}, rows(id=torch.zeros(8, 2)), RuntimeError, r"one bool.*have shape \[2\]"),
        ({}, rows(done=torch.zeros(8, 2, dtype=torch.bool)), RuntimeError, r"'done'\) has items of shape \[2\]"),
        ({"slice_len": 3}, rows(done=DONE), RuntimeError, "batch_size=4 is not a multiple of slice_len=3"),
        ({"num_slices": 3}, rows(done=DONE), RuntimeError, "batch_size=4 is not a multiple of num_slices=3"),
    ],
)
@of_each_kind
def test_batches_that_cannot_be_drawn(make, choices, data, error, match):
    choices = choices if {"slice_len", "num_slices"} & set(choices) else {"slice_len": 2, **choices}
    plain = isinstance(data, torch.Tensor)
    buffer = buffer_of(make(**choices), data, ReplayBuffer if plain else TensorDictReplayBuffer)
    with refused(buffer, error, match):
        buffer.sample(4)


@of_each_kind
def test_trajectories_that_are_too_short(make):
    buffer = buffer_of(make(slice_len=4), rows(done=DONE))
    message = "no stored trajectory is long enough: their lengths are 1 to 3, slices need 4.*strict_length=False"
    for size in (4, 400):
        with refused(buffer, RuntimeError, message):
            buffer.sample(size)
    assert len(buffer_of(make(slice_len=4, strict_length=False), rows(done=DONE)).sample(400)) < 400


@of_each_kind
def test_given_boundaries_of_other_data(make):
    cached = {} if make is SliceSamplerWithoutReplacement else {"cache_values": True}
    sampler = make(slice_len=2, ends=torch.arange(8) == 7, **cached)
    short = buffer_of(sampler, rows(5))
    with refused(short, RuntimeError, "are of 8 items of one dim, 5 of 1 dims are stored"):
        short.sample(4)
    held = TensorStorage(TensorDict({"x": torch.arange(8).reshape(4, 2)}, [4, 2]), ndim=2)
    lanes = ReplayBuffer(storage=held, sampler=make(slice_len=2, ends=torch.arange(8) == 7, **cached))
    with refused(lanes, RuntimeError, "8 items of one dim, 8 of 2 dims"):
        lanes.sample(4)


@pytest.mark.parametrize("span", [2, (0, 2), [True, 2]])
def test_a_span_as_long_as_a_slice(span):
    with pytest.raises(ValueError, match="must be less than the length of slices, 2"):
        SliceSampler(slice_len=2, span=span)
    buffer = buffer_of(SliceSampler(num_slices=2, span=span), rows(done=DONE & False))
    with refused(buffer, ValueError, "must be less than the length of slices, 2"):
        buffer.sample(4)
    assert len(buffer.sample(16)) <= 16


def test_priorities_of_one_storage_do_not_serve_another():
    first = buffer_of(prioritized(slice_len=2), rows(done=DONE))
    first.sample(4)
    second = buffer_of(first.sampler, rows(done=DONE))
    with pytest.raises(RuntimeError, match="another storage"):
        second.sample(4)
    second.set_sampler(prioritized(slice_len=2))
    assert len(second.sample(4)) == 4


def test_priorities_that_are_all_zero():
    buffer = buffer_of(PrioritizedSliceSampler(8, 1.0, 1.0, eps=0.0, slice_len=2), rows(done=DONE))
    buffer.update_priority(torch.arange(8), torch.zeros(8))
    with refused(buffer, RuntimeError):
        buffer.sample(8)
