"""Slices beside other writes: out of order, before prefetched batches are taken, by other threads."""

import copy
import pickle
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SliceSamplerWithoutReplacement
from tests.interop.slice_model import drawn


def items(ids, first):
    return TensorDict({"x": torch.arange(first, first + len(ids)), "id": torch.tensor(ids)}, [len(ids)])


def buffer_of(ids, capacity, length=64, **choices):
    sampler = SliceSamplerWithoutReplacement(slice_len=length, strict_length=False, traj_key="id")
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, **choices)
    buffer.extend(items(ids, 0))
    return buffer


def whole(buffer):
    return sorted(drawn(buffer, 64 * 100))


def test_items_by_turns_before_and_behind_where_a_writer_has_begun_anew():
    buffer = buffer_of([1, 2, 1, 2, 1, 2], 10)
    assert whole(buffer) == [(0, 2, 4), (1, 3, 5)]
    buffer.storage.set(slice(0, 2), items([1, 2], 100))
    assert whole(buffer) == [(2, 4), (3, 5), (100,), (101,)]
    buffer.storage.set(slice(2, 6), items([1, 2, 1, 2], 102))
    assert whole(buffer) == [(100, 102, 104), (101, 103, 105)]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_batches_that_were_drawn_before_a_write_are_drawn_anew_of_a_copy(copied):
    buffer = buffer_of([1] * 4 + [2] * 4 + [3] * 4, 12, length=4, batch_size=4, prefetch=2)
    buffer.sample()
    buffer.extend(items([4] * 2, 100))
    other = copied(buffer)
    stored = [(2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (100, 101)]
    assert sorted(tuple(other.sample()["x"].tolist()) for _ in stored) == stored  # the write began an epoch


def test_ensembles_of_the_same_slices_in_any_order_while_others_write():
    """No deadlock, and no slice of two trajectories or of another member."""
    members = [buffer_of([1] * 4 + [2] * 4 + [3] * 4, 12, length=2) for _ in range(3)]
    ensembles = [
        ReplayBufferEnsemble(*each, sample_from_all=True, batch_size=12, prefetch=2)
        for each in (members, members[::-1], members[1:])
    ]
    ends, wrong = time.monotonic() + 1.0, []

    def write(member):
        first = 12
        while time.monotonic() < ends:
            member.extend(items([first] * 4, first))
            first += 4

    def read(ensemble):
        while time.monotonic() < ends:
            for part in ensemble.sample().unbind(0):
                pairs = part["x"].reshape(-1, 2)
                wrong.extend(pair for pair in pairs.tolist() if pair[1] != pair[0] + 1 or pair[0] // 4 != pair[1] // 4)

    threads = [threading.Thread(target=write, args=(each,), daemon=True) for each in members]
    threads += [threading.Thread(target=read, args=(each,), daemon=True) for each in ensembles]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert not any(each.is_alive() for each in threads)
    assert wrong == []
