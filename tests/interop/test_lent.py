"""A sampler that is broken off by a signal, wherever that comes, has its priorities and goes on."""

import copy
import pickle
import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from interop import LazyTensorStorage, PrioritizedReplayBuffer, PrioritizedSampler
from interop.samplers.lent import Lent

TIMES, SLOTS = 300, 64


class AlarmError(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    def raising(number, frame):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, raising)
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


def test_a_result_that_nobody_has_taken_is_the_state():
    lent = Lent({"a": np.zeros(3), "b": None})

    def program(rule, state, more):
        lent._returned.append(((state["a"] + more,), "as if this had been broken off"))
        raise AlarmError

    with pytest.raises(AlarmError):
        lent.to(program, None, (2,))
    for each in (lent, copy.deepcopy(lent), pickle.loads(pickle.dumps(lent))):
        assert each.state["a"].tolist() == [2, 2, 2] and each.state["b"] is None
    assert lent.to(lambda rule, state, more: ((state["a"] * more,), "x", "y"), None, (3,)) == ("x", "y")
    assert lent.state["a"].tolist() == [6, 6, 6]


def test_a_program_that_fails_leaves_the_state():
    lent = Lent({"a": np.zeros(3)})
    with pytest.raises(ZeroDivisionError):
        lent.to(lambda rule, state: 1 // 0, None, ())
    assert lent.state["a"].tolist() == [0, 0, 0]
