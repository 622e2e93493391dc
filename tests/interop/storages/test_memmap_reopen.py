"""LazyMemmapStorage.open: what is in a folder goes on; who may write to it; what damage and unfinished work look like."""

import copy
import gc
import json
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import zlib

import pytest
import torch
from tensordict import TensorDict, tensorclass

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from interop.storages import folder
from tests.interop.rows import KINDS, check_same, flat_td, nested_td, plain_tensor


def made(path, rows, capacity=5, **options):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(capacity, scratch_dir=path), **options)
    if rows is not None:
        buffer.extend(rows)
    return buffer


def reopened(path, **options):
    gc.collect()
    return ReplayBuffer(storage=LazyMemmapStorage.open(path), **options)


# ------------------------------------------------------------------ what goes on


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [3, 5, 12])
def test_rows_length_cursor_and_count_are_those_of_before(kind, count, tmp_path):
    rows = KINDS[kind]
    other = ReplayBuffer(storage=LazyTensorStorage(5))
    for buffer in (made(tmp_path, None), other):
        for start in range(0, count, 3):
            buffer.extend(rows(range(start, min(start + 3, count))))
    del buffer
    buffer = reopened(tmp_path)
    for _ in range(2):
        check_same(buffer[:], other[:])
        assert (len(buffer), buffer.write_count, buffer._writer._cursor) == (
            len(other),
            other.write_count,
            other._writer._cursor,
        )
        assert buffer.storage._ledger.end == other.storage._ledger.end
        for each in (buffer, other):
            each.extend(rows([20, 21]))
            each.extend(rows([22]))


def test_a_storage_of_several_item_dims_goes_on(tmp_path):
    data = TensorDict({"a": torch.arange(24.0).reshape(3, 4, 2)}, [3, 4])
    buffer = ReplayBuffer(storage=LazyMemmapStorage(13, scratch_dir=tmp_path, ndim=2))
    buffer.extend(data)
    del buffer
    buffer = reopened(tmp_path)
    assert buffer.storage.ndim == 2 and buffer.storage.max_size == 15 and len(buffer) == 12
    check_same(buffer[:].clone().unlock_()["a"].as_subclass(torch.Tensor), data["a"])
    buffer.extend(data)
    assert buffer.write_count == 8 and buffer._writer._cursor == 3


def test_slices_know_where_the_newest_row_is(tmp_path):
    def steps(ids):
        return TensorDict({"id": ids, ("next", "done"): (ids % 4 == 3)[:, None]}, [len(ids)])

    made(tmp_path, steps(torch.arange(6)), capacity=8).extend(steps(torch.arange(6, 11)))
    buffer = reopened(tmp_path, sampler=SliceSampler(num_slices=20, end_key=("next", "done")), batch_size=40)
    ids = buffer.sample()["id"].reshape(20, 2)
    assert ((ids[:, 1] - ids[:, 0]) == 1).all() and set(ids.flatten().tolist()) <= set(range(3, 11))


def test_tensordicts_with_an_index_go_on(tmp_path):
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(5, scratch_dir=tmp_path), writer=TensorDictRoundRobinWriter()
    )
    buffer.extend(flat_td(range(7)))
    del buffer
    gc.collect()
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(tmp_path), writer=TensorDictRoundRobinWriter())
    assert buffer.extend(flat_td([7])).tolist() == [2] and buffer[:]["index"].tolist() == list(range(5))


def test_the_highest_ranks_are_of_what_is_stored(tmp_path):
    def ranked(values):
        return TensorDict({"rank": torch.tensor(values)}, [len(values)])

    def writer():
        return TensorDictMaxValueWriter(rank_key="rank")

    made(tmp_path, ranked([3.0, 1.0, 2.0, 5.0, 4.0, 0.0]), writer=writer())
    buffer = reopened(tmp_path, writer=writer())
    assert buffer.extend(ranked([0.5, 1.5])).tolist() == [-1, 1] and buffer[1]["rank"] == 1.5


def test_the_next_writer_starts_anew_as_in_memory(tmp_path):
    made(tmp_path, plain_tensor([1, 2]))
    buffer = reopened(tmp_path)
    buffer.set_writer(RoundRobinWriter())
    assert buffer._writer._cursor == 0 and buffer.write_count == 0


def test_it_is_the_writer_that_wrote_last_whose_cursor_goes_on(tmp_path):
    first = made(tmp_path, plain_tensor([1, 2, 3]))
    second = ReplayBuffer(storage=first.storage)
    second.extend(plain_tensor([4]))
    first.extend(plain_tensor([5]))
    del first, second
    assert (reopened(tmp_path)._writer._cursor, reopened(tmp_path).write_count) == (4, 4)


def test_an_empty_buffer_stays_empty(tmp_path):
    buffer = made(tmp_path, plain_tensor([1, 2, 3]))
    buffer.empty()
    del buffer
    buffer = reopened(tmp_path)
    assert (len(buffer), buffer.write_count, buffer._writer._cursor) == (0, 0, 0)
    buffer.extend(plain_tensor([4]))
    check_same(buffer[:], plain_tensor([4]))


def test_a_folder_can_move(tmp_path):
    made(tmp_path / "one", nested_td([1, 2]), sampler=PrioritizedSampler(5, 0.7, 0.5))
    gc.collect()
    (tmp_path / "one").rename(tmp_path / "two")
    check_same(reopened(tmp_path / "two")[:], nested_td([1, 2]))


def test_generations_are_not_kept(tmp_path):
    made(tmp_path, plain_tensor([1]), writer=RoundRobinWriter(track_generations=True))
    with pytest.raises(RuntimeError, match="not kept"):
        reopened(tmp_path, writer=RoundRobinWriter(track_generations=True))


def test_tensordict_reads_the_folder(tmp_path):
    made(tmp_path, nested_td([1, 2]), sampler=PrioritizedSampler(5, 0.7, 0.5))
    check_same(
        TensorDict.load_memmap(tmp_path)[:2].apply(lambda leaf: torch.as_tensor(leaf).clone()), nested_td([1, 2])
    )


# ------------------------------------------------------------------ priorities


KINDS_OF_PRIORITIES = {
    "highest ever": {},
    "highest stored": {"max_priority_within_buffer": True},
    "double": {"dtype": torch.float64},
}


@pytest.mark.parametrize(
    ("kind", "late"), [("highest ever", False), ("highest ever", True), ("highest stored", False), ("double", True)]
)
def test_priorities_are_those_of_the_last_update(kind, late, tmp_path):
    def sampler():
        return PrioritizedSampler(8, 0.7, 0.5, **KINDS_OF_PRIORITIES[kind])

    rng = random.Random(0)
    buffer = made(tmp_path, flat_td([0, 1]), capacity=8, **({} if late else {"sampler": sampler()}))
    if late:
        buffer.set_sampler(sampler())
    for step in range(3):
        for _ in range(5):
            buffer.extend(flat_td([rng.randrange(9) for _ in range(rng.randint(1, 3))]))
            chosen = torch.tensor(rng.sample(range(len(buffer)), 2))
            buffer.update_priority(chosen, torch.tensor([rng.choice([0.5, 3.0]), rng.choice([0.125, 1.0, 7.0])]))
        if step == 1:
            buffer.empty()
            buffer.extend(flat_td([1, 2, 3]))
        wanted, default = buffer.sampler.priorities, buffer.sampler.default_priority
        torch.manual_seed(step)
        drawn = buffer.sample(20)
        del buffer
        buffer = reopened(tmp_path, sampler=sampler())
        assert torch.equal(buffer.sampler.priorities, wanted) and buffer.sampler.default_priority == default
        torch.manual_seed(step)
        check_same(buffer.sample(20), drawn)


def test_a_row_without_a_priority_of_its_own_has_the_default_one(tmp_path):
    buffer = made(tmp_path, flat_td(range(5)), sampler=PrioritizedSampler(5, 0.7, 0.5))
    buffer.update_priority(torch.arange(5), torch.tensor([1.0, 2.0, 9.0, 4.0, 5.0]))
    buffer._writer.extend(flat_td([7]))  # and the process is killed before the sampler is told
    del buffer
    buffer = reopened(tmp_path, sampler=PrioritizedSampler(5, 0.7, 0.5))
    assert buffer.sampler.priorities.tolist() == [9, 2, 9, 4, 5]


def test_rows_written_without_a_prioritized_sampler_have_the_default_priority(tmp_path):
    buffer = made(tmp_path, flat_td(range(5)), sampler=PrioritizedSampler(5, 0.7, 0.5))
    buffer.update_priority(torch.arange(5), torch.tensor([1.0, 2.0, 9.0, 4.0, 5.0]))
    del buffer
    reopened(tmp_path).extend(flat_td([8]))
    buffer = reopened(tmp_path, sampler=PrioritizedSampler(5, 0.7, 0.5))
    assert buffer.sampler.priorities.tolist() == [9, 2, 9, 4, 5]


def test_a_sampler_put_in_begins_with_its_own_priorities(tmp_path):
    buffer = made(tmp_path, flat_td(range(3)), sampler=PrioritizedSampler(5, 0.7, 0.5))
    buffer.update_priority(torch.arange(3), 4.0)
    buffer.set_sampler(PrioritizedSampler(5, 0.7, 0.5))
    before = buffer.sampler
    assert before.priorities.tolist() == [1, 1, 1]
    buffer.set_sampler(PrioritizedSampler(5, 0.7, 0.5))
    buffer.update_priority(torch.tensor([1]), 0.5)
    before.update_priority(torch.tensor([2]), 8.0)  # of a sampler that is not joined any more
    del buffer, before
    assert reopened(tmp_path, sampler=PrioritizedSampler(5, 0.7, 0.5)).sampler.priorities.tolist() == [1, 0.5, 1]


def test_slices_by_priority_go_on(tmp_path):
    def steps(ids):
        return TensorDict({"id": ids, ("next", "done"): (ids % 4 == 3)[:, None]}, [len(ids)])

    def sampler():
        return PrioritizedSliceSampler(8, 0.7, 0.5, num_slices=8, end_key=("next", "done"))

    buffer = made(tmp_path, steps(torch.arange(8)), capacity=8, sampler=sampler(), batch_size=16)
    buffer.update_priority(torch.arange(8), torch.arange(8.0) + 1)
    torch.manual_seed(3)
    drawn = buffer.sample()
    del buffer
    buffer = reopened(tmp_path, sampler=sampler(), batch_size=16)
    torch.manual_seed(3)
    check_same(buffer.sample(), drawn)


def test_copies_of_a_buffer_do_not_write_to_its_folder(tmp_path):
    buffer = made(tmp_path, flat_td(range(3)), sampler=PrioritizedSampler(5, 0.7, 0.5))
    twin = copy.deepcopy(buffer)
    twin.extend(flat_td([9]))
    twin.update_priority(torch.tensor([0]), 9.0)
    del buffer
    buffer = reopened(tmp_path, sampler=PrioritizedSampler(5, 0.7, 0.5))
    assert len(buffer) == 3 and buffer.sampler.priorities.tolist() == [1, 1, 1] and twin.storage.scratch_dir is None


# ------------------------------------------------------------------ who writes


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


def in_another_process(code, **values):
    given = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    program = "import os, signal, torch\nfrom tests.interop.rows import flat_td\nfrom interop import *\n"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", f"{program}{given}\n{textwrap.dedent(code)}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_another_process_is_refused_until_the_owner_is_killed(tmp_path):
    code = """
        buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder), sampler=PrioritizedSampler(5, 0.7, 0.5))
        buffer.extend(flat_td(range(7)))
        buffer.update_priority(torch.arange(5), torch.tensor([1., 2., 3., 4., 0.5]))
        print(os.getpid(), flush=True)
        input()
    """
    with in_another_process(code, folder=str(tmp_path)) as owner:
        pid = int(owner.stdout.readline())
        with pytest.raises(RuntimeError, match=f"the process {pid}"):
            LazyMemmapStorage.open(tmp_path)
        reader = ReplayBuffer(
            storage=LazyMemmapStorage.open(tmp_path, mode="r"), sampler=PrioritizedSampler(5, 0.7, 0.5)
        )
        assert len(reader) == 5 and reader.sampler.priorities.tolist() == [1, 2, 3, 4, 0.5]
        owner.kill()
    buffer = reopened(tmp_path, sampler=PrioritizedSampler(5, 0.7, 0.5))
    check_same(buffer[:], flat_td([5, 6, 2, 3, 4]))
    assert buffer.sampler.priorities.tolist() == [1, 2, 3, 4, 0.5] and buffer.sampler.default_priority == 4
    assert buffer._writer._cursor == 2 and buffer.write_count == 7


def _wait(buffer, pipe):
    buffer.extend(flat_td([5]))
    pipe.send(buffer.storage._owner.is_here)
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


def test_a_reader_sees_nothing_of_a_step_that_a_killed_process_was_in(tmp_path):
    code = """
        buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
        buffer.extend(flat_td(range(5)))
        with buffer.storage._step():
            buffer.storage.set_run(1, torch.arange(1, 3), flat_td([8, 9]))
            buffer.storage._length.value = 1
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with in_another_process(code, folder=str(tmp_path)) as owner:
        owner.wait(120)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    check_same(ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path, mode="r"))[:], flat_td(range(5)))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    check_same(reopened(tmp_path)[:], flat_td(range(5)))


def test_other_modes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="mode"):
        LazyMemmapStorage.open(tmp_path, mode="w")


# ------------------------------------------------------------------ unfinished, damaged


def test_a_folder_without_a_storage_is_not_found(tmp_path):
    for folder_ in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="no storage"):
            LazyMemmapStorage.open(folder_)
    assert list(tmp_path.iterdir()) == []


def test_what_an_unfinished_creation_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("kept")

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folder.Files, "put_in_place", killed)
        patch.setattr(folder.Files, "remove", lambda self: False)
        patch.setattr(folder.Owner, "list", _once(folder.Owner.list, 3))
        with pytest.raises(Killed):
            made(tmp_path, nested_td([1, 2]))
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"obs.memmap", "reward.memmap", "storage.state", "mine.txt"} <= left and "storage.json" not in left
    with pytest.raises(FileNotFoundError):
        LazyMemmapStorage.open(tmp_path)
    buffer = made(tmp_path, flat_td([3]))
    check_same(buffer[:], flat_td([3]))
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "mine.txt", "obs.memmap", "done.memmap", "meta.json", *folder.OWN[:3],
    }  # fmt: skip


def _once(method, times):
    """The method for its first calls, later nothing."""
    calls = []

    def called(self, *given):
        calls.append(0)
        return method(self, *given) if len(calls) <= times else None

    return called


def test_names_in_the_list_lead_nowhere_else(tmp_path):
    (tmp_path / "outside").write_text("kept")
    inside = tmp_path / "data"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path)
    text = json.dumps({"pid": 1, "files": ["../outside", str(tmp_path / "outside"), "link/outside"]})
    (inside / "storage.lock").write_text(f"{zlib.crc32(text.encode()):08x} {text}\n")
    made(inside, flat_td([1]))
    assert (tmp_path / "outside").read_text() == "kept"


def test_a_storage_that_was_never_written_can_be_made_again(tmp_path):
    buffer = made(tmp_path, flat_td([1]))
    buffer.storage._journal._head[4] = 0  # as if the first step had not been ended
    del buffer
    check_same(made(tmp_path, flat_td([2]))[:], flat_td([2]))


@pytest.mark.parametrize("name", ["obs.memmap", "storage.state", "storage.json", "storage.priorities"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long", "link"])
def test_damaged_files_are_told_by_name(name, damage, tmp_path):
    made(tmp_path, flat_td(range(5)), sampler=PrioritizedSampler(5, 0.7, 0.5))
    gc.collect()
    path = tmp_path / name
    data = path.read_bytes()
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage != "missing":
        path.write_bytes({"empty": b"", "short": data[:-3], "long": data + b"x"}[damage])
    wanted = FileNotFoundError if (name, damage) == ("storage.json", "missing") else (CheckpointCorrupt, OSError)
    if (name, damage) == ("storage.priorities", "missing"):  # as if no sampler had ever had any
        assert len(LazyMemmapStorage.open(tmp_path)) == 5
        return
    if (name, damage) == ("storage.json", "long"):
        wanted = CheckpointCorrupt
    with pytest.raises(wanted, match=name):
        LazyMemmapStorage.open(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(capacity=6),
        lambda d: d.update(capacity="5"),
        lambda d: d.update(rows=2**60),
        lambda d: d.update(lanes=[2]),
        lambda d: d.update(format=2),
        lambda d: d["files"].pop("obs.memmap"),
        lambda d: d["layout"]["leaves"].pop(),
        lambda d: d["layout"]["leaves"][0].__setitem__(2, "__import__('os')"),
        lambda d: d["layout"]["leaves"][0][0].__setitem__(0, "../x"),
        lambda d: d.pop("layout"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(change, tmp_path):
    made(tmp_path, flat_td(range(5)))
    gc.collect()
    path = tmp_path / "storage.json"
    described = json.loads(path.read_text())["storage"]
    change(described)
    path.write_text(folder._sealed(described))
    with pytest.raises((CheckpointCorrupt, ValueError)):
        LazyMemmapStorage.open(tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointCorrupt, match=r"storage\.json"):
        LazyMemmapStorage.open(tmp_path)


@pytest.mark.parametrize("cell", range(6))
@pytest.mark.parametrize("value", [-1, 7, 2**62])
def test_counters_out_of_range_are_refused(cell, value, tmp_path):
    buffer = made(tmp_path, flat_td(range(4)))
    buffer.storage._journal._cells[cell] = value
    del buffer
    gc.collect()
    harmless = {(1, 7), (1, 2**62), (3, -1), (3, 7), (3, 2**62), (5, -1), (5, 7), (5, 2**62)}
    if (cell, value) in harmless:
        LazyMemmapStorage.open(tmp_path)
        return
    with pytest.raises(CheckpointCorrupt):
        LazyMemmapStorage.open(tmp_path)


def test_a_class_of_items_has_to_be_known(tmp_path):
    @tensorclass
    class Local:
        a: torch.Tensor

    made(tmp_path, Local(a=torch.zeros(2), batch_size=[2]))
    gc.collect()
    with pytest.raises(CheckpointMismatch, match="Local"):
        LazyMemmapStorage.open(tmp_path)


@pytest.mark.parametrize("key", ["storage.json", "storage.lock", ("storage.state", "a")])
def test_keys_that_are_names_of_its_own_files_are_no_trouble(key, tmp_path):
    data = TensorDict({}, [2])
    data[key] = torch.ones(2)
    if isinstance(key, tuple):
        with pytest.raises(ValueError, match="rename"):
            made(tmp_path, data)
        assert list(tmp_path.iterdir()) == []
    else:
        made(tmp_path, data)
        assert bool((reopened(tmp_path)[:][key] == 1).all())


def test_a_full_disk_leaves_what_was_there(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(2**58, scratch_dir=tmp_path / "data"))
    with pytest.raises(OSError):
        buffer.extend(torch.zeros(2, dtype=torch.uint8))
    assert not (tmp_path / "data").exists()
    made(tmp_path / "data", flat_td([1]))
    check_same(reopened(tmp_path / "data")[:], flat_td([1]))


def test_an_opened_storage_can_be_cleaned_up(tmp_path):
    made(tmp_path / "data", nested_td([1]), sampler=PrioritizedSampler(5, 0.7, 0.5))
    (tmp_path / "data" / "mine").write_text("kept")
    storage = reopened(tmp_path / "data").storage
    assert storage.cleanup() is True and storage.cleanup() is False
    assert {path.name for path in (tmp_path / "data").rglob("*") if path.is_file()} == {"mine"}
