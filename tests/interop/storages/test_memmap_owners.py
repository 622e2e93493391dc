"""LazyMemmapStorage.open: who may write to a folder, and what a reader has of it."""

import gc
import multiprocessing
import os
import signal

import pytest
import torch

from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from tests.interop.rows import check_same, flat_td, nested_td
from tests.interop.storages.named_folders import made, reopened


def test_a_folder_in_use_is_refused(tmp_path):
    buffer = made(tmp_path, flat_td([1, 2]))
    for other in (
        lambda: LazyMemmapStorage.open(tmp_path),
        lambda: made(tmp_path, flat_td([3])),
        lambda: ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True)).extend(flat_td([3])),
    ):
        with pytest.raises(RuntimeError, match=f"another storage of this process .pid {os.getpid()}"):
            other()
    check_same(buffer[:], flat_td([1, 2]))
    buffer.storage.close()
    with pytest.raises(RuntimeError, match="mode='r'"):
        buffer.extend(flat_td([3]))
    check_same(buffer[:], flat_td([1, 2]))
    check_same(reopened(tmp_path)[:], flat_td([1, 2]))


def test_a_storage_that_is_there_is_not_made_again(tmp_path):
    made(tmp_path, flat_td([1, 2]))
    gc.collect()
    with pytest.raises(RuntimeError, match=r"already exists.*\.open"):
        made(tmp_path, flat_td([3]))
    check_same(reopened(tmp_path)[:], flat_td([1, 2]))


def test_a_storage_that_is_made_anew_has_none_of_the_old(tmp_path):
    made(tmp_path, nested_td(range(5)), sampler=PrioritizedSampler(5, 0.7, 0.5))
    gc.collect()
    buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True))
    buffer.extend(flat_td([9]))
    check_same(buffer[:], flat_td([9]))
    del buffer
    buffer = reopened(tmp_path, sampler=PrioritizedSampler(5, 0.7, 0.5))
    check_same(buffer[:], flat_td([9]))
    assert buffer.sampler.priorities.tolist() == [1]
    assert {path.name for path in tmp_path.rglob("*.memmap")} == {"obs.memmap", "done.memmap"}


def _refused_until_killed(folder):
    """In a process that may fork: the owner is its child."""
    (reading, writing), owner = os.pipe(), os.fork()
    if not owner:
        buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder), sampler=PrioritizedSampler(5, 0.7, 0.5))
        buffer.extend(flat_td(range(7)))
        buffer.update_priority(torch.arange(5), torch.tensor([1.0, 2.0, 3.0, 4.0, 0.5]))
        os.write(writing, b"x")
        signal.pause()
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    with pytest.raises(RuntimeError, match=f"the process {owner}"):
        LazyMemmapStorage.open(folder)
    reader = ReplayBuffer(storage=LazyMemmapStorage.open(folder, mode="r"), sampler=PrioritizedSampler(5, 0.7, 0.5))
    assert len(reader) == 5 and reader.sampler.priorities.tolist() == [1, 2, 3, 4, 0.5]
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)


def test_another_process_is_refused_until_the_owner_is_killed(in_a_fork, tmp_path):
    in_a_fork(f"from {__name__} import _refused_until_killed\n_refused_until_killed(folder)", folder=str(tmp_path))
    buffer = reopened(tmp_path, sampler=PrioritizedSampler(5, 0.7, 0.5))
    check_same(buffer[:], flat_td([5, 6, 2, 3, 4]))
    assert buffer.sampler.priorities.tolist() == [1, 2, 3, 4, 0.5] and buffer.sampler.default_priority == 4
    assert buffer._writer._cursor == 2 and buffer.write_count == 7


def _wait(buffer, pipe):
    buffer.extend(flat_td([5]))
    pipe.send(buffer.storage.owner.is_here)
    pipe.recv()


@pytest.mark.slow
def test_workers_keep_the_folder_for_their_owner(tmp_path):
    buffer = made(tmp_path, flat_td([1, 2]))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_wait, args=(buffer, there))
    worker.start()
    assert here.recv() is False
    check_same(buffer[:], flat_td([1, 2, 5]))
    buffer.storage.close()
    with pytest.raises(RuntimeError, match="in use"):
        LazyMemmapStorage.open(tmp_path)
    here.send("go")
    worker.join(60)
    assert worker.exitcode == 0 and len(reopened(tmp_path)) == 3


# ------------------------------------------------------------------ reading only


def test_nothing_can_be_written_to_a_storage_opened_to_read(tmp_path):
    made(tmp_path, flat_td([1, 2]))
    gc.collect()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, mode="r"))
    for write in (
        lambda: buffer.extend(flat_td([3])),
        lambda: buffer.add(flat_td([3])[0]),
        lambda: buffer.__setitem__(0, flat_td([3])[0]),
        lambda: buffer.set_("obs", torch.zeros(2, 3)),
        lambda: buffer.empty(),
        lambda: buffer.storage.set(0, flat_td([3])[0]),
        lambda: buffer._writer.write_at([0], flat_td([3])),
    ):
        with pytest.raises(RuntimeError, match="mode='r'"):
            write()
    assert (len(buffer), buffer._writer._cursor, buffer.write_count) == (2, 2, 2)
    check_same(buffer[:], flat_td([1, 2]))
    buffer.sample(3)
    buffer[:]["obs"].zero_()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    again = LazyMemmapStorage.open(tmp_path, mode="r")  # any number may read
    check_same(again[:], flat_td([1, 2]))
    check_same(reopened(tmp_path)[:], flat_td([1, 2]))


def test_a_reader_sees_nothing_of_a_step_that_a_killed_process_was_in(in_a_fork, tmp_path):
    in_a_fork(
        """
        import os, signal, torch
        from interop import LazyMemmapStorage, ReplayBuffer
        from tests.interop.rows import flat_td

        if not (owner := os.fork()):
            buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
            buffer.extend(flat_td(range(5)))
            with buffer.storage.transaction():
                buffer.storage.set_run(1, torch.arange(1, 3), flat_td([8, 9]))
                buffer.storage.ring.size = 1
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(owner, 0)[1]) == -signal.SIGKILL
        """,
        folder=str(tmp_path),
    )
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    check_same(ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, mode="r"))[:], flat_td(range(5)))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    check_same(reopened(tmp_path)[:], flat_td(range(5)))


def test_other_modes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="mode"):
        LazyMemmapStorage.open(tmp_path, mode="w")
