"""Who may write to the folder of a storage, what a reader has of it."""

import copy
import gc
import os
import shutil
import signal
import threading

import pytest
import torch

from interop import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer
from tests.interop.rows import check_same, flat_td, nested_td, plain_tensor
from tests.interop.storages.named_folders import made, reopened


def prioritized():
    return PrioritizedSampler(5, 1.0, 1.0, eps=0.0)


def contents(path):
    return {each.relative_to(path).as_posix(): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize(("shared", "other_shared"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("written", [True, False])
def test_a_folder_in_use_is_refused_and_not_touched(shared, other_shared, written, tmp_path):
    def storage(shared):
        return LazyMemmapStorage(5, scratch_dir=tmp_path / "a", existsok=True, shared_init=shared)

    if not (shared or written):  # it does not have the folder yet
        return
    buffer = ReplayBuffer(storage=storage(shared))
    if written:
        buffer.extend(flat_td([1, 2]))
    before = contents(tmp_path / "a")
    for other in (
        lambda: LazyMemmapStorage.open(tmp_path / "a").table.rows.tensors,
        lambda: ReplayBuffer(storage=storage(other_shared)).extend(flat_td([3])),
    ):
        with pytest.raises(RuntimeError, match=f"in use by another storage of this process .pid {os.getpid()}"):
            other()
    assert contents(tmp_path / "a") == before
    buffer.extend(flat_td([4]))
    check_same(buffer[:], flat_td([1, 2, 4] if written else [4]))
    buffer.storage.close()
    buffer.storage.close()
    for write in (lambda: buffer.extend(flat_td([3])), buffer.empty, lambda: buffer.__setitem__(0, flat_td([3])[0])):
        with pytest.raises(RuntimeError, match="closed here"):
            write()
    check_same(reopened(tmp_path / "a")[:], flat_td([1, 2, 4] if written else [4]))


def test_a_storage_that_is_there_is_made_anew_only_with_existsok(tmp_path):
    made(tmp_path, nested_td(range(5)), sampler=prioritized())
    gc.collect()
    for shared in (False, True):
        with pytest.raises(RuntimeError, match=r"already exists"):
            ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, shared_init=shared)).extend(flat_td([3]))
    check_same(reopened(tmp_path)[:], nested_td(range(5)))
    gc.collect()
    buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True))
    buffer.extend(flat_td([9]))
    del buffer
    buffer = reopened(tmp_path, sampler=prioritized())
    check_same(buffer[:], flat_td([9]))
    assert buffer.sampler.priorities.tolist() == [1]
    assert {path.name for path in tmp_path.rglob("*.memmap")} == {"obs.memmap", "done.memmap"}


def test_the_folder_of_an_unwritten_shared_storage_goes_with_it(tmp_path):
    def storage():
        return LazyMemmapStorage(5, scratch_dir=tmp_path / "a" / "b", existsok=True, shared_init=True)

    ReplayBuffer(storage=storage())  # gone at once
    gc.collect()
    assert not (tmp_path / "a").exists()
    buffer = ReplayBuffer(storage=storage())
    buffer.storage.close()
    with pytest.raises(RuntimeError, match="closed here"):
        buffer.extend(plain_tensor([1]))
    assert not (tmp_path / "a").exists() and not buffer.storage.initialized


def _refused_until_killed(folder):
    """In a process that may fork: the owner is its child."""
    (reading, writing), owner = os.pipe(), os.fork()
    if not owner:
        buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder), sampler=prioritized())
        buffer.extend(flat_td(range(7)))
        buffer.update_priority(torch.arange(5), torch.tensor([1.0, 2.0, 3.0, 4.0, 0.5]))
        os.write(writing, b"x")
        signal.pause()
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    with pytest.raises(RuntimeError, match=f"the process {owner}"):
        LazyMemmapStorage.open(folder)
    reader = ReplayBuffer(storage=LazyMemmapStorage.open(folder, mode="r"), sampler=prioritized())
    assert len(reader) == 5 and reader.sampler.priorities.tolist() == [1, 2, 3, 4, 0.5]
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)


def test_another_process_is_refused_until_the_owner_is_killed(in_a_fork, tmp_path):
    in_a_fork(f"from {__name__} import _refused_until_killed\n_refused_until_killed(folder)", folder=str(tmp_path))
    buffer = reopened(tmp_path, sampler=prioritized())
    check_same(buffer[:], flat_td([5, 6, 2, 3, 4]))
    assert buffer.sampler.priorities.tolist() == [1, 2, 3, 4, 0.5] and buffer.sampler.default_priority == 4
    assert buffer.writer.cursor == 2 and buffer.write_count == 7


# ------------------------------------------------------------------ reading only


def test_nothing_can_be_written_to_a_storage_opened_to_read(tmp_path):
    made(tmp_path, flat_td([1, 2]))
    gc.collect()
    before = contents(tmp_path)
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, mode="r"))
    for write in (
        lambda: buffer.extend(flat_td([3])),
        lambda: buffer.add(flat_td([3])[0]),
        lambda: buffer.__setitem__(0, flat_td([3])[0]),
        lambda: buffer.set_("obs", torch.zeros(2, 3)),
        lambda: buffer.empty(),
        lambda: buffer.storage.set(0, flat_td([3])[0]),
        lambda: buffer.writer.write_at([0], flat_td([3])),
    ):
        with pytest.raises(RuntimeError, match="mode='r'"):
            write()
    assert (len(buffer), buffer.writer.cursor, buffer.write_count) == (2, 2, 2)
    check_same(buffer[:], flat_td([1, 2]))
    buffer.sample(3)
    buffer[:]["obs"].zero_()
    assert contents(tmp_path) == before
    check_same(LazyMemmapStorage.open(tmp_path, mode="r")[:], flat_td([1, 2]))  # any number may read
    check_same(reopened(tmp_path)[:], flat_td([1, 2]))
    with pytest.raises(ValueError, match="mode"):
        LazyMemmapStorage.open(tmp_path, mode="w")


def test_counters_stay_those_of_opening_and_rows_and_priorities_are_those_in_the_files(tmp_path):
    owner = made(tmp_path, plain_tensor([1, 2, 3]), sampler=prioritized())
    owner.update_priority(torch.arange(3), torch.tensor([1.0, 2.0, 3.0]))
    storage = LazyMemmapStorage.open(tmp_path, "r")
    reader = ReplayBuffer(storage=storage)
    check_same(reader[:], plain_tensor([1, 2, 3]))
    owner.extend(plain_tensor([4, 5, 6]))
    owner.update_priority(torch.tensor([4, 1]), torch.tensor([100.0, 50.0]))  # the highest is behind the reader's rows
    assert (len(reader), reader.write_count, reader.writer.cursor) == (3, 3, 3)
    check_same(reader[:], plain_tensor([6, 2, 3]))
    sampler, again = prioritized(), prioritized()
    ReplayBuffer(storage=storage, sampler=sampler, batch_size=4).sample()
    assert sampler.priorities.tolist()[:3] == [3.0, 50.0, 3.0] and sampler.default_priority >= 50.0
    other = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, "r"), sampler=again, batch_size=4)
    other.sample()
    assert (len(other), other.write_count, other.writer.cursor) == (5, 6, 1)
    assert again.priorities.tolist() == [3.0, 50.0, 3.0, 3.0, 100.0] and again.default_priority == 100.0


def test_a_reader_comes_through_beside_one_that_writes_without_pause(tmp_path):
    buffer, over = made(tmp_path, torch.zeros(8), capacity=8), threading.Event()

    def write():
        while not over.is_set():
            buffer.extend(torch.zeros(4))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(20):
            before = buffer.write_count
            reader = LazyMemmapStorage.open(tmp_path, "r")
            assert len(reader) == 8 and reader.ring.written % 4 == 0
            assert before <= reader.ring.written <= buffer.write_count
    finally:
        over.set()
        thread.join()


def test_a_reader_sees_nothing_of_a_write_that_a_killed_process_was_in(in_a_fork, tmp_path):
    in_a_fork(
        """
        import os, signal, torch
        from interop import LazyMemmapStorage, ReplayBuffer
        from interop.engine.table import Claim
        from tests.interop.rows import flat_td

        if not (owner := os.fork()):
            buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
            buffer.extend(flat_td(range(5)))
            with buffer.storage.guard.transaction():
                buffer.storage.table.write_run(Claim(1, torch.arange(1, 3)), flat_td([8, 9]))
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(owner, 0)[1]) == -signal.SIGKILL
        """,
        folder=str(tmp_path),
    )
    before = contents(tmp_path)
    check_same(ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, mode="r"))[:], flat_td(range(5)))
    assert contents(tmp_path) == before
    check_same(reopened(tmp_path)[:], flat_td(range(5)))


@pytest.mark.parametrize("name_taken", [False, True])
def test_a_folder_that_was_renamed_or_removed_is_named(name_taken, tmp_path):
    buffer = made(tmp_path / "a", torch.arange(4))
    (tmp_path / "a").rename(tmp_path / "b")
    if name_taken:
        (tmp_path / "a").mkdir()
    with pytest.raises(RuntimeError, match="a was removed or renamed"):
        buffer.set_sampler(prioritized())
    assert buffer.storage.cleanup() is False and buffer[:].tolist() == [0, 1, 2, 3]
    assert not name_taken or not os.listdir(tmp_path / "a")


@pytest.mark.parametrize("state", ["without rows", "with rows", "closed without rows"])
def test_whoever_may_only_read_changes_no_file_by_any_write_or_load(state, tmp_path):
    source = ReplayBuffer(storage=LazyTensorStorage(5))
    source.extend(flat_td([7, 8]))
    source.dumps(tmp_path / "c")
    source.storage.dumps(tmp_path / "s")
    maker = LazyMemmapStorage(5, scratch_dir=tmp_path / "a", shared_init=True)
    if state == "with rows":
        maker.set(slice(0, 1), flat_td([1]))
    shutil.copytree(tmp_path / "a", tmp_path / "left")  # as a maker leaves it that is killed now
    storage = maker
    if state == "closed without rows":
        maker.close()
    else:
        storage = LazyMemmapStorage.open(tmp_path / "left", mode="r")
    before = contents(tmp_path / "left"), contents(tmp_path / "a")
    buffer = ReplayBuffer(storage=storage)
    for write in (
        lambda: storage.loads(tmp_path / "s"),
        lambda: storage.load_state_dict(source.storage.state_dict()),
        lambda: buffer.loads(tmp_path / "c"),
        lambda: buffer.load_state_dict(source.state_dict()),
        lambda: buffer.extend(flat_td([3])),
        lambda: buffer.add(flat_td([3])[0]),
        lambda: storage.set(0, flat_td([3])[0]),
        buffer.empty,
        storage.empty,
    ):
        with pytest.raises(RuntimeError, match=r"opened with mode='r'|was closed here"):
            write()
    assert (contents(tmp_path / "left"), contents(tmp_path / "a")) == before
    check_same(len(storage), int(state == "with rows"))
    LazyMemmapStorage.open(tmp_path / "left")


def test_a_copy_of_a_compilable_storage_is_not_shared_either(tmp_path):
    storage = copy.deepcopy(LazyMemmapStorage(5, scratch_dir=tmp_path / "a", compilable=True))
    storage.set(slice(0, 2), nested_td([1, 2]))
    assert storage.compilable and not storage.table.place.shared(storage).meets_others
