"""The folder of a storage that is open is renamed, removed, or its name is another one's."""

import multiprocessing
import os
import shutil

import pytest
import torch

from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from interop.storages import memmap


def made(path, rows, **options):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=path), **options)
    buffer.extend(rows)
    return buffer


def prioritized():
    return PrioritizedSampler(8, 1.0, 1.0, eps=0.0)


def priorities_in(path):
    sampler = prioritized()
    ReplayBuffer(storage=LazyMemmapStorage.open(path, "r"), sampler=sampler, batch_size=2).sample()
    return sampler.priorities.tolist()


@pytest.mark.parametrize("name_taken", [False, True])
def test_priorities_are_kept_in_the_renamed_folder(name_taken, tmp_path):
    buffer = made(tmp_path / "a", torch.arange(4))
    (tmp_path / "a").rename(tmp_path / "b")
    if name_taken:
        other = made(tmp_path / "a", torch.arange(50, 54), sampler=prioritized())
        other.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    buffer.set_sampler(prioritized())
    buffer.update_priority(torch.arange(4), torch.full((4,), 9.0))
    assert priorities_in(tmp_path / "b")[:4] == [9.0] * 4
    assert (tmp_path / "a").exists() == name_taken
    if name_taken:
        assert priorities_in(tmp_path / "a")[:4] == [1.0, 2.0, 3.0, 4.0]


def test_a_folder_that_was_removed_is_told_by_name(tmp_path):
    buffer = made(tmp_path / "a", torch.arange(4))
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(
        RuntimeError, match=r"a was removed, or renamed.*there is no folder of that name.*storage\.lock"
    ):
        buffer.set_sampler(prioritized())
    (tmp_path / "a").mkdir()
    with pytest.raises(RuntimeError, match="the folder of that name is another one"):
        buffer.set_sampler(prioritized())
    assert not os.listdir(tmp_path / "a") and buffer[:].tolist() == [0, 1, 2, 3]


def _extend(storage):
    ReplayBuffer(storage=storage).extend(torch.arange(100, 102))


@pytest.mark.slow
def test_a_worker_that_is_started_after_it_writes_to_the_same_files(tmp_path):
    """And, though it has no sampler of its own, gives what it writes over the default priority."""
    buffer = made(tmp_path / "a", torch.arange(8), sampler=prioritized())
    buffer.update_priority(torch.arange(8), torch.arange(8.0) + 1)
    (tmp_path / "a").rename(tmp_path / "b")
    other = made(tmp_path / "a", torch.arange(50, 54))
    worker = multiprocessing.get_context("spawn").Process(target=_extend, args=(buffer.storage,))
    worker.start()
    worker.join(120)
    assert worker.exitcode == 0 and other[:].tolist() == [50, 51, 52, 53]
    assert buffer[:].tolist() == [100, 101, 2, 3, 4, 5, 6, 7]
    assert priorities_in(tmp_path / "b") == [8.0, 8.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_worker_is_not_given_another_storage_to_read(tmp_path, monkeypatch):
    made(tmp_path / "a", torch.arange(4)).storage.close()
    reader = LazyMemmapStorage.open(tmp_path / "a", "r")
    monkeypatch.setattr(memmap, "starting_a_worker", lambda: True)
    give, given = reader.__reduce_ex__(4)
    assert give(*given)[:].tolist() == [0, 1, 2, 3]
    (tmp_path / "a").rename(tmp_path / "b")
    made(tmp_path / "a", torch.arange(50, 54))
    with pytest.raises(RuntimeError, match="another storage by now"):
        give(*given)


def test_a_worker_does_not_take_up_a_folder_that_was_renamed_while_it_started(tmp_path):
    buffer = made(tmp_path / "a", torch.arange(4))
    owner = buffer.storage.owner
    (tmp_path / "a").rename(tmp_path / "b")
    made(tmp_path / "a", torch.arange(50, 54))
    late = LazyMemmapStorage.__new__(LazyMemmapStorage)
    with pytest.raises(RuntimeError, match=r"was renamed to .*b while a worker started"):
        late.__setstate__({"owner": owner})
