"""Processes that extend, read and sample one buffer: no row is lost or torn, and the counters are exact at the end."""

import pytest

from tests.faults.sharing import STORAGES, Counts, race


def none_bad(counts: Counts) -> bool:
    return counts.bad == 0 and counts.tried > 0


@pytest.mark.parametrize(("full", "late"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("kind", STORAGES)
def test_forked(in_a_fork, kind, processes, full, late):
    in_a_fork(
        """
        from tests.faults.sharing import race

        counts = race(kind, "fork", processes, 80, full=full, late=late)
        assert counts.bad == 0 and counts.reads > 0, counts
        """,
        kind=kind,
        processes=processes,
        full=full,
        late=late,
    )


@pytest.mark.slow
def test_started():
    assert none_bad(race("memmap", "forkserver", 2, 150, full=True, late=True))


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["written", "unwritten"])
@pytest.mark.parametrize("full", [False, True], ids=["filling", "full"])
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("kind", STORAGES)
def test_started_in_every_way(kind, method, processes, full, late):
    assert none_bad(race(kind, method, processes, 300, full=full, late=late))
