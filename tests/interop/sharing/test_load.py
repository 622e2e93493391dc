"""Processes that write to one buffer under load, and end or are killed in the middle of it."""

import pytest

from tests.faults.sharing import STORAGES, endings, kills, race


@pytest.mark.parametrize(("processes", "full", "late"), [(2, False, False), (4, True, False), (2, True, True)])
@pytest.mark.parametrize("kind", STORAGES)
def test_no_row_is_lost_or_torn_and_the_counters_are_exact(in_a_fork, kind, processes, full, late):
    in_a_fork(
        """
        from tests.faults.sharing import race
        race(kind, "fork", processes, 80, full=full, late=late).check(1, reads=1)
        """,
        kind=kind,
        processes=processes,
        full=full,
        late=late,
    )


@pytest.mark.parametrize("holding", [False, True], ids=["at any time", "holding the lock"])
@pytest.mark.parametrize("kind", STORAGES)
def test_others_go_on_within_a_second_after_one_was_killed(in_a_fork, kind, holding):
    in_a_fork(
        """
        from tests.faults.sharing import kills
        kills(kind, "fork", 12, seed=3, holding=holding).check(12)
        """,
        kind=kind,
        holding=holding,
    )


def test_the_end_of_a_worker_leaves_files_and_lock(in_a_fork):
    in_a_fork("""
        from tests.faults.sharing import endings
        endings("fork", 12, seed=1).check(12)
    """)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_same_with_started_workers(method):
    for kind in STORAGES:
        race(kind, method, 2, 150, full=True, late=True).check(1)
    endings(method, 6, seed=1).check(6)
    kills("tensor", method, 5, seed=2).check(5)
    kills("memmap", method, 2, seed=2, holding=True).check(2)


SAVED = """
import itertools, os, signal, torch
from tests.faults.sharing import counters_wrong, made, rows, torn

buffer = made(kind, 300)
buffer.extend(rows(torch.arange(300)))
workers = []
for number in (1, 2):
    if not (child := os.fork()):
        for start in itertools.count(number * 10**9, 7):
            buffer.extend(rows(torch.arange(start, start + 7)))
    workers.append(child)
counts = set()
for turn in range(12):
    other = made(kind, 300)
    if turn % 3:
        buffer.dumps(folder)
        other.loads(folder)
    else:
        other.load_state_dict(buffer.state_dict())
    assert not torn(other[:]) and not counters_wrong(other)
    counts.add(other.write_count)
    ids = other[:]["id"].roll(-other.writer.cursor)  # the oldest first
    for number in (1, 2):
        its = ids[ids // 10**9 == number]
        assert len(its) == 0 or torch.equal(its, torch.arange(its[0], its[0] + len(its))), its
for worker in workers:
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
assert len(counts) > 3, "nobody wrote"
"""


@pytest.mark.parametrize("kind", STORAGES)
def test_checkpoints_beside_writers_are_of_one_moment(in_a_fork, tmp_path, kind):
    in_a_fork(SAVED, kind=kind, folder=str(tmp_path / "c"))


def test_a_sampler_of_the_user_hears_of_what_other_processes_write(tmp_path, in_a_fork):
    in_a_fork(
        """
        import os, torch
        from interop import LazyMemmapStorage, RandomSampler, ReplayBuffer

        class Noting(RandomSampler):
            heard = []

            def mark_update(self, index, *, storage=None):
                self.heard.append(torch.as_tensor(index).tolist())

            def _empty(self):
                self.heard.append("empty")

        storage = LazyMemmapStorage(8, scratch_dir=path)
        writing = ReplayBuffer(storage=storage)
        buffer = ReplayBuffer(storage=storage, sampler=Noting(), writer=writing.writer)
        buffer.extend(torch.arange(2))
        for empty, count in (False, 3), (True, 1):
            if (child := os.fork()) == 0:
                writing.empty() if empty else None
                writing.extend(torch.arange(count))
                os._exit(0)
            os.waitpid(child, 0)
            buffer.sample(2)
        assert buffer.sampler.heard == [[0, 1], [2, 3, 4], "empty", [0]], buffer.sampler.heard
    """,
        path=str(tmp_path / "rows"),
    )
