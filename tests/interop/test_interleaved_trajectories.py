"""Trajectories whose items are written by turns, as by several environments that are stepped together and stored flat."""

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from interop.samplers.interleaved import Interleaved, distinct_tail, takes_turns
from interop.samplers.recent_ids import RecentIds
from tests.interop.slice_model import SliceModel, check_law, drawn, shares, starts


def by_turns(ids):
    """Rows with the time as "x"; nothing in them ends."""
    return np.zeros((len(ids), 1), bool), np.array(ids)[:, None]


def buffer_of(capacity, sampler):
    return ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)


@pytest.mark.parametrize("seed", range(12))
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


def test_starts_by_priority():
    model = SliceModel(16, by_turns=True)
    buffer = buffer_of(16, PrioritizedSliceSampler(16, 1.0, 1.0, eps=0.0, slice_len=2, traj_key="id"))
    for step in range(9):
        buffer.extend(model.write(*by_turns([0, 1, 2 + step // 2])))
        legal = starts(model.trajectories(), 2)
        if legal:
            assert {each for _ in range(15) for each in drawn(buffer, 32)} == set(legal.values())
    slot = {number: slot for slot, number in enumerate(model.numbers())}
    favourite = sorted(legal)[3]
    buffer.update_priority(torch.arange(16), torch.zeros(16))
    buffer.update_priority(slot[favourite], 1.0)
    assert drawn(buffer, 16) == [legal[favourite]] * 8


def test_runs_of_one_id_after_the_other_are_not_by_turns():
    for ids in ([0, 0, 1, 1, 0, 0], [0, 0, 0], [0, 1, 2, 3], [0, 1, 1, 0, 0, 1, 1], []):
        assert not takes_turns(np.zeros(0, int), np.array(ids, int))
    for ids in ([0, 1, 0], [0, 0, 1, 0], [5, 0, 1, 2, 3, 4, 5], [0, 1, 1, 2, 1]):
        assert takes_turns(np.zeros(0, int), np.array(ids))
    assert takes_turns(np.array([4, 5]), np.array([4]))
    assert distinct_tail(np.array([1, 2, 3, 2, 4])).tolist() == [3, 2, 4]


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=8), st.booleans(), st.booleans())
def test_what_is_remembered_of_ids_tells_as_much_as_all_of_them(parts, rising, wide):
    """Whether they only rise, as those of runs usually do, or come again."""
    if rising:
        lengths, every = [len(part) for part in parts], sorted(itertools.chain.from_iterable(parts))
        parts = [
            every[stop - length : stop] for stop, length in zip(itertools.accumulate(lengths), lengths, strict=True)
        ]
    offset = np.array(2**63 if wide else 0, np.uint64)  # which float64 could not tell from its neighbours
    recent, before = RecentIds(), np.zeros(0, np.uint64)
    for part in parts:
        ids = np.array(part, np.uint64) + offset
        wanted = takes_turns(before, ids)
        assert recent.take_turns(ids, (ids[1:] != ids[:-1]).nonzero()[0]) == wanted
        if wanted:
            return
        before = np.concatenate([before, ids])


@pytest.mark.parametrize("rising", [True, False])
def test_ids_that_are_remembered_are_limited(rising):
    """After 5,000 others an id is a new one, after 4,000 it is known."""
    for count, known in ((5000, False), (4000, True)):
        recent = RecentIds()
        ids = np.arange(count) if rising else -np.arange(count)
        for part in np.split(ids, 10):
            assert not recent.take_turns(part, np.arange(len(part) - 1))
        assert recent.take_turns(ids[:1], np.zeros(0, np.int64)) == known


def test_one_id_in_several_runs():
    buffer = buffer_of(20, SliceSamplerWithoutReplacement(slice_len=20, strict_length=False, traj_key="id"))
    model = SliceModel(20)
    ids = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 1])[:, None]
    ends = np.append(ids[1:] != ids[:-1], [[True]], 0)
    buffer.extend(model.write(ends, ids))
    assert sorted(drawn(buffer, 400)) == model.trajectories() == [(0, 1, 2), (3, 4), (5, 6), (7, 8, 9)]


@pytest.mark.parametrize("seed", range(4))
def test_places_against_lists(seed):
    random = np.random.default_rng(seed)
    capacity, envs = 64, int(random.integers(2, 9))
    turns, known, row, stored = Interleaved(capacity), [], 0, 0
    ids = list(range(envs))
    for _ in range(300):
        batch = []
        for _ in range(int(random.integers(1, 30))):
            env = len(known) % envs
            ids[env] = ids[env] if random.random() > 0.1 else max(ids) + 1
            batch.append(ids[env])
            known.append((ids[env], (row + len(batch) - 1) % capacity))
        turns.write(row, np.array(batch), stored)
        row, stored = (row + len(batch)) % capacity, min(stored + len(batch), capacity)
        wanted = {}
        for each, place in known[-capacity:]:
            wanted.setdefault(each, []).append(place)
        found = [turns.rows[first : last + 1].tolist() for _, first, last in turns.at_least(1)]
        assert sorted(found) == sorted(wanted.values())
    assert len(turns.rows) < 40 * capacity


def test_a_new_item_costs_the_same_whatever_is_stored():
    def seconds(capacity):
        turns = Interleaved(capacity)
        for first in range(0, capacity, 1000):
            turns.write(first, np.arange(1000) % 10, 0)
        best = 1e9
        for _ in range(5):
            start = time.thread_time()
            for first in range(0, 1000, 10):
                turns.write(first, np.arange(10), capacity)
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(100_000) < 10 * seconds(2000)


def test_an_id_that_does_not_come_again_is_forgotten():
    model = SliceModel(40, by_turns=True)
    buffer = buffer_of(40, SliceSampler(slice_len=1, traj_key="id"))
    for step in range(200):
        buffer.extend(model.write(*by_turns([0, 1, 2 + step])))
        buffer.sample(4)
    turns = buffer.sampler._index._turns
    assert len(turns._latest) < 10 and len(turns.table) < 100


def test_several_dims_are_lanes_and_not_turns():
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2),
        sampler=SliceSamplerWithoutReplacement(slice_len=12, strict_length=False, traj_key="id"),
    )
    ids = torch.tensor([[0, 1, 0, 1, 0, 1], [2, 2, 2, 2, 2, 2]])
    buffer.extend(TensorDict({"x": torch.arange(12).reshape(2, 6), "id": ids}, [2, 6]))
    assert sorted(drawn(buffer, 1200)) == [(0,), (1,), (2,), (3,), (4,), (5,), (6, 7, 8, 9, 10, 11)]
