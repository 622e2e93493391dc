"""Storages opened to be read beside a process that goes on writing."""

import threading
import time

import numpy as np
import pytest
import torch

from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from interop.shared.memory import Memory
from interop.shared.undo import settle
from interop.storages import opening
from tests.interop.rows import check_same, plain_tensor


def made(path, rows, capacity=8, **options):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=path), **options)
    buffer.extend(rows)
    return buffer


def prioritized(capacity=8):
    return PrioritizedSampler(capacity, 1.0, 1.0, eps=0.0)


class Writing(threading.Thread):
    """Makes steps of 20 ms, one right after the other, each of which adds 4 to the count; what is saved in them differs."""

    def __init__(self, storage):
        super().__init__()
        self.storage, self.over, self.steps = storage, False, 0

    def run(self):
        storage = self.storage
        with storage.lock.turn(), storage.transaction():
            while not self.over:
                for start, count in ((0, 4), (4, 1), (5, 3))[:: 1 + self.steps % 2 * 2]:
                    storage.journal.save(range(start, start + count))
                    time.sleep(5e-3)
                storage.rows.tensors[0][:] = self.steps
                storage.ring.wrote_run(storage.ring.cursor, 4, 8)
                storage.journal.cut()
                self.steps += 1

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over = True
        self.join()


def test_a_reader_comes_through_beside_one_that_writes_without_pause(tmp_path):
    buffer = made(tmp_path, torch.zeros(8))
    with Writing(buffer.storage) as writing:
        for _ in range(4):
            before = writing.steps
            reader = LazyMemmapStorage.open(tmp_path, "r")
            assert len(reader) == 8 and reader.ring.written % 4 == 0
            assert 8 + 4 * before <= reader.ring.written <= 8 + 4 * writing.steps
    assert writing.steps > 4


def test_a_step_that_goes_on_does_not_count_and_one_that_stands_still_is_put_back(tmp_path, monkeypatch):
    buffer = made(tmp_path, torch.zeros(8))
    storage = buffer.storage

    def halves():
        storage.journal.save(range(4))
        storage.rows.tensors[0][:4] = 7.0
        storage.ring.wrote_run(0, 4, 8)

    with storage.transaction():
        halves()
        reader = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, "r"))
        assert not reader[:].any() and (reader.storage.ring.written, reader.write_count) == (8, 8)
        looks = []

        def looked(seconds):
            if not looks:  # it goes on with another step, of which other rows are saved
                storage.journal.cut()
                storage.journal.save(np.array([6, 1]))
                storage.rows.tensors[0][6] = 8.0
                storage.ring.wrote_run(4, 3, 8)
            looks.append(seconds)

        monkeypatch.setattr(time, "sleep", looked)
        reader = LazyMemmapStorage.open(tmp_path, "r")
        monkeypatch.undo()
        assert looks and reader.ring.written == 12 and reader[:].tolist() == [7.0] * 4 + [0.0] * 2 + [8.0, 0.0]
    assert buffer.storage.ring.written == 15


@pytest.mark.parametrize("armed", [-5, 3, 10**15])
def test_damaged_words_lead_nowhere(armed, tmp_path, monkeypatch):
    path = tmp_path / "record"
    words = np.zeros(512, np.int64)
    words[:6] = [5, armed, armed, 3, 4, 1]
    words.tofile(path)
    memory = Memory(4096, path, private=True)
    monkeypatch.setattr("interop.shared.undo._PATIENCE", 0.01)
    settle(memory, 6)
    assert memory.bytes.size == 4096 and (np.fromfile(path, np.int64) == words).all()


def test_counters_stay_those_of_opening_and_rows_are_those_in_the_files(tmp_path):
    owner = made(tmp_path, plain_tensor([1, 2, 3]), capacity=4)
    reader = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, "r"))
    check_same(reader[:], plain_tensor([1, 2, 3]))
    owner.extend(plain_tensor([4, 5, 6]))
    assert (len(reader), reader.write_count, reader._writer._cursor) == (3, 3, 3)
    check_same(reader[:], plain_tensor([5, 6, 3]))
    again = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, "r"))
    assert (len(again), again.write_count, again._writer._cursor) == (4, 6, 2)


def test_priorities_beside_one_that_goes_on_giving_some(tmp_path):
    owner = made(tmp_path, torch.arange(4), sampler=prioritized())
    owner.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    reader = LazyMemmapStorage.open(tmp_path, "r")
    owner.extend(torch.arange(4, 6))
    owner.update_priority(torch.tensor([5, 0]), torch.tensor([100.0, 50.0]))  # the highest is behind the reader's rows
    sampler = prioritized()
    ReplayBuffer(storage=reader, sampler=sampler, batch_size=4).sample()
    assert sampler.priorities.tolist()[:4] == [50.0, 2.0, 3.0, 4.0] and sampler.default_priority >= 50.0
    again = prioritized()
    ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, "r"), sampler=again, batch_size=4).sample()
    assert again.priorities.tolist()[:6] == [50.0, 2.0, 3.0, 4.0, 4.0, 100.0] and again.default_priority == 100.0


def test_priorities_in_the_middle_of_being_given(tmp_path):
    owner = made(tmp_path, torch.arange(4), sampler=prioritized())
    owner.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    kept = owner.storage.priorities
    with kept:
        kept.save(np.arange(2))
        kept._values[:2] = ~np.full(2, 9.0).view(np.int64)
        sampler = prioritized()
        ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, "r"), sampler=sampler, batch_size=4).sample()
    assert sampler.priorities.tolist()[:4] == [1.0, 2.0, 3.0, 4.0]


def test_a_storage_that_takes_the_place_of_the_one_being_opened_is_opened(tmp_path, monkeypatch):
    owner = made(tmp_path, torch.zeros(5), capacity=5)
    check, others = opening.check_size, []

    def replaced(path, size):
        if not others:
            owner.storage.close()
            others.append(ReplayBuffer(storage=LazyMemmapStorage(9, scratch_dir=tmp_path, existsok=True)))
            others[0].extend(torch.ones(7))
        check(path, size)

    monkeypatch.setattr(opening, "check_size", replaced)
    reader = LazyMemmapStorage.open(tmp_path, "r")
    assert reader.max_size == 9 and reader[:].tolist() == [1.0] * 7


def test_a_storage_that_was_closed_says_so_and_writes_nothing(tmp_path):
    buffer = made(tmp_path, torch.arange(4), sampler=prioritized())
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    buffer.storage.close()
    buffer.storage.close()
    for write in (lambda: buffer.add(torch.tensor(1)), buffer.empty, lambda: buffer.__setitem__(0, torch.tensor(1))):
        with pytest.raises(RuntimeError, match="was closed here"):
            write()
    buffer.set_sampler(prioritized())
    buffer.storage.priorities.forget(slice(None))
    again = prioritized()
    ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path), sampler=again, batch_size=2).sample()
    assert again.priorities.tolist()[:4] == [1.0, 2.0, 3.0, 4.0]
