"""A forked child of a prefetching buffer goes on as if nothing had been drawn ahead."""


def test_what_was_drawn_ahead_is_given_back_in_a_child(in_a_fork):
    """Whatever the child does first: the generator and the epoch are those of a buffer without prefetch."""
    in_a_fork("""
        import copy, os, pickle, tempfile, torch
        from interop import (
            LazyMemmapStorage, LazyTensorStorage, ListStorage, RandomSampler, ReplayBuffer, ReplayBufferEnsemble,
            SamplerWithoutReplacement,
        )

        def made(storage, sampler, prefetch):
            buffer = ReplayBuffer(
                storage=storage(24), sampler=sampler(), batch_size=4, prefetch=prefetch, collate_fn=torch.stack if
                storage is ListStorage else None, generator=torch.Generator().manual_seed(3),
            )
            buffer.extend(torch.arange(24.0))
            for _ in range(2):
                buffer.sample()
            return buffer

        def ensemble(storage, sampler, prefetch):
            members = [ReplayBuffer(storage=storage(24), sampler=sampler(), batch_size=4) for _ in range(2)]
            for member in members:
                member.extend(torch.arange(24.0))
            buffer = ReplayBufferEnsemble(*members, batch_size=4, prefetch=prefetch,
                                          generator=torch.Generator().manual_seed(3))
            for _ in range(2):
                buffer.sample()
            return buffer

        def sampled(buffer):
            return [buffer.sample().tolist() for _ in range(7)]

        def loaded(buffer):
            with tempfile.TemporaryDirectory() as folder:
                buffer.dumps(folder)
                other = copy.deepcopy(buffer)
                other.sample()
                other.loads(folder)
                return sampled(other)

        def own_state(buffer):
            buffer.load_state_dict(buffer.state_dict())
            return sampled(buffer)

        DO = {
            "generator": lambda buffer: buffer.generator.get_state().tolist(),
            "sample": sampled,
            "dumps": loaded,
            "state_dict": own_state,
            "pickle": lambda buffer: sampled(pickle.loads(pickle.dumps(buffer))),
            "deepcopy": lambda buffer: sampled(copy.deepcopy(buffer)),
            "len": lambda buffer: [len(buffer), *sampled(buffer)],
        }
        OF_ENSEMBLES = ("generator", "sample", "dumps", "pickle", "len")

        def in_child(do, buffer):
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                try:
                    told = repr(do(buffer))
                except BaseException as error:
                    told = f"{type(error).__name__}: {error}"
                os.write(writing, told.encode())
                os._exit(0)
            os.close(writing)
            with open(reading) as pipe:
                told = pipe.read()
            os.waitpid(child, 0)
            return told

        count = 0
        for make, names in ((made, tuple(DO)), (ensemble, OF_ENSEMBLES)):
            for storage in (LazyTensorStorage, LazyMemmapStorage, ListStorage):
                for sampler in (RandomSampler, SamplerWithoutReplacement):
                    if make is ensemble and storage is ListStorage:
                        continue
                    for name in names:
                        plain, ahead = make(storage, sampler, None), make(storage, sampler, 3)
                        expected, got = repr(DO[name](plain)), in_child(DO[name], ahead)
                        assert got == expected, (make.__name__, storage.__name__, sampler.__name__, name, got, expected)
                        assert ahead.sample().tolist() == make(storage, sampler, None).sample().tolist()  # the parent
                        count += 1
        assert count > 50
    """)


def test_the_first_write_of_a_memory_map_may_be_that_of_a_child(in_a_fork):
    in_a_fork("""
        import os, tempfile, torch
        from interop import LazyMemmapStorage, ReplayBuffer

        def in_child(do):
            child = os.fork()
            if not child:
                code = 1
                try:
                    do()
                    code = 0
                finally:
                    os._exit(code)
            return os.waitpid(child, 0)[1] == 0

        folder = tempfile.mkdtemp()
        for options in ({}, {"scratch_dir": folder + "/a"}, {"scratch_dir": folder + "/b", "shared_init": True}):
            buffer = ReplayBuffer(storage=LazyMemmapStorage(8, **options), batch_size=2)
            assert in_child(lambda: buffer.extend(torch.arange(3.0)))
            assert buffer[:].tolist() == [0, 1, 2] and buffer.write_count == 3
            buffer.extend(torch.tensor([10.0]))
            assert in_child(lambda: buffer.extend(torch.tensor([11.0])))
            assert buffer[:].tolist() == [0, 1, 2, 10, 11]
            if options:
                buffer.storage.close()
                assert LazyMemmapStorage.open(options["scratch_dir"])[:].tolist() == [0, 1, 2, 10, 11]
    """)
