"""Workers that are killed, told to end, or end by themselves, in the middle of what they do."""

import pytest

from tests.faults.sharing import STORAGES, endings, kills


@pytest.mark.parametrize("holding", [False, True], ids=["at any time", "holding the lock"])
@pytest.mark.parametrize("kind", STORAGES)
def test_others_go_on_within_a_second_after_one_was_killed(in_a_fork, kind, holding):
    in_a_fork(
        """
        from tests.faults.sharing import kills

        counts = kills(kind, "fork", 12, seed=3, holding=holding)
        assert counts.bad == 0 and counts.tried == 12, counts
        """,
        kind=kind,
        holding=holding,
    )


def test_the_end_of_a_worker_leaves_files_and_lock(in_a_fork):
    in_a_fork("""
        from tests.faults.sharing import endings

        counts = endings("fork", 12, seed=1)
        assert counts.bad == 0 and counts.tried == 12, counts
    """)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_end_of_a_started_worker(method):
    assert endings(method, 6, seed=1).bad == 0
    assert kills("tensor", method, 5, seed=2).bad == 0
    assert kills("memmap", method, 2, seed=2, holding=True).bad == 0


def test_what_a_killed_process_half_wrote_is_not_read_by_length_or_count(in_a_fork):
    in_a_fork("""
        import os, signal, torch
        from interop import LazyMemmapStorage, TensorDictReplayBuffer
        from tests.faults.sharing import rows, torn

        buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(20))
        buffer.extend(rows(torch.arange(12)))
        child = os.fork()
        if child == 0:
            die = lambda self, value: os.kill(os.getpid(), signal.SIGKILL)
            type(buffer.storage.ring).count = property(lambda self: 12, die)
            buffer.extend(rows(torch.arange(100, 110)))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert len(buffer) == 12 and buffer.write_count == 12 and buffer.writer._cursor == 12
        assert buffer[:]["id"].tolist() == list(range(12)) and torn(buffer[:]) == 0
    """)
