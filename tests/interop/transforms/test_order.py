"""Stacks in buffers are of steps that were stored one right after the other."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyStackStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from interop.sample_units import Sequence
from interop.transforms import BurnInTransform, CatFrames, RandomCropTensorDict

BUFFERS = [ReplayBuffer, TensorDictReplayBuffer]


def steps(first, count, length=9):
    step = torch.arange(first, first + count)
    done = (step % length == length - 1)[:, None]
    return TensorDict({"o": step.float()[:, None], "ep": step // length, "next": {"done": done}}, [count])


def filled(buffer, sampler, count=63, storage=LazyTensorStorage, length=9, **kwargs):
    frames = CatFrames(3, -1, ["o"], ["s"])
    rb = buffer(storage=storage(40), sampler=sampler, batch_size=20, **{"transform": frames, **kwargs})
    for first in range(0, count, 7):
        rb.extend(steps(first, min(7, count - first), length))
    return rb


def is_of_one_past(found, length=9):
    """Whether the stacks are what came before their steps, in the same trajectory, behind padding with their first frame."""
    step, stack = found["o"].reshape(-1, 1), found["s"].reshape(-1, 3)
    moves = stack.diff(dim=-1)
    return bool(
        torch.equal(stack[:, -1:], step)
        and ((moves == 0) | (moves == 1)).all()
        and (moves[:, 1] >= moves[:, 0]).all()
        and (stack // length == step // length).all()
    )


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("count", [63])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"end_key": ("next", "done")},
        {"traj_key": "ep"},
        {"end_key": ("next", "done"), "truncated_key": None},
        {"end_key": ("next", "done"), "strict_length": False},
        {"end_key": ("next", "done"), "strict_length": False, "pad_output": True},
        {"end_key": ("next", "done"), "span": True},
    ],
)
def test_slices_are_not_mixed(buffer, count, kwargs):
    rb = filled(buffer, SliceSampler(slice_len=5, **kwargs), count)
    assert all(is_of_one_past(rb.sample()) for _ in range(10))


@pytest.mark.parametrize("buffer", BUFFERS)
def test_slices_of_any_sampler_and_storage_are_not_mixed(buffer):
    samplers = [
        PrioritizedSliceSampler(max_capacity=40, alpha=0.7, beta=0.9, slice_len=5, end_key=("next", "done")),
        SliceSamplerWithoutReplacement(slice_len=4, end_key=("next", "done")),
        SliceSampler(slice_len=5, traj_key="ep", truncated_key=None),
    ]
    for sampler in samplers:
        rb = filled(buffer, sampler, 40)
        assert all(is_of_one_past(rb.sample()) for _ in range(5))
    rb = filled(buffer, SliceSampler(slice_len=5, end_key=("next", "done")), storage=LazyStackStorage, prefetch=2)
    assert all(is_of_one_past(rb.sample()) for _ in range(5))


@pytest.mark.parametrize("buffer", BUFFERS)
def test_rows_by_index_go_on_where_they_were_stored_so(buffer):
    rb = filled(buffer, SliceSampler(slice_len=5, end_key=("next", "done")), length=1000)
    found = rb[:]
    assert is_of_one_past(found, 1000)
    assert found["s"][23].tolist() == [23, 23, 23] and found["s"][0].tolist() == [40, 40, 40]
    assert rb[torch.tensor([3, 4, 9, 10, 11])]["s"].tolist() == [
        [43, 43, 43],
        [43, 43, 44],
        [49, 49, 49],
        [49, 49, 50],
        [49, 50, 51],
    ]
    assert rb[[39, 0, 1]]["s"].tolist() == [[39, 39, 39], [39, 39, 40], [39, 40, 41]]
    assert rb[5:7]["s"].tolist() == [[45, 45, 45], [45, 45, 46]]


def test_lanes():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40, ndim=2),
        sampler=SliceSampler(slice_len=4, end_key=("next", "done"), truncated_key=None),
        transform=CatFrames(3, -1, ["o"], ["s"]),
        batch_size=32,
    )
    for first in range(0, 33, 11):
        part = steps(first, 11, 1000)
        rb.extend(torch.stack([part, part.clone().apply(lambda each: each)]))
    for _ in range(10):
        assert is_of_one_past(rb.sample(), 1000)
    whole = rb[:]
    assert whole.batch_size == (2, 20) and is_of_one_past(whole, 1000)
    assert torch.equal(whole["s"][0, 13], torch.full((3,), 13.0))


def test_windows_and_members_of_an_ensemble_are_not_mixed():
    rb = filled(TensorDictReplayBuffer, None, length=1000, sample_unit=Sequence(length=3, burn_in=2, bootstrap=0))
    assert is_of_one_past(rb.sample(), 1000)
    members = [filled(each, SliceSampler(slice_len=5, end_key=("next", "done"))) for each in BUFFERS]
    found = ReplayBufferEnsemble(*members, batch_size=40, p=[0.5, 0.5]).sample()
    assert is_of_one_past(found)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_independent_steps_are_refused_but_for_whole_trajectories_of_one(buffer):
    rb = filled(buffer, None, 7, length=1000)
    with pytest.raises(ValueError, match="none of these steps comes right after the one before it"):
        rb[[5, 3, 1]]
    assert rb[[4]]["s"].tolist() == [[4, 4, 4]]
    assert is_of_one_past(filled(buffer, None, length=1).sample(), 1)


@pytest.mark.parametrize("transform", [RandomCropTensorDict(3), BurnInTransform([], burn_in=3)])
def test_slices_are_not_taken_for_one_sequence(transform):
    sampler = SliceSampler(slice_len=5, end_key=("next", "done"))
    rb = filled(ReplayBuffer, sampler, length=1000, transform=transform)
    with pytest.raises(ValueError, match="are not one sequence"):
        rb.sample()
    rb.insert_transform(0, lambda data: data.reshape(-1, 5))
    moves = rb.sample()["o"].squeeze(-1).diff(dim=1)
    assert moves.numel() and (moves == 1).all()
