"""A sampler whose draw is interrupted or fails keeps its priorities; so do copies and forked children."""

import contextlib
import itertools
import random
import signal
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    TensorDictReplayBuffer,
)
from tests.faults.interrupts import Interrupt, Tracer
from tests.faults.signatures import signature

TIMES, SLOTS = 15, 64


class AlarmError(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    def raising(number, frame):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, raising)
    with jax.enable_x64(False):  # restored afterwards, also if the signal interrupts JAX in changing it
        yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("within", [False, True])
def test_no_signal_loses_the_priorities(alarm, within):
    sampler = PrioritizedSampler(SLOTS, 1.0, 1.0, max_priority_within_buffer=within)
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(SLOTS), sampler=sampler)
    buffer.extend(torch.arange(SLOTS))
    index, came = torch.arange(SLOTS), 0
    for turn in range(-3, 20 * TIMES):
        priority = torch.rand(SLOTS) + 0.1
        buffer.update_priority(index, priority)
        try:
            if turn >= 0:  # everything is compiled
                signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 4e-4))
            buffer.sample(SLOTS)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except AlarmError:
            came += 1
            np.testing.assert_array_equal(sampler.priorities, priority)
        assert len(buffer.sample(SLOTS)) == SLOTS
        if came == TIMES:
            break
    assert came > TIMES // 3


@pytest.mark.parametrize("within", [False, True])
def test_an_exception_at_any_step_of_a_draw_costs_a_rebuild_and_no_priority(within):
    """Also behind the program that was given the memory of the tree, before its result has a name."""
    sampler = PrioritizedSampler(SLOTS, 1.0, 1.0, max_priority_within_buffer=within)
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(SLOTS), sampler=sampler)
    buffer.extend(torch.arange(SLOTS))
    for at in itertools.chain([-1, -1], itertools.count()):  # in the first ones everything is compiled
        priority = torch.rand(SLOTS) + 0.1
        buffer.update_priority(torch.arange(SLOTS), priority)
        with contextlib.suppress(Interrupt), Tracer(at, looks=True) as tracer:
            buffer.sample(4)
        np.testing.assert_array_equal(sampler.priorities, priority)
        index, info = sampler.sample(buffer.storage, SLOTS)
        np.testing.assert_allclose(info["priority_weight"], priority.min() / priority[index], rtol=1e-5)
        if -1 < tracer.count <= at:
            break
    assert at > 50


def prioritized() -> PrioritizedSampler:
    return PrioritizedSampler(8, 1.0, 1.0, max_priority_within_buffer=True)


@pytest.mark.parametrize("make", [prioritized, ConsumingSampler])
def test_items_are_marked_as_new_all_together_or_not_at_all(make):
    def left(at):
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(8), sampler=make(), batch_size=8, generator=torch.Generator().manual_seed(0)
        )
        buffer.extend(TensorDict({"x": torch.arange(8)}, [8]))
        if isinstance(buffer.sampler, PrioritizedSampler):
            buffer.update_priority(torch.tensor([3]), 9.0)
        else:
            buffer.sample()
        with contextlib.suppress(Interrupt), Tracer(-1 if at is None else at, looks=True) as tracer:
            if at is not None:
                buffer.mark_update(torch.tensor([1, 3]))
        return signature(buffer.state_dict()), tracer.count, tracer.where

    known = {left(at)[0] for at in (None, -1)}
    assert len(known) == 2
    for at in range(left(-1)[1]):
        found, _, where = left(at)
        assert found in known, where


def test_a_forked_child_reads_priorities_and_neither_draws_nor_writes(in_a_fork):
    """In the child a program would never end."""
    in_a_fork("""
        import os, torch
        from interop import LazyTensorStorage, PrioritizedSampler

        sampler, storage = PrioritizedSampler(4, 1.0, 1.0), LazyTensorStorage(4)
        storage.set(slice(0, 4), torch.arange(4))
        sampler.mark_update(torch.arange(4), storage=storage)
        uses = [
            lambda: sampler.functional_state,
            lambda: sampler.sample(storage, 2),
            lambda: sampler.update_priority(0, 2.0),
            lambda: sampler.mark_update(0, storage=storage),
        ]
        child = os.fork()
        if child == 0:
            for use in uses:
                try:
                    use()
                except RuntimeError as error:
                    assert "forked" in str(error), error
                else:
                    os._exit(1)
            assert sampler.priorities.tolist() == [1.0] * 4
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """)
