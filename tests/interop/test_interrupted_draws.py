"""A sampler whose draw is interrupted or fails keeps its priorities; so do copies and forked children."""

import random
import signal
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import torch

from interop import LazyTensorStorage, PrioritizedReplayBuffer, PrioritizedSampler
from interop.host import compiled

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
def test_a_program_that_fails_costs_a_rebuild_and_no_priority(monkeypatch, within):
    sampler = PrioritizedSampler(SLOTS, 1.0, 1.0, max_priority_within_buffer=within)
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(SLOTS), sampler=sampler)
    buffer.extend(torch.arange(SLOTS))
    buffer.sample(4)
    priority = torch.rand(SLOTS) + 0.1
    buffer.update_priority(torch.arange(SLOTS), priority)

    def failing(*given):
        compiled_program(*given)  # which donates the tree
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        compiled_program = compiled.assign_and_draw
        patched.setattr(compiled, "assign_and_draw", failing)
        with pytest.raises(KeyboardInterrupt):
            buffer.sample(4)
    np.testing.assert_array_equal(sampler.priorities, priority)
    index, info = sampler.sample(buffer.storage, SLOTS)
    np.testing.assert_allclose(info["priority_weight"], priority.min() / priority[index], rtol=1e-5)


@pytest.mark.parametrize(
    "use",
    [
        lambda sampler, storage: sampler.functional_state,
        lambda sampler, storage: sampler.sample(storage, 2),
        lambda sampler, storage: sampler.update_priority(0, 2.0),
        lambda sampler, storage: sampler.mark_update(0, storage=storage),
    ],
)
def test_a_forked_child_reads_priorities_and_neither_draws_nor_writes(use):
    sampler, storage = PrioritizedSampler(4, 1.0, 1.0), LazyTensorStorage(4)
    storage.set(slice(0, 4), torch.arange(4))
    sampler.mark_update(torch.arange(4), storage=storage)
    sampler.item_values._process.renew()  # as fork does in the child, where a program would never end
    with pytest.raises(RuntimeError, match="forked"):
        use(sampler, storage)
    assert sampler.priorities.tolist() == [1.0] * 4
