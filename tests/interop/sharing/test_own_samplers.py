"""Samplers of the user's hear of what other processes write."""


def test_a_sampler_hears_of_what_other_processes_write(tmp_path, in_a_fork):
    in_a_fork(
        """
        import os, torch
        from interop import LazyMemmapStorage, ReplayBuffer
        from tests.interop.test_own_components import Uniform

        storage = LazyMemmapStorage(8, scratch_dir=path)
        writing = ReplayBuffer(storage=storage)
        buffer = ReplayBuffer(storage=storage, sampler=Uniform(), writer=writing.writer)
        buffer.extend(torch.arange(2))
        if (child := os.fork()) == 0:
            writing.extend(torch.arange(3))
            os._exit(0)
        os.waitpid(child, 0)
        buffer.sample(2)
        if (child := os.fork()) == 0:
            writing.empty()
            writing.extend(torch.arange(1))
            os._exit(0)
        os.waitpid(child, 0)
        buffer.sample(2)
        assert buffer.sampler.heard == [[0, 1], [2, 3, 4], "empty", [0]], buffer.sampler.heard
    """,
        path=str(tmp_path / "rows"),
    )
