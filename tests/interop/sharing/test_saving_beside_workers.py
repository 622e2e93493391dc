"""Checkpoints and snapshots of a buffer that other processes write to meanwhile."""

import pytest

from tests.faults.sharing import STORAGES

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
    ids = other[:]["id"].roll(-other.writer._cursor)  # the oldest first
    for number in (1, 2):
        its = ids[ids // 10**9 == number]
        assert len(its) == 0 or torch.equal(its, torch.arange(its[0], its[0] + len(its))), its
for worker in workers:
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
assert len(counts) > 3, "nobody wrote"
"""


@pytest.mark.parametrize("kind", STORAGES)
def test_they_are_of_one_moment(in_a_fork, tmp_path, kind):
    in_a_fork(SAVED, kind=kind, folder=str(tmp_path / "c"))
