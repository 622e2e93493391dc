"""What loops do around slice samplers: single writes between draws, copies, samplers that are passed around."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    TensorDictReplayBuffer,
)


def episodes(lengths):
    count = sum(lengths)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return TensorDict({"step": torch.arange(count), "episode": number, "next": {"done": done}}, [count])


def whole(sample, length):
    steps, numbers = sample["step"].reshape(-1, length), sample["episode"].reshape(-1, length)
    return bool((steps.diff(dim=1) == 1).all() and (numbers == numbers[:, :1]).all())


@pytest.mark.parametrize("marker", [{"traj_key": "episode"}, {"end_key": ("next", "done")}])
@pytest.mark.parametrize("prioritized", [False, True])
def test_single_writes_are_taken_in_one_by_one(marker, prioritized):
    """Also in a full ring, where a loop of `add` and `sample` spends its life; nothing is read anew."""
    options = {"slice_len": 3, **marker}
    sampler = PrioritizedSliceSampler(30, 0.7, 0.5, **options) if prioritized else SliceSampler(**options)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=sampler, batch_size=30)
    rows = episodes([4, 5, 6] * 9)
    buffer.add(rows[0])
    for row in rows[1:3]:
        buffer.add(row)
    buffer.sample()
    index = sampler.trajectories(buffer.storage)
    for row in rows[3:]:
        buffer.add(row)
        assert whole(buffer.sample(), 3)
    assert sampler.trajectories(buffer.storage) is index


def test_priorities_of_one_storage_do_not_serve_another():
    sampler = PrioritizedSliceSampler(100, 0.7, 0.5, slice_len=2)
    first = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
    first.extend(episodes([3, 5, 2, 7]))
    first.sample()
    second = TensorDictReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler, batch_size=4)
    second.extend(episodes([2, 2]))
    with pytest.raises(RuntimeError, match="another storage"):
        second.sample()
    second.set_sampler(PrioritizedSliceSampler(50, 0.7, 0.5, slice_len=2))
    assert whole(second.sample(), 2)


@pytest.mark.parametrize("key", [["next", "done"], ()])
@pytest.mark.parametrize("name", ["end_key", "traj_key", "truncated_key"])
def test_a_key_is_a_name_or_a_tuple_of_names(name, key):
    with pytest.raises(TypeError, match=f"{name} must be a name"):
        SliceSampler(slice_len=2, **{name: key})


def test_a_span_has_two_sides():
    with pytest.raises(ValueError, match="a pair of these"):
        SliceSampler(slice_len=2, span=(1, 1, 1))
