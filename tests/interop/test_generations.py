"""How often rows were written, writes at given rows, and the numbers of a buffer."""

import copy
import json
import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from tests.interop.rows import ALL_STORAGES, check_same, flat_td, plain_tensor, refused

ALL = torch.arange(6)


def tracked(storage=LazyTensorStorage, capacity=6, kind=ReplayBuffer, **choices):
    writer = RoundRobinWriter if kind is ReplayBuffer else TensorDictRoundRobinWriter
    return kind(storage=storage(capacity), writer=writer(track_generations=True), **choices)


# ------------------------------------------------------------------ generations


CALLS = st.lists(
    st.tuples(st.sampled_from(["extend", "add", "at", "empty", "twin", "copy"]), st.integers(1, 14)), max_size=12
)


@given(capacity=st.integers(1, 6), listed=st.booleans(), calls=CALLS)
@settings(max_examples=50)
def test_every_write_of_a_row_counts(capacity, listed, calls):
    storage = (ListStorage if listed else LazyTensorStorage)(capacity)
    buffer = ReplayBuffer(storage=storage, writer=RoundRobinWriter(track_generations=True))
    twin = ReplayBuffer(storage=storage)  # whose writer counts nothing itself
    wanted = np.full(capacity, -1)
    for call, count in calls:
        if call == "empty":
            buffer.empty()
            wanted += wanted >= 0
            continue
        if call == "copy":
            buffer = copy.deepcopy(buffer)
            twin = ReplayBuffer(storage=buffer.storage)
            continue
        if call == "twin" and len(storage := buffer.storage) < capacity:
            continue  # would leave a gap
        if call == "at":
            rows = np.random.default_rng(count).integers(0, max(len(buffer.storage), 1), size=min(count, 3))
            if not len(buffer.storage):
                continue
            assert buffer.writer.write_at(torch.from_numpy(rows), torch.zeros(len(rows))).tolist() == rows.tolist()
        elif call == "add":
            rows = [buffer.add(torch.tensor(1.0))]
        else:
            rows = (twin if call == "twin" else buffer).extend(torch.zeros(count)).tolist()
        np.add.at(wanted, rows, 1)
        found = buffer.writer.generations_of(torch.arange(-2, capacity + 2))
        check_same(found, torch.from_numpy(np.concatenate(([-1, -1], wanted, [-1, -1]))))


def test_lanes_share_the_generation_of_their_row():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(6, ndim=2), writer=TensorDictRoundRobinWriter(track_generations=True)
    )
    index = buffer.extend(flat_td(range(8)).reshape(2, 4))
    check_same(buffer.writer.generations_of(index), torch.tensor([1, 1, 0, 0, 0, 0, 1, 1]))
    check_same(buffer.writer.generations_of((torch.tensor([0, 2]), torch.tensor([0, 1]))), torch.tensor([1, 0]))
    batch = buffer.sample(5)
    check_same(batch["index_generation"], (batch["index"][:, 0] == 0).long())


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", ALL_STORAGES)
def test_a_sample_tells_the_generations_of_its_rows(kind, storage):
    buffer = tracked(ALL_STORAGES[storage], kind=kind)
    buffer.extend(flat_td(range(8)))
    for choices in ({}, {"sampler": PrioritizedSampler(6, 1.0, 1.0)}):
        if choices:
            buffer.set_sampler(**choices)
        batch, info = buffer.sample(7, return_info=True)
        check_same(info["index_generation"], (info["index"] < 2).long())
        if kind is TensorDictReplayBuffer:
            check_same(batch["index_generation"], info["index_generation"])
        else:
            assert "index_generation" not in batch


def test_rows_that_were_there_before_have_the_first_generation():
    given = ReplayBuffer(storage=TensorStorage(plain_tensor(ALL)), writer=RoundRobinWriter(track_generations=True))
    check_same(given.writer.generations_of(ALL), torch.zeros(6, dtype=torch.int64))
    plain = ReplayBuffer(storage=LazyTensorStorage(6))
    plain.extend(plain_tensor(range(3)))
    plain.set_writer(RoundRobinWriter(track_generations=True))
    check_same(plain.writer.generations_of(ALL), torch.tensor([0, 0, 0, -1, -1, -1]))
    plain.add(plain_tensor([7])[0])
    check_same(plain.writer.generations_of(ALL), torch.tensor([0, 0, 0, 0, -1, -1]))


def _extend(buffer):
    buffer.extend(plain_tensor([7]))


@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.slow
def test_workers_count_in_the_same_numbers():
    buffer = tracked(LazyMemmapStorage)
    buffer.extend(plain_tensor(range(6)))
    for method, wanted in (("fork", [1, 0, 0]), ("spawn", [1, 1, 0])):
        worker = multiprocessing.get_context(method).Process(target=_extend, args=(buffer,))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
        check_same(buffer.writer.generations_of(ALL[:3]), torch.tensor(wanted))
    buffer.extend(plain_tensor([8]))
    check_same(buffer.writer.generations_of(ALL[:4]), torch.tensor([1, 1, 1, 0]))


# ------------------------------------------------------------------ writes at given rows


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_tensordicts_are_stamped_and_everyone_is_told(storage):
    buffer = TensorDictReplayBuffer(storage=storage(5), sampler=PrioritizedSampler(5, 1.0, 1.0, eps=0.0))
    buffer.extend(flat_td(range(3)))
    buffer.update_priority(torch.arange(3), 9.0)
    buffer.update_priority(torch.arange(3), 2.0)
    buffer.writer.write_at([2, 3], flat_td([7, 8]))  # the last row, and one behind it
    assert buffer.writer.write_at(0, flat_td([9])[0]) == 0
    check_same(buffer.sampler.priorities, torch.tensor([9.0, 2.0, 9.0, 9.0]))
    stored = buffer[:]
    check_same(stored["index"], torch.arange(4))
    check_same(stored["obs"][:, 0], torch.tensor([9.0, 1.0, 7.0, 8.0]))


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize(
    ("index", "error"),
    [
        ([0, 4], (RuntimeError, IndexError)),  # would leave a gap
        ([0, -1], IndexError),
        (7, (RuntimeError, IndexError)),
        ([0.5, 1.0], TypeError),
        ([0, 1, 2], (RuntimeError, ValueError)),  # for two items
    ],
)
def test_rows_that_cannot_be_written_are_refused(storage, index, error):
    buffer = ReplayBuffer(storage=storage(5))
    buffer.extend(plain_tensor(range(3)))
    with refused(buffer, error):
        buffer.writer.write_at(index, plain_tensor([8, 9]) if not isinstance(index, int) else plain_tensor([8])[0])


# ------------------------------------------------------------------ numbers


def test_stats_are_plain_numbers():
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=2, prefetch=2)
    buffer.extend(torch.zeros(4))
    buffer.extend(torch.zeros(4))
    wanted = {
        "size": 6,
        "write_count": 8,
        "prefetch_queue_size": 0,
        "initialized": True,
        "capacity": 6,
        "utilization": 1.0,
    }
    assert buffer.stats() == wanted
    buffer.sample()
    assert json.loads(json.dumps(buffer.stats())) == {**wanted, "prefetch_queue_size": 2}
    consuming = ReplayBuffer(storage=LazyTensorStorage(4), consume_after_n_samples=1)
    consuming.extend(torch.zeros(4))
    consuming.sample(3)
    assert (consuming.stats()["size"], consuming.stats()["utilization"]) == (1, 0.25)


def test_stats_make_nothing():
    late = {"size": 0, "write_count": 0, "prefetch_queue_size": 0, "initialized": False}
    unknown = ReplayBuffer(storage=lambda: LazyTensorStorage(3), delayed_init=True)
    known = ReplayBuffer(storage=LazyTensorStorage(3), delayed_init=True)
    assert unknown.stats() == late and not unknown.initialized
    assert known.stats() == {**late, "capacity": 3, "utilization": 0.0} and not known.initialized
