"""The undo record: all of a step counts, or nothing, wherever it breaks off."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from interop.engine.table import Claim
from interop.shared import journal
from interop.shared.journal import Undo
from tests.interop.rows import KINDS, check_same, nested_td


class Record(Undo):
    """Of two arrays and some counters."""

    def __init__(self, memory, rows, cells=6):
        self._begin(memory, cells)
        self._watch(rows)


def record(log=4096):
    memory = np.zeros(Undo.before_log(6) + log, np.uint8)
    rows = [np.arange(40, dtype=np.float32).reshape(10, 2, 2), np.arange(10, dtype=np.int64)[::-1]]  # one is not dense
    return Record(memory, rows), memory, rows


def change(undo, rows, saved):
    undo.save(saved)
    at = slice(saved.start, saved.stop) if isinstance(saved, range) else saved
    for array in rows:
        array[at] = 99
    undo._cells[0] += 1


class Stop(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("large", [1, journal.LARGE], ids=["large", "small"])
@pytest.mark.parametrize("saved", [range(2, 5), np.array([7, 1, 7, 0])], ids=["run", "list"])
def test_a_step_that_breaks_off_is_undone(saved, large, monkeypatch):
    monkeypatch.setattr(journal, "LARGE", large)
    undo, _, rows = record()
    before = copy.deepcopy(rows)
    with pytest.raises(Stop), undo:
        change(undo, rows, saved)
        change(undo, rows, range(4, 9))
        raise Stop
    check_same([torch.from_numpy(r.copy()) for r in rows], [torch.from_numpy(r.copy()) for r in before])
    assert undo._cells[0] == 0 and not undo.active and undo.commits == 0


def test_a_step_that_ends_counts():
    undo, _, rows = record()
    with undo:
        change(undo, rows, range(2, 5))
        with undo.part():
            change(undo, rows, range(6, 7))
    assert undo._cells[0] == 2 and (rows[1] == 99).sum() == 4 and not undo.recover() and undo.commits == 1


def test_what_was_done_before_a_cut_counts():
    undo, _, rows = record()
    with pytest.raises(Stop), undo:
        change(undo, rows, range(2, 3))
        undo.cut()
        change(undo, rows, range(5, 6))
        raise Stop
    assert undo._cells[0] == 1 and (rows[1] == 99).nonzero()[0].tolist() == [2]


def test_an_interrupt_at_the_end_of_a_step_undoes_it_at_the_next_one():
    undo, _, rows = record()
    undo.__enter__()
    change(undo, rows, range(2, 5))  # and `__exit__` never came
    with undo:
        assert undo._cells[0] == 0 and rows[1].tolist() == list(range(9, -1, -1))
        change(undo, rows, range(1))
    assert undo._cells[0] == 1 and not undo._inside


def test_room_is_made_by_letting_count_what_was_done():
    undo, _, rows = record(log=8 * 40)
    assert undo.most < 10 and undo.fits(undo.most) and not undo.fits(undo.most + 2)
    with pytest.raises(Stop), undo:
        change(undo, rows, range(undo.most))
        undo.reserve(undo.most)
        change(undo, rows, range(undo.most))
        raise Stop
    assert undo._cells[0] == 1 and (rows[1] == 99).sum() == undo.most


# ------------------------------------------------------------------ storages


def named(tmp_path, capacity, **options):
    return LazyMemmapStorage(capacity, scratch_dir=tmp_path / "data", **options)


def state(buffer):
    ring = buffer.storage.ring
    counts = (len(buffer), ring.cursor, buffer.write_count, ring.written)
    rows = buffer[:].clone().unlock_() if len(buffer) else None
    return counts, rows


@given(
    st.lists(st.tuples(st.sampled_from(["extend", "add", "set"]), st.integers(1, 25)), max_size=12),
    st.sampled_from([60, 300, 8 << 20]),
)
def test_writes_in_parts_are_those_of_a_storage_without_a_journal(writes, largest):
    largest, journal.LARGEST = journal.LARGEST, largest
    page, journal._PAGE = journal._PAGE, 8
    try:
        plain, other = ReplayBuffer(storage=LazyTensorStorage(7)), ReplayBuffer(storage=LazyTensorStorage(7))
        for buffer in (plain, other):
            buffer.extend(nested_td([0, 1]))
        other.storage.share()
        fresh = 2
        for call, count in writes:
            for buffer in (plain, other):
                if call == "extend":
                    buffer.extend(nested_td(range(fresh, fresh + count)))
                elif call == "add":
                    buffer.add(nested_td([fresh])[0])
                else:
                    index = torch.arange(count) * 5 % len(buffer)
                    buffer[index] = nested_td(range(fresh, fresh + count))
            fresh += count
            assert state(plain)[0] == state(other)[0]
            check_same(state(plain)[1], state(other)[1])
            assert not other.storage.guard.journal.active
    finally:
        journal.LARGEST, journal._PAGE = largest, page


def test_rows_and_lanes_are_put_back(tmp_path):
    data = TensorDict({"a": torch.arange(24.0).reshape(2, 4, 3)}, [2, 4])
    buffer = ReplayBuffer(storage=named(tmp_path, 12, ndim=2))
    buffer.extend(data)
    before = buffer.storage[:].clone()
    with pytest.raises(Stop), buffer.storage.guard.transaction():
        buffer.storage[1, 1] = TensorDict({"a": torch.zeros(3)}, [])
        buffer.storage[torch.tensor([0, 2]), torch.tensor([1, 0])] = TensorDict({"a": torch.ones(2, 3)}, [2])
        raise Stop
    assert torch.equal(buffer.storage[:]["a"], before["a"])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_kind_are_put_back(kind, tmp_path):
    rows = KINDS[kind]
    buffer = ReplayBuffer(storage=named(tmp_path, 4))
    buffer.extend(rows([0, 1, 2, 3]))
    with pytest.raises(Stop), buffer.storage.guard.transaction():
        buffer.storage.table.write_run(Claim(0, torch.arange(2)), rows([7, 8]))
        raise Stop
    check_same(buffer[:], rows([0, 1, 2, 3]))


def test_the_counters_move_into_the_journal_and_copies_have_their_own():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    second = ReplayBuffer(storage=buffer.storage)
    buffer.extend(torch.arange(3))
    second.extend(torch.arange(1))
    buffer.storage.share()
    third = ReplayBuffer(storage=buffer.storage)
    third.extend(torch.arange(2))
    assert [each.writer.cursor for each in (buffer, second, third)] == [2, 2, 2] and buffer.write_count == 6
    twin = copy.deepcopy(buffer)
    twin.extend(torch.arange(1))
    assert twin.storage.guard.journal.memory is None and (buffer.writer.cursor, twin.writer.cursor) == (2, 3)
    assert pickle.loads(pickle.dumps(buffer)).writer.cursor == 2


def test_a_large_row_has_room(tmp_path):
    storage = named(tmp_path, 3)
    storage.set(slice(0, 3), torch.zeros(3, journal.LARGEST // 4 + 10))
    assert storage.guard.journal.most == 1
    with pytest.raises(Stop), storage.guard.transaction():
        storage.set(1, torch.ones(journal.LARGEST // 4 + 10))
        raise Stop
    assert not storage[:].any()


def _killed_in_a_write(buffer, pipe):
    with buffer.storage.lock.held(), buffer.storage.guard.transaction():
        buffer.storage.table.write_run(Claim(1, torch.arange(1, 3)), nested_td([8, 9]))
        buffer.storage.ring.size = 1
        pipe.send("written")
        multiprocessing.Event().wait()


@pytest.mark.parametrize("kind", ["named", pytest.param("tensor", marks=pytest.mark.slow)])
def test_the_parent_puts_back_what_a_started_worker_was_killed_in(kind, tmp_path):
    buffer = ReplayBuffer(storage=named(tmp_path, 4) if kind == "named" else LazyTensorStorage(4))
    buffer.extend(nested_td([0, 1, 2, 3]))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_killed_in_a_write, args=(buffer, there))
    worker.start()
    assert here.recv() == "written"
    assert buffer.storage.guard.journal.active
    worker.kill()
    worker.join(60)
    check_same(buffer[:], nested_td([0, 1, 2, 3]))
    buffer.extend(nested_td([4]))
    check_same(buffer[:], nested_td([4, 1, 2, 3]))
