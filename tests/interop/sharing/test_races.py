"""Processes that extend, read and sample one buffer: no row is lost or torn, and the counters are exact at the end."""

import pytest

from tests.faults.sharing import STORAGES, Counts, race


def none_bad(counts: Counts) -> bool:
    return counts.bad == 0 and counts.rows > 0


@pytest.mark.parametrize("late", [False, True], ids=["written", "unwritten"])
@pytest.mark.parametrize("full", [False, True], ids=["filling", "full"])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("kind", STORAGES)
def test_forked(in_a_fork, kind, processes, full, late):
    in_a_fork(
        """
        from tests.faults.sharing import race

        counts = race(kind, "fork", processes, 150, full=full, late=late)
        assert counts.bad == 0 and counts.reads > 0, counts
        """,
        kind=kind,
        processes=processes,
        full=full,
        late=late,
    )


@pytest.mark.parametrize(
    ("kind", "method", "full", "late"), [("tensor", "spawn", True, False), ("memmap", "forkserver", True, True)]
)
def test_started(kind, method, full, late):
    assert none_bad(race(kind, method, 2, 150, full=full, late=late))


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["written", "unwritten"])
@pytest.mark.parametrize("full", [False, True], ids=["filling", "full"])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", STORAGES)
def test_started_in_every_way(kind, method, processes, full, late):
    assert none_bad(race(kind, method, processes, 300, full=full, late=late))
