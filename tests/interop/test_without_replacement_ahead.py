"""Epochs of a buffer whose batches are drawn ahead, copied, and carried on in other processes."""

import time

import numpy as np
import pytest
import torch

from tests.interop.test_without_replacement import buffer_of, epoch_of, flat, ids


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_an_epoch_is_exact_in_any_timing_of_threads(depth, seed):
    draw = np.random.default_rng(seed)
    waits = iter(draw.exponential(0.002, 100_000).tolist())
    buffer = buffer_of(50, 7, prefetch=depth)
    buffer.append_transform(lambda data: time.sleep(next(waits)) or data)
    for _ in range(5):
        drawn = epoch_of(buffer)
        assert [len(batch) for batch in drawn] == [7] * 7 + [1]
        assert sorted(flat(drawn)) == list(range(50))


CHANGES = {
    "generator": lambda buffer: buffer.set_rng(torch.Generator().manual_seed(3)),
    "transform": lambda buffer: buffer.append_transform(lambda data: data),
    "same sampler": lambda buffer: buffer.set_sampler(buffer.sampler),
    "same storage": lambda buffer: buffer.set_storage(buffer.storage),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_batches_that_are_dropped_remain_to_be_drawn(change, taken):
    buffer = buffer_of(10, prefetch=3)
    first = [ids(buffer.sample()) for _ in range(taken)]
    CHANGES[change](buffer)
    assert sorted(flat(first + epoch_of(buffer))) == list(range(10))
    assert sorted(flat(epoch_of(buffer))) == list(range(10))


# ------------------------------------------------------------------ copies and processes


def test_a_forked_child_goes_on_with_an_epoch_of_its_own(in_a_fork):
    out = in_a_fork("""
        import os
        import torch
        from interop import LazyMemmapStorage, ReplayBuffer, SamplerWithoutReplacement

        for prefetch in (None, 2):
            buffer = ReplayBuffer(
                storage=LazyMemmapStorage(64), sampler=SamplerWithoutReplacement(), batch_size=3, prefetch=prefetch
            )
            buffer.extend(torch.arange(11))
            first = buffer.sample().tolist()
            child = os.fork()
            rest = [each for batch in buffer for each in batch.tolist()]
            again = [each for batch in buffer for each in batch.tolist()]
            right = sorted(first + rest) == sorted(again) == list(range(11))
            if child == 0:
                os._exit(0 if right else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), right)
    """)
    assert out == "0 True\n" * 2
