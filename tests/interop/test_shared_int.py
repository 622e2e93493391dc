"""Integers that processes share: one value whoever is started when, and none for copies."""

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from interop import LazyTensorStorage, ReplayBuffer
from interop.shared.shared_int import SharedInt

COPIES = {
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda held: pickle.loads(pickle.dumps(held)),
    "queue": lambda held: pickle.loads(ForkingPickler.dumps(held)),
}


@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
def test_a_copy_has_a_value_of_its_own(again):
    one = SharedInt(5)
    other = again(one)
    other.value += 1
    assert (one.value, other.value) == (5, 6)


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
    assert (len(buffer), buffer.writer._cursor, buffer.write_count) == (3, 3, 3)
    assert (len(other), other.writer._cursor, other.write_count) == (7, 7, 7)


@pytest.mark.slow
def test_processes_forked_and_spawned_at_any_time_share_one_value():
    code = """
        import multiprocessing, os
        from interop.shared.shared_int import SharedInt

        def forked(number, pipes):
            child = os.fork()
            if child == 0:
                others = [SharedInt(7) for _ in range(600)]  # made here: nothing to the parent
                os.read(pipes[0], 1)  # until everyone is there
                number.value += 1
                os._exit(0)
            return child

        if __name__ == "__main__":
            number, first, last = SharedInt(10), os.pipe(), os.pipe()
            before = forked(number, first)
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=setattr, args=(number, "value", number.value + 1))
            process.start()
            process.join(60)
            after = forked(number, last)
            others = [SharedInt(3) for _ in range(600)]
            for child, pipes in ((before, first), (after, last)):
                os.write(pipes[1], b"x")
                os.waitpid(child, 0)
            print(number.value, {each.value for each in others})
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "13 {3}\n", done.stderr[-3000:]


def test_the_memory_of_a_value_is_not_given_to_another():
    """A worker may still have it."""
    numbers = [SharedInt() for _ in range(3)]  # their neighbours keep the page
    memory = _address(numbers.pop(1))
    assert all(_address(SharedInt()) != memory for _ in range(600))


def _address(number):
    return np.frombuffer(number._view, np.int64).ctypes.data


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_buffers_take_hardly_any_descriptors():
    before = len(os.listdir("/proc/self/fd"))
    kept = [ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(100)]
    assert len(os.listdir("/proc/self/fd")) - before <= 2 and len(kept) == 100
