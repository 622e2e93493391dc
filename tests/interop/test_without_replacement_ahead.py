"""Epochs of a buffer whose batches are drawn ahead, copied, and carried on in other processes."""

import copy
import multiprocessing
import pickle
import threading
import time

import numpy as np
import pytest
import torch

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.interop import workers
from tests.interop.rows import flat_td
from tests.interop.test_epochs import key
from tests.interop.test_threads_and_processes import in_a_fresh_interpreter, together
from tests.interop.test_without_replacement import buffer_of, epoch_of, flat, ids

COPIERS = {"deepcopy": copy.deepcopy, "pickle": lambda each: pickle.loads(pickle.dumps(each))}


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


def test_nothing_is_drawn_ahead_beyond_the_end_of_an_epoch():
    buffer = buffer_of(10, prefetch=8)
    for waiting in (3, 2, 1, 0, 3):
        buffer.sample()
        assert len(buffer._prefetch) == waiting


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


def test_threads_share_an_epoch_while_others_drop_what_is_ahead():
    buffer, taken, done = buffer_of(2000, 7, prefetch=3), [], threading.Event()

    def take():
        while sum(map(len, taken)) < 1500:
            taken.append(ids(buffer.sample()))

    def change():
        while not done.is_set():
            buffer.set_rng(torch.Generator().manual_seed(1))
            time.sleep(0.001)

    def both():
        assert together(take, take) == []
        done.set()

    assert together(both, change) == []
    taken += epoch_of(buffer)
    assert sorted(flat(taken)) == list(range(2000))


def test_buffers_that_share_a_sampler_share_its_epoch():
    one = buffer_of(20)
    two = ReplayBuffer(storage=one.storage, sampler=one.sampler, batch_size=4)
    drawn = []
    while not one.sampler.ran_out:
        drawn += [ids(one.sample()), ids(two.sample())]
    assert sorted(flat(drawn)) == list(range(20))


@pytest.mark.parametrize("prefetch", [None, 1, 2])
def test_a_subclass_that_draws_differently_has_epochs_too(prefetch):
    class Doubled(SamplerWithoutReplacement):
        def sample(self, storage, batch_size):
            time.sleep(0.001)
            return super().sample(storage, batch_size)

    buffer = buffer_of(10, sampler=Doubled(), prefetch=prefetch)
    for _ in range(5):
        drawn = epoch_of(buffer)
        assert len(drawn) == 4 and sorted(flat(drawn)) == list(range(10))


# ------------------------------------------------------------------ copies and processes


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("taken", [0, 1, 3, 4])
def test_a_copy_goes_on_with_the_same_epoch(copier, prefetch, taken):
    buffer = buffer_of(11, prefetch=prefetch)
    first = [ids(buffer.sample()) for _ in range(taken)]
    twin = COPIERS[copier](buffer)
    rest = [[ids(each.sample()) for _ in range(12 - taken)] for each in (buffer, twin)]
    assert rest[0] == rest[1]
    for start in (0, 4, 8):
        assert sorted(flat((first + rest[1])[start : start + 4])) == list(range(11))
    assert [each.sampler.ran_out for each in (buffer, twin)] == [True, True]


@pytest.mark.parametrize("copier", COPIERS)
def test_a_sampler_can_be_copied_on_its_own(copier):
    sampler = buffer_of(100, None).sampler
    storage = LazyTensorStorage(100)
    storage.set(slice(0, 100), torch.arange(100))
    first = sampler.sample(storage, 30)[0]
    twin = COPIERS[copier](sampler)
    assert repr(twin) == repr(sampler) and twin._rng is None
    rest = twin.sample(storage, 100)[0]
    assert sorted(torch.cat([first, rest]).tolist()) == list(range(100))
    assert len(sampler.sample(storage, 100)[0]) == 70


def test_a_copy_is_not_larger_than_what_is_stored():
    sampler = SamplerWithoutReplacement()
    for length in (1000, 10):
        sampler._epoch.take(3, length, key(0))
    assert len(pickle.dumps(sampler)) < 2000


@pytest.mark.slow
def test_a_forked_child_goes_on_with_an_epoch_of_its_own():
    out = in_a_fresh_interpreter("""
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


@pytest.mark.slow
def test_a_spawned_worker_draws_without_replacement():
    context = multiprocessing.get_context("spawn")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(32), sampler=SamplerWithoutReplacement())
    buffer.extend(flat_td(list(range(8))))
    buffer.sample(3)
    answers = context.Queue()
    process = context.Process(target=workers.sample_and_extend, args=(buffer, [9], answers))
    process.start()
    rest = answers.get(timeout=100)
    process.join(60)
    assert process.exitcode == 0 and len(rest) == 5 and len(buffer) == 9
    assert sorted(each["obs"][0].item() for each in buffer.sample(20)) == [*map(float, range(8)), 9.0]


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")], ids=["inference", "meta device"])
def test_what_is_drawn_in_a_mode_serves_outside_of_it(make, mode):
    buffer = ReplayBuffer(storage=make(10), sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=1)
    with mode():
        buffer.extend(torch.arange(10, device="cpu"))
        first = buffer.sample()
    rest = list(buffer)
    assert sorted(torch.cat([first, *rest]).tolist()) == list(range(10))
    assert {each.device.type for each in (first, *rest)} == {"cpu"}
