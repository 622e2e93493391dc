"""Trajectories whose items are written by turns, as by several environments that are stepped together and stored flat."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from tests.interop.slice_model import SliceModel, check_law, drawn, shares, starts


def by_turns(ids):
    """Rows with the time as "x"; nothing in them ends."""
    return np.zeros((len(ids), 1), bool), np.array(ids)[:, None]


def buffer_of(capacity, sampler):
    return ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed):
    random = np.random.default_rng(seed)
    envs = int(random.integers(2, 7))
    model = SliceModel(int(random.integers(2 * envs, 60)), by_turns=True)
    length, strict = int(random.integers(1, 5)), bool(random.random() < 0.5)
    buffer = buffer_of(model.capacity, SliceSampler(slice_len=length, strict_length=strict, traj_key="id"))
    whole = ReplayBuffer(
        storage=buffer.storage,
        sampler=SliceSamplerWithoutReplacement(slice_len=64, strict_length=False, traj_key="id"),
    )
    chance, steps = random.choice([0, 0.05, 0.3]), int(random.choice([1, 1, 3, 20]))
    ids = list(range(envs))
    for _ in range(40):
        rows = []
        for _ in range(steps):
            for env in range(envs):
                rows.append(ids[env])
                if random.random() < chance:
                    ids[env] = max(ids) + 1
        buffer.extend(model.write(*by_turns(rows)))
        if random.random() < 0.3:
            continue
        assert sorted(drawn(whole, 64 * 1000)) == model.trajectories()
        legal = shares(model.trajectories(), length, strict)
        if legal:
            assert set(drawn(buffer, 20 * length)) <= set(legal)
        else:
            with pytest.raises(RuntimeError, match="no stored trajectory is long enough"):
                buffer.sample(length)


@pytest.mark.parametrize("prioritized", [False, True])
def test_they_begin_where_others_were_written_in_runs_before(prioritized):
    model = SliceModel(32, by_turns=True)
    choices = {"slice_len": 3, "traj_key": "id"}
    sampler = PrioritizedSliceSampler(32, 1, 1, **choices) if prioritized else SliceSampler(**choices)
    buffer = buffer_of(32, sampler)
    for run in range(10):
        buffer.extend(model.write(*by_turns([run] * 8)))
        assert set(drawn(buffer, 150)) <= set(shares(model.trajectories(), 3))
    for _ in range(20):
        buffer.extend(model.write(*by_turns([1000, 1001])))
        legal = set(shares(model.trajectories(), 3))
        if prioritized:
            assert legal == set(starts(model.trajectories(), 3).values())
        assert set(drawn(buffer, 300)) <= legal
    for run in range(20, 26):
        buffer.extend(model.write(*by_turns([run] * 8)))
        assert set(drawn(buffer, 300)) <= set(shares(model.trajectories(), 3))


@pytest.mark.parametrize("strict", [False, True])
def test_the_law(strict):
    torch.manual_seed(0)
    model = SliceModel(20, by_turns=True)
    buffer = buffer_of(20, SliceSampler(slice_len=3, strict_length=strict, traj_key="id"))
    for ids in ([0, 1, 2], [0, 1, 2], [3, 1, 2], [3, 1, 2], [4, 1, 2], [5, 1, 2], [5, 1, 2], [5, 1, 2]):
        buffer.extend(model.write(*by_turns(ids)))
    check_law(drawn(buffer, 3 * 5000), shares(model.trajectories(), 3, strict))


def test_one_id_in_several_runs():
    buffer = buffer_of(20, SliceSamplerWithoutReplacement(slice_len=20, strict_length=False, traj_key="id"))
    model = SliceModel(20)
    ids = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 1])[:, None]
    ends = np.append(ids[1:] != ids[:-1], [[True]], 0)
    buffer.extend(model.write(ends, ids))
    assert sorted(drawn(buffer, 400)) == model.trajectories() == [(0, 1, 2), (3, 4), (5, 6), (7, 8, 9)]


def test_several_dims_are_lanes_and_not_turns():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2),
        sampler=SliceSamplerWithoutReplacement(slice_len=12, strict_length=False, traj_key="id"),
    )
    ids = torch.tensor([[0, 1, 0, 1, 0, 1], [2, 2, 2, 2, 2, 2]])
    buffer.extend(TensorDict({"x": torch.arange(12).reshape(2, 6), "id": ids}, [2, 6]))
    assert sorted(drawn(buffer, 1200)) == [(0,), (1,), (2,), (3,), (4,), (5,), (6, 7, 8, 9, 10, 11)]
