"""Workers that were forked before priorities were kept: what they write over has the default one, whoever is killed."""


def test_rows_that_a_worker_wrote_have_the_default_priority_though_all_are_killed(in_a_fork, tmp_path):
    in_a_fork(
        """
        import os, signal, torch
        from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer

        (heard, told), (to_worker, go) = os.pipe(), os.pipe()
        owner = os.fork()
        if owner == 0:
            storage = LazyMemmapStorage(8, scratch_dir=path)
            plain = ReplayBuffer(storage=storage)
            plain.extend(torch.arange(8))
            worker = os.fork()
            if worker == 0:
                os.read(to_worker, 1)
                plain.extend(torch.arange(100, 104))
                os.write(told, b"x")
                signal.pause()
            sampler = PrioritizedSampler(8, 1.0, 1.0, eps=0.0)
            buffer = ReplayBuffer(storage=storage, sampler=sampler, writer=plain.writer)
            buffer.update_priority(torch.arange(8), torch.arange(8.0) + 5)
            os.write(go, b"x")
            os.read(heard, 1)
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(owner, 0)
        sampler = PrioritizedSampler(8, 1.0, 1.0, eps=0.0)
        buffer = ReplayBuffer(storage=LazyMemmapStorage.open(path), sampler=sampler)
        buffer.sample(2)
        assert buffer[:].tolist() == [100, 101, 102, 103, 4, 5, 6, 7]
        assert sampler.priorities.tolist() == [12.0] * 4 + [9.0, 10.0, 11.0, 12.0], sampler.priorities
    """,
        path=str(tmp_path / "data"),
    )


def test_a_worker_puts_back_the_priorities_too_of_a_write_in_which_the_owner_was_killed(in_a_fork, tmp_path):
    in_a_fork(
        """
        import os, signal, torch
        from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer

        (heard, told), (to_worker, go) = os.pipe(), os.pipe()
        owner = os.fork()
        if owner == 0:
            storage = LazyMemmapStorage(8, scratch_dir=path)
            plain = ReplayBuffer(storage=storage)
            plain.extend(torch.arange(8))
            worker = os.fork()
            if worker == 0:
                os.read(to_worker, 1)
                plain[0]  # a turn
                os.write(told, b"x" if not storage.journal.active else b"y")
                signal.pause()
            os.write(told, worker.to_bytes(8, "little"))
            sampler = PrioritizedSampler(8, 1.0, 1.0, eps=0.0)
            buffer = ReplayBuffer(storage=storage, sampler=sampler, writer=plain.writer)
            buffer.update_priority(torch.arange(8), torch.arange(8.0) + 5)
            with storage.lock.turn(), storage.transaction():
                storage.set_run(0, torch.arange(4), torch.arange(100, 104))
                os.kill(os.getpid(), signal.SIGKILL)
        worker = int.from_bytes(os.read(heard, 8), "little")
        os.waitpid(owner, 0)
        os.write(go, b"x")
        assert os.read(heard, 1) == b"x"
        os.kill(worker, signal.SIGKILL)
        while True:
            try:
                storage = LazyMemmapStorage.open(path)
                break
            except RuntimeError:  # it is not gone yet
                pass
        sampler = PrioritizedSampler(8, 1.0, 1.0, eps=0.0)
        buffer = ReplayBuffer(storage=storage, sampler=sampler)
        buffer.sample(2)
        assert buffer[:].tolist() == list(range(8))
        assert sampler.priorities.tolist() == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0], sampler.priorities
    """,
        path=str(tmp_path / "data"),
    )
