"""Buffers used by several threads, and by worker processes."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import flat_td


def together(*calls):
    """Run calls in threads; the errors that they raised."""
    errors = []

    def guarded(call):
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def check_whole(batch):
    """All leaves of a row tell the same id."""
    ids = batch["obs"][:, 0]
    assert bool((batch["obs"] == ids[:, None]).all()) and bool((batch["done"][:, 0] == (ids % 2).bool()).all())


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_rows_are_never_torn(make, prefetch):
    buffer = TensorDictReplayBuffer(storage=make(64), batch_size=32, prefetch=prefetch)
    buffer.extend(flat_td([0] * 64))

    def write():
        for step in range(150):
            buffer.extend(flat_td([step] * 16))

    def read():
        for _ in range(150):
            check_whole(buffer.sample())

    assert together(write, write, read, read) == []
    assert buffer.write_count == 64 + 2 * 150 * 16 and len(buffer) == 64
    assert buffer.writer.cursor == buffer.write_count % 64


def test_priorities_are_updated_while_others_write_and_draw():
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(64), batch_size=16)
    buffer.extend(flat_td([0] * 16))
    buffer.update_tensordict_priority(buffer.sample().set("td_error", torch.ones(16)))

    def write():
        for step in range(20):
            buffer.extend(flat_td([step] * 16))

    def learn():
        for _ in range(20):
            batch = buffer.sample()
            check_whole(batch)
            assert bool(torch.isfinite(batch["priority_weight"]).all())
            buffer.update_tensordict_priority(batch.set("td_error", batch["obs"][:, 0] + 1))

    assert together(write, learn, learn) == []
    assert bool((buffer.sampler.priorities >= 0).all())


# ------------------------------------------------------------------ processes

SPAWN = multiprocessing.get_context("spawn")


def in_a_fresh_interpreter(code):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def nothing(*_):
    pass


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ListStorage(4), "Cannot share a storage"),
        (lambda: PrioritizedSampler(4, 1.0, 1.0), "sync=False"),
    ],
    ids=["list", "priorities"],
)
def test_what_cannot_be_shared_is_refused_at_the_start_of_the_process(make, match):
    process = SPAWN.Process(target=nothing, args=(make(),))
    with pytest.raises(RuntimeError, match=match):
        process.start()


@pytest.mark.slow
def test_only_the_maker_of_files_removes_them(tmp_path):
    out = in_a_fresh_interpreter(f"""
        import multiprocessing
        import torch
        from interop import LazyMemmapStorage, ReplayBuffer

        def worker(buffer):
            buffer.extend(torch.ones(2))
            assert buffer.storage.cleanup() is False

        buffer = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir={str(tmp_path / "data")!r}, auto_cleanup=True))
        buffer.extend(torch.zeros(2))
        process = multiprocessing.get_context("fork").Process(target=worker, args=(buffer,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        import os
        print(len(os.listdir({str(tmp_path / "data")!r})), len(buffer))
    """)
    assert out == "4 4\n"
    assert not os.path.exists(tmp_path / "data")
