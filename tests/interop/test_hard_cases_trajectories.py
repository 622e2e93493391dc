"""Cases of trajectories in a ring that replay buffers are known to get wrong, through the buffers, with their numbers."""

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.interop.slice_model import check_law, drawn

STORAGES = {"memory": LazyTensorStorage, "memmap": LazyMemmapStorage}
in_each_storage = pytest.mark.parametrize("make", STORAGES.values(), ids=STORAGES)
SAMPLERS = {
    "slices": SliceSampler,
    "epochs": SliceSamplerWithoutReplacement,
    "priorities": lambda **choices: PrioritizedSliceSampler(1000, 1.0, 1.0, **choices),
}
with_each_sampler = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def rows(items, ids=None, ends=()):
    data = TensorDict({"x": torch.tensor(items)}, [len(items)])
    if ids is not None:
        data["id"] = torch.tensor(ids)
    data["next", "done"] = torch.isin(data["x"], torch.tensor(ends))[:, None]
    return data


# ------------------------------------------------------------------ around the end of the ring


@in_each_storage
@with_each_sampler
@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_left_of_a_trajectory_and_what_is_new_are_apart(make, sampler, at_once):
    data = rows([1, 2, 11, 12, 21], ends=[2, 12])
    buffer = ReplayBuffer(storage=make(4), sampler=sampler(slice_len=2))
    for part in [data] if at_once else data.split(1):
        buffer.extend(part)
    assert buffer[:]["x"].tolist() == [21, 2, 11, 12]
    seen = set()
    for _ in range(50):
        try:
            seen |= set(drawn(buffer, 2))
        except RuntimeError as error:  # an epoch also has the turns of those that are too short
            assert "only trajectories shorter" in str(error)
    assert seen == {(11, 12)}


@in_each_storage
@pytest.mark.parametrize("prioritized", [False, True])
def test_an_episode_goes_on_behind_the_last_row(make, prioritized):
    torch.manual_seed(0)
    choices = {"slice_len": 4}
    sampler = PrioritizedSliceSampler(1000, 1.0, 1.0, **choices) if prioritized else SliceSampler(**choices)
    buffer = ReplayBuffer(storage=make(1000), sampler=sampler)
    for first in (0, 999):
        buffer.extend(rows(list(range(first, first + 999)), ends=[998, 1997]))
    seen = []
    for _ in range(30):
        batch, info = buffer.sample(4 * 996, return_info=True)
        slices = batch["x"].reshape(-1, 4)
        assert torch.equal(slices, slices[:, :1] + torch.arange(4))
        seen += info["index"][0][::4].tolist()
    check_law(seen, {slot % 1000: 1.0 for slot in range(999, 999 + 996)})
    assert 999 in seen and 998 not in seen


# ------------------------------------------------------------------ several environments, short episodes, last steps


@pytest.mark.parametrize("prioritized", [False, True])
def test_two_environments_written_flat_one_step_at_a_time(prioritized):
    torch.manual_seed(0)
    choices = {"slice_len": 4, "traj_key": "id"}
    sampler = PrioritizedSliceSampler(100, 1.0, 1.0, **choices) if prioritized else SliceSampler(**choices)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler)
    for step in range(8):
        buffer.extend(rows([10 * step, 10 * step + 1], [0, 1]))
    wanted = {tuple(10 * (start + step) + env for step in range(4)): 1.0 for start in range(5) for env in range(2)}
    check_law([each for _ in range(25) for each in drawn(buffer, 4 * 40)], wanted)


def two_episodes(**choices):
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), sampler=SliceSampler(slice_len=5, **choices))
    buffer.extend(rows(list(range(104)), ends=[99, 103]))
    return buffer


def test_a_short_episode_keeps_its_place_in_the_batch():
    buffer = two_episodes(strict_length=False, pad_output=True)
    short = 0
    for _ in range(20):
        batch, info = buffer.sample(100, return_info=True)
        assert batch.reshape(20, 5).batch_size == (20, 5)
        mask = info["collector", "mask"].reshape(20, 5)
        of_the_short_one = batch["x"].reshape(20, 5)[:, 0] >= 100
        assert mask.sum(1).tolist() == [4 if each else 5 for each in of_the_short_one]
        short += int(of_the_short_one.sum())
    assert 140 < short < 260  # half of 400, within six standard deviations


def test_a_short_episode_does_not_come():
    buffer = two_episodes()
    for _ in range(20):
        assert buffer.sample(100)["x"].max() < 100


@with_each_sampler
def test_both_steps_of_an_episode_come_equally_often(sampler):
    torch.manual_seed(0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler(slice_len=1))
    buffer.extend(rows([0, 1], ends=[1]))
    check_law([each for _ in range(1000) for each in drawn(buffer, 1)], {(0,): 0.5, (1,): 0.5})
