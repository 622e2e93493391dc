"""LazyMemmapStorage.open: rows, counts and priorities that are in a folder go on."""

import contextlib
import copy
import gc
import os
import random
import shutil

import pytest
import torch
from tensordict import TensorDict

from interop import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.faults.interrupts import Interrupt, Tracer
from tests.interop.rows import KINDS, check_same, flat_td, nested_td, plain_tensor
from tests.interop.storages.named_folders import made, reopened


def standing(buffer):
    return len(buffer), buffer.write_count, buffer.writer.cursor, buffer.storage.ring.cursor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [3, 12])
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
        assert standing(buffer) == standing(other)
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
    check_same(torch.as_tensor(buffer[:]["a"]).clone().as_subclass(torch.Tensor), data["a"])
    buffer.extend(data)
    assert buffer.write_count == 8 and buffer.writer.cursor == 3


def steps(ids):
    return TensorDict({"id": ids, ("next", "done"): (ids % 4 == 3)[:, None]}, [len(ids)])


def test_slices_know_where_the_newest_row_is(tmp_path):
    made(tmp_path, steps(torch.arange(6)), capacity=8).extend(steps(torch.arange(6, 11)))
    buffer = reopened(tmp_path, sampler=SliceSampler(num_slices=20, end_key=("next", "done")), batch_size=40)
    ids = buffer.sample()["id"].reshape(20, 2)
    assert ((ids[:, 1] - ids[:, 0]) == 1).all() and set(ids.flatten().tolist()) <= set(range(3, 11))


def test_other_writers_go_on(tmp_path):
    def ranked(values):
        return TensorDict({"rank": torch.tensor(values)}, [len(values)])

    def writer():
        return TensorDictMaxValueWriter(rank_key="rank")

    made(tmp_path / "best", ranked([3.0, 1.0, 2.0, 5.0, 4.0, 0.0]), writer=writer())
    buffer = reopened(tmp_path / "best", writer=writer())
    assert buffer.extend(ranked([0.5, 1.5])).tolist() == [-1, 1] and buffer[1]["rank"] == 1.5

    def of_tensordicts(storage):
        return TensorDictReplayBuffer(storage=storage, writer=TensorDictRoundRobinWriter())

    of_tensordicts(LazyMemmapStorage(5, scratch_dir=tmp_path / "ring")).extend(flat_td(range(7)))
    gc.collect()
    buffer = of_tensordicts(LazyMemmapStorage.open(tmp_path / "ring"))
    assert buffer.extend(flat_td([7])).tolist() == [2] and buffer[:]["index"].tolist() == list(range(5))
    made(tmp_path / "tracked", plain_tensor([1]), writer=RoundRobinWriter(track_generations=True))
    with pytest.raises(RuntimeError, match="not kept"):
        reopened(tmp_path / "tracked", writer=RoundRobinWriter(track_generations=True))


def test_an_empty_buffer_stays_empty_and_a_folder_can_move(tmp_path):
    buffer = made(tmp_path / "one", plain_tensor([1, 2, 3]))
    buffer.empty()
    del buffer
    gc.collect()
    (tmp_path / "one").rename(tmp_path / "two")
    buffer = reopened(tmp_path / "two")
    assert standing(buffer) == (0, 0, 0, 0)
    buffer.extend(plain_tensor([4]))
    check_same(buffer[:], plain_tensor([4]))


def test_tensordict_reads_the_folder(tmp_path):
    made(tmp_path, nested_td([1, 2]), sampler=PrioritizedSampler(5, 0.7, 0.5))
    read = TensorDict.load_memmap(tmp_path)[:2]
    check_same(read.apply(lambda leaf: torch.as_tensor(leaf).clone()), nested_td([1, 2]))


# ------------------------------------------------------------------ priorities


def prioritized():
    return PrioritizedSampler(5, 0.7, 0.5)


@pytest.mark.parametrize(
    ("options", "late"), [({}, True), ({"max_priority_within_buffer": True}, False), ({"dtype": torch.float64}, True)]
)
def test_priorities_are_those_of_the_last_update(options, late, tmp_path):
    def sampler():
        return PrioritizedSampler(8, 0.7, 0.5, **options)

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


def test_rows_written_without_a_prioritized_sampler_have_the_default_priority(tmp_path):
    buffer = made(tmp_path, flat_td(range(5)), sampler=prioritized())
    buffer.update_priority(torch.arange(5), torch.tensor([1.0, 2.0, 9.0, 4.0, 5.0]))
    del buffer
    reopened(tmp_path).extend(flat_td([8]))
    buffer = reopened(tmp_path, sampler=prioritized())
    assert buffer.sampler.priorities.tolist() == [9, 2, 9, 4, 5]


def test_a_sampler_put_in_begins_with_its_own_priorities(tmp_path):
    buffer = made(tmp_path, flat_td(range(3)), sampler=prioritized())
    buffer.update_priority(torch.arange(3), 4.0)
    buffer.set_sampler(prioritized())
    before = buffer.sampler
    assert before.priorities.tolist() == [1, 1, 1]
    buffer.set_sampler(prioritized())
    buffer.update_priority(torch.tensor([1]), 0.5)
    before.update_priority(torch.tensor([2]), 8.0)  # of a sampler that is not joined any more
    del buffer, before
    assert reopened(tmp_path, sampler=prioritized()).sampler.priorities.tolist() == [1, 0.5, 1]


class OfUsers(PrioritizedSampler):
    """A class of the user's, which the buffer calls by its own methods."""

    marks = 0

    def mark_update(self, index, *, storage=None):
        self.marks += 1
        super().mark_update(index, storage=storage)


def built_at_the_first_use(storage, sampler):
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, delayed_init=True)
    try:
        len(buffer)
    except Interrupt:
        len(buffer)
        raise


INTERRUPTED = {
    "set_sampler": lambda storage, sampler: TensorDictReplayBuffer(storage=storage).set_sampler(sampler),
    "set_storage": lambda storage, sampler: TensorDictReplayBuffer(storage=made_empty(), sampler=sampler).set_storage(
        storage
    ),
    "built at the first use": built_at_the_first_use,
}


def made_empty():
    return LazyTensorStorage(5)


@pytest.mark.parametrize("places", [6, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("call", INTERRUPTED)
@pytest.mark.parametrize(
    "kind",
    [lambda: PrioritizedSampler(5, 1.0, 1.0), lambda: OfUsers(5, 1.0, 1.0), ConsumingSampler],
    ids=["library", "users", "consuming"],
)
def test_an_interrupt_while_a_sampler_reads_what_a_folder_keeps_loses_nothing(kind, call, places, tmp_path):
    def values(folder):
        """What a sampler reads from the folder."""
        storage = LazyMemmapStorage.open(folder)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=kind(), batch_size=2)
        sampler = buffer.sampler
        found = sampler.priorities.tolist() if isinstance(sampler, PrioritizedSampler) else len(buffer)
        storage.close()
        return found

    original = tmp_path / "original"
    storage = LazyMemmapStorage(5, scratch_dir=original)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=kind(), batch_size=2)
    buffer.extend(flat_td(range(5)))
    if isinstance(buffer.sampler, PrioritizedSampler):
        buffer.update_priority(torch.arange(5), torch.arange(2.0, 7.0))
    else:
        buffer.sample()
    storage.close()
    expected = values(original)

    def interrupted(at):
        folder = tmp_path / str(at)
        shutil.copytree(original, folder)
        storage, sampler = LazyMemmapStorage.open(folder), kind()
        with contextlib.suppress(Interrupt), Tracer(at, looks=True) as tracer:
            INTERRUPTED[call](storage, sampler)
        storage.close()
        assert values(folder) == expected, tracer.where
        shutil.rmtree(folder)
        return tracer.count

    steps = interrupted(-1)
    for at in range(steps) if places is None else random.Random(0).sample(range(steps), places):
        interrupted(at)


def test_copies_of_a_buffer_do_not_write_to_its_folder(tmp_path):
    buffer = made(tmp_path, flat_td(range(3)), sampler=prioritized())
    twin = copy.deepcopy(buffer)
    twin.extend(flat_td([9]))
    twin.update_priority(torch.tensor([0]), 9.0)
    del buffer
    buffer = reopened(tmp_path, sampler=prioritized())
    assert len(buffer) == 3 and buffer.sampler.priorities.tolist() == [1, 1, 1] and twin.storage.scratch_dir is None


# ------------------------------------------------------------------ where the folder is


def test_a_relative_folder_stays_where_it_was_named(tmp_path, monkeypatch):
    def go(name):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)

    go("one")
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir="rows"))
    go("two")
    buffer.extend(flat_td(range(4)))  # makes the files
    buffer.set_sampler(PrioritizedSampler(8, 1.0, 1.0))  # makes another one
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 9.0, 4.0]))
    buffer.storage.close()
    go("one")
    storage = LazyMemmapStorage.open("../one/rows")
    go("two")
    buffer = ReplayBuffer(storage=storage, sampler=PrioritizedSampler(8, 1.0, 1.0))
    assert buffer.sampler.priorities.tolist() == [1, 2, 9, 4]
    buffer.extend(flat_td([4]))
    check_same(buffer[:], flat_td(range(5)))
    assert buffer.storage.cleanup() and not list(tmp_path.rglob("*.*"))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no way to reserve space again")
def test_a_copy_with_holes_has_its_space_again_when_it_is_opened_to_write(tmp_path):
    made(
        tmp_path / "rows", torch.arange(5), capacity=2**18, sampler=PrioritizedSampler(2**18, 1.0, 1.0)
    ).storage.close()
    (tmp_path / "copy").mkdir()
    for path in (tmp_path / "rows").iterdir():
        content = path.read_bytes()
        with (tmp_path / "copy" / path.name).open("wb") as file:
            file.write(content.rstrip(b"\0"))
            file.truncate(len(content))

    def has_space():
        found = [path.stat() for path in (tmp_path / "copy").iterdir()]
        return all(each.st_blocks * 512 >= each.st_size for each in found)

    if has_space():
        pytest.skip("this file system makes no holes")
    assert LazyMemmapStorage.open(tmp_path / "copy", "r")[:].tolist() == [0, 1, 2, 3, 4] and not has_space()
    buffer = reopened(tmp_path / "copy")
    assert has_space() and buffer[:].tolist() == [0, 1, 2, 3, 4]
