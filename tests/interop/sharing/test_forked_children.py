"""What a forked child may do with a buffer, and what it refuses."""

import pytest


def test_nothing_hangs_after_jax_and_threads_of_torch_were_used(in_a_fork):
    """Their threads are not there in a child. Large writes and reads are what torch would use threads for."""
    in_a_fork("""
        import os, time, torch, jax
        from tensordict import TensorDict
        from interop import (
            LazyMemmapStorage, LazyTensorStorage, SamplerWithoutReplacement, SliceSampler, TensorDictReplayBuffer,
        )

        def data(first, count=16):
            ids = torch.arange(first, first + count)
            return TensorDict({"id": ids, "pixels": (ids % 251)[:, None].expand(-1, 40_000).float(),
                               "episode": ids // 8}, [count])

        jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((64, 64))).block_until_ready()
        torch.set_num_threads(2)
        torch.zeros(4_000_000).add_(1).clone()
        buffers = []
        for storage in (LazyTensorStorage, LazyMemmapStorage):
            slices = SliceSampler(num_slices=4, traj_key="episode", strict_length=False)
            for sampler in (None, SamplerWithoutReplacement(), slices):
                buffer = TensorDictReplayBuffer(storage=storage(64), sampler=sampler)
                buffer.extend(data(0))
                buffer.sample(16)
                buffer.share()
                buffers.append(buffer)
        batches = [data(16 + 16 * turn) for turn in range(20)]  # in the child torch would hang in this
        for turn in range(20):
            child = os.fork()
            if child == 0:
                buffer = buffers[turn % len(buffers)]
                buffer.extend(batches[turn])
                for _ in range(2):
                    batch = buffer.sample(32)
                    assert (batch["pixels"][:, -1] == (batch["id"] % 251)).all()
                assert torch.get_num_threads() == 1
                os._exit(0)
            until = time.monotonic() + 100
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
                time.sleep(0.01)
            assert ended == (child, 0), (turn, ended)
        assert sum(buffer.write_count for buffer in buffers) == 16 * (len(buffers) + 20)
    """)


def test_memory_that_is_not_shared_is_read_as_it_was_and_never_written(in_a_fork):
    in_a_fork("""
        import os, torch
        from interop import ListStorage, ReplayBuffer, TensorStorage, LazyTensorStorage

        def refused(call):
            try:
                call()
            except RuntimeError as error:
                assert "fork" in str(error), error
                return True
            return False

        def lists():
            buffer = ReplayBuffer(storage=ListStorage(10))
            buffer.extend(list(range(4)))
            return buffer, lambda: buffer.extend([7]), lambda: buffer[3] == 3

        def given():
            buffer = ReplayBuffer(storage=TensorStorage(torch.arange(10)))
            return buffer, lambda: buffer.extend(torch.tensor([7])), lambda: buffer[3] == 3

        def unwritten():
            buffer = ReplayBuffer(storage=LazyTensorStorage(10))
            return buffer, lambda: buffer.extend(torch.tensor([7])), lambda: len(buffer) == 0

        for make in (lists, given, unwritten):
            buffer, write, right = make()
            (to_child, go), (heard, told) = os.pipe(), os.pipe()
            child = os.fork()
            if child == 0:
                assert right()
                before = len(buffer)
                for change in (write, buffer.empty, lambda: buffer.__setitem__(0, torch.tensor(1))):
                    assert refused(change)
                assert right() and len(buffer) == before
                os.write(told, b"x")
                os.read(to_child, 1)
                assert right() and len(buffer) == before  # as it was when the child was forked
                os._exit(0)
            os.read(heard, 1)
            count = buffer.write_count
            write()
            assert buffer.write_count == count + 1
            os.write(go, b"x")
            assert os.waitpid(child, 0)[1] == 0, make
    """)


@pytest.mark.parametrize("jax_started", [False, True])
def test_what_one_process_keeps_is_refused_in_a_child(in_a_fork, jax_started):
    in_a_fork(
        """
        import os, torch
        from tensordict import TensorDict
        from interop import (
            ConsumingSampler, LazyTensorStorage, PrioritizedSampler, TensorDictMaxValueWriter, TensorDictReplayBuffer,
        )

        data = TensorDict({"key": torch.arange(4.0)}, [4])
        parts = [
            {"sampler": PrioritizedSampler(10, 0.6, 0.4)},
            {"writer": TensorDictMaxValueWriter("key")},
            {"sampler": ConsumingSampler()},
        ]
        buffers = [TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, **each) for each in parts]
        buffers.append(TensorDictReplayBuffer(storage=LazyTensorStorage(10, compilable=True)))
        for buffer in buffers:
            buffer.extend(data)
        if jax_started:
            buffers[0].sample()
        child = os.fork()
        if child == 0:
            for buffer in buffers:
                try:
                    buffer.extend(data)
                    os._exit(1)
                except RuntimeError:
                    pass
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0 and [len(buffer) for buffer in buffers] == [4] * 4
        """,
        jax_started=jax_started,
    )


@pytest.mark.parametrize("prefetch", [None, 3])
def test_a_fork_while_threads_write_and_draw(in_a_fork, prefetch):
    """A child begins between writes: nothing is half-done in it, and it waits for no thread of its parent. A shared one
    writes, with prefetch it only reads."""
    in_a_fork(
        """
        import os, threading, time, torch
        from interop import LazyTensorStorage, TensorDictReplayBuffer
        from tests.faults.sharing import counters_wrong, rows, torn

        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(400), batch_size=16, prefetch=prefetch)
        buffer.extend(rows(torch.arange(400)))
        if prefetch is None:
            buffer.share()
        stop, written, more = threading.Event(), [0, 0], 8 if prefetch is None else 0

        def write(place):
            while not stop.is_set():
                buffer.extend(rows(torch.arange(8)))
                written[place] += 8

        threads = [threading.Thread(target=write, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(15):
            buffer.sample()
            child = os.fork()
            if child == 0:
                for _ in range(5):
                    if more:
                        buffer.extend(rows(torch.arange(1000, 1000 + more)))
                    assert torn(buffer.sample()) == 0
                os._exit(0)
            until = time.monotonic() + 100
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
                time.sleep(0.002)
            assert ended == (child, 0)
        stop.set()
        for thread in threads:
            thread.join(20)
        assert counters_wrong(buffer, 400 + sum(written) + 15 * 5 * more) == 0 and torn(buffer[:]) == 0
        """,
        prefetch=prefetch,
    )


def test_rows_of_a_worker_have_the_default_priority_though_all_are_killed(in_a_fork, tmp_path):
    """The worker was forked before there were priorities."""
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
