"""Buffers among the arguments of a process that starts: what works, and what is refused."""

import multiprocessing

import pytest
import torch
from tensordict import TensorDict

from interop import (
    CompressedListStorage,
    ConsumingSampler,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from tests.faults.sharing import counters_wrong, rows, torn


def nothing(*_):
    pass


def buffer_with(storage=None, **parts):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8) if storage is None else storage, batch_size=2, **parts)
    buffer.extend(TensorDict({"key": torch.arange(4.0)}, [4]))
    return buffer


REFUSED = {
    "list": (lambda: buffer_with(ListStorage(8)), "LazyMemmapStorage"),
    "stack": (lambda: buffer_with(LazyStackStorage(8)), "LazyMemmapStorage"),
    "compressed": (lambda: buffer_with(CompressedListStorage(8)), "LazyMemmapStorage"),
    "priorities": (lambda: buffer_with(sampler=PrioritizedSampler(8, 0.6, 0.4)), "sync=False"),
    "ranks": (lambda: buffer_with(writer=TensorDictMaxValueWriter("key")), "another writer"),
    "consumed": (lambda: buffer_with(sampler=ConsumingSampler()), "process that made it"),
    "memory not written": (lambda: ReplayBuffer(storage=LazyTensorStorage(8, device="auto")), "shared_init=True"),
    "files not written": (lambda: ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir="held")), "shared_init=True"),
    "length of one process": (lambda: buffer_with(LazyTensorStorage(8, compilable=True)), "compilable=False"),
}


@pytest.mark.parametrize(("make", "cure"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_shared_says_so_at_the_start_and_what_to_use(make, cure):
    buffer = make()
    length = len(buffer)
    process = multiprocessing.get_context("spawn").Process(target=nothing, args=(buffer,))
    with pytest.raises(RuntimeError, match=cure):
        process.start()
    assert len(buffer) == length and process.pid is None


def use(buffers, answers):
    """Every assertion about a worker at once: one takes seconds to start."""
    prefetching, late, named = buffers
    assert prefetching.storage is not late.storage
    for _ in range(3):
        assert torn(prefetching.sample()) == 0
    prefetching.extend(rows(torch.arange(64, 80)))
    answers.put(("late", len(late), late.storage.initialized))
    late.extend(rows(torch.arange(10)))
    named.extend(rows(torch.arange(4, 8)))
    assert named.storage.cleanup() is False
    answers.put("written")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.slow  # the one of tests/seeds is like it
def test_a_started_worker_with_several_buffers(tmp_path, method):
    prefetching = TensorDictReplayBuffer(storage=LazyTensorStorage(80), batch_size=8, prefetch=3)
    prefetching.extend(rows(torch.arange(64)))
    prefetching.sample()
    late = TensorDictReplayBuffer(storage=LazyMemmapStorage(20, shared_init=True), batch_size=4)
    named = TensorDictReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=tmp_path / "held", auto_cleanup=True))
    named.extend(rows(torch.arange(4)))
    with pytest.raises(ValueError, match="prefetch"):
        prefetching.share()
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=use, args=((prefetching, late, named), answers))
    process.start()
    assert answers.get(timeout=100) == ("late", 0, False)
    assert answers.get(timeout=100) == "written"
    process.join(60)
    assert process.exitcode == 0
    assert counters_wrong(prefetching, 80) == 0 and prefetching[:]["id"].tolist() == list(range(80))
    late.extend(rows(torch.arange(10, 25)))
    assert late[:]["id"].sort().values.tolist() == list(range(5, 25)) and counters_wrong(late, 25) == 0
    assert len(named) == 8 and (tmp_path / "held" / "id.memmap").exists()


def test_sharing_is_of_the_storage_and_can_be_taken_back():
    buffer, other = (TensorDictReplayBuffer(storage=LazyTensorStorage(8)) for _ in range(2))

    def shared(buffer):
        return buffer.storage.lock.processes is not None

    assert not shared(buffer) and shared(buffer.share()) and not shared(buffer.share(False))
    buffer.share()
    assert shared(TensorDictReplayBuffer(storage=buffer.storage))
    before = buffer.set_storage(other.storage)
    assert shared(buffer) and shared(other) and before.lock.processes is not None


def test_a_buffer_that_is_made_late_is_shared_when_it_is_made():
    made = []

    def make():
        made.append(LazyTensorStorage(8))
        return made[0]

    buffer = ReplayBuffer(storage=make, shared=True, delayed_init=True)
    assert not made and buffer.share() is buffer and not made
    buffer.extend(torch.arange(3))
    assert made[0].lock.processes is not None
