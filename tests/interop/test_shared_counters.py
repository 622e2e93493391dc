"""Counters that processes share: copies have their own, and buffers take hardly any descriptors."""

import copy
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from interop import LazyTensorStorage, ReplayBuffer

COPIES = {
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),
    "queue": lambda held: pickle.loads(ForkingPickler.dumps(held)),
}


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
def test_a_copied_storage_has_a_length_of_its_own(again):
    storage = LazyTensorStorage(10)
    storage.set(slice(0, 3), torch.arange(3))
    other = again(storage)
    other.set(torch.tensor([3, 4]), torch.tensor([8, 8]))
    assert (len(storage), len(other)) == (3, 5)


def test_a_buffer_that_went_through_a_queue_is_apart():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(torch.arange(3))
    other = COPIES["queue"](buffer)
    other.extend(torch.arange(4))
    assert (len(buffer), buffer.writer.cursor, buffer.write_count) == (3, 3, 3)
    assert (len(other), other.writer.cursor, other.write_count) == (7, 7, 7)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_buffers_take_hardly_any_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    kept = [ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(100)]
    assert len(os.listdir("/proc/self/fd")) - before <= 2 and len(kept) == 100
