"""A sampler that is broken off by a signal, wherever that comes, has its priorities and goes on."""

import copy
import pickle
import random
import signal
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fbuf
from interop import LazyTensorStorage, PrioritizedReplayBuffer, PrioritizedSampler
from interop.host import compiled
from interop.host.device_rows import JaxRows
from interop.samplers.given import Waiting
from interop.samplers.lent import Lent

TIMES, SLOTS = 300, 64


class AlarmError(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    def raising(number, frame):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, raising)
    with jax.enable_x64(False):  # and so it is afterwards, though JAX may be broken off while it turns them off
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


def prioritized() -> fbuf.PrioritizedState:
    """A state of eight items, on the CPU."""
    rule = fbuf.Prioritized()
    state = rule.written(rule.init(8), jnp.arange(8), jnp.arange(1.0, 9.0))
    return jax.device_put(state, jax.devices("cpu")[0])


def words(slots: list[int], priorities: list[float]) -> np.ndarray:
    given = compiled.Words(len(slots), "float32")
    given.slots[: len(slots)], given.values[: len(slots)] = slots, priorities
    return given.closed(0.5, 20.0, np.arange(2, dtype=np.uint32), 8)


def test_parts_of_the_state_that_nobody_has_taken_are_the_state():
    lent, rule = Lent(prioritized()), fbuf.Prioritized()

    def broken_off(*given):
        lent._parts.append(compiled.assign_and_draw(*given))  # as if the rest had been broken off
        raise AlarmError

    for turn in range(3):
        with pytest.raises(AlarmError):
            lent.part_to(broken_off, rule, 4, words([turn], [20.0]))
        if turn == 1:
            lent.to(compiled.reweight, rule, (np.float32(0.6),))
    expected = [20.0, 20.0, 20.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    for each in (lent, copy.deepcopy(lent), pickle.loads(pickle.dumps(lent))):
        assert np.asarray(each.state.priorities)[:8].tolist() == expected
        assert float(each.state.highest) == 20.0 and float(each.state.alpha) == np.float32(0.6)
    drawn = lent.part_to(compiled.assign_and_draw, rule, 4, words([7], [9.0]))
    assert np.asarray(lent.state.priorities)[:8].tolist() == [*expected[:7], 9.0]
    again = lent.shown_to(compiled.draw_weighed, rule, 4, words([], []))
    np.testing.assert_array_equal(drawn, again)


def breaking_off(program):
    """The program, with a signal when it has the memory of what it was given and has not returned."""

    def broken_off(*given):
        found = program(*given)
        signal.raise_signal(signal.SIGALRM)
        return found

    return broken_off


def test_signals_wait_where_a_program_may_have_to_be_compiled(alarm, monkeypatch):
    lent, rule = Lent(prioritized()), fbuf.Prioritized()
    with pytest.raises(AlarmError):
        lent.part_to(breaking_off(compiled.assign_and_draw), rule, 4, words([1], [20.0]))
    with pytest.raises(AlarmError):
        lent.to(breaking_off(compiled.reweight), rule, (np.float32(0.6),))
    assert np.asarray(lent.state.priorities)[:3].tolist() == [1.0, 20.0, 3.0]
    assert float(lent.state.alpha) == np.float32(0.6)
    rows = JaxRows.zeros([(8,)], [torch.int64], (), torch.device("cpu"))
    monkeypatch.setattr(compiled, "write", breaking_off(compiled.write))
    with pytest.raises(AlarmError):
        rows.write_run(3, [torch.tensor([1, 2])])
    assert rows.tensors[0].tolist() == [0, 0, 0, 1, 2, 0, 0, 0]


def test_no_signal_loses_rows_of_jax(alarm):
    rows, came = JaxRows.zeros([(SLOTS,)], [torch.int64], (), torch.device("cpu")), 0
    for turn in range(20 * TIMES):
        values = torch.full((SLOTS,), turn)
        try:
            if turn:  # everything is compiled
                signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 2e-4))
            rows.write_run(0, [values])
            signal.setitimer(signal.ITIMER_REAL, 0)
        except AlarmError:
            came += 1
        assert set(rows.tensors[0].tolist()) in ({turn}, {turn - 1})
        rows.write_run(0, [values])
        if came == TIMES:
            break
    assert came > TIMES // 3


def test_a_program_that_fails_leaves_the_state():
    lent = Lent({"a": np.zeros(3)})
    with pytest.raises(ZeroDivisionError):
        lent.to(lambda rule, state: 1 // 0, None, ())
    assert lent.state["a"].tolist() == [0, 0, 0]


def test_what_a_broken_off_draw_was_given_is_never_written_again(monkeypatch):
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(64))
    buffer.extend(torch.arange(64))
    passed, program = [], compiled.assign_and_draw

    def broken_off(*given):
        passed.extend((each, each.copy()) for each in given if isinstance(each, np.ndarray))
        raise KeyboardInterrupt

    buffer.update_priority(torch.arange(64), torch.rand(64))
    monkeypatch.setattr(compiled, "assign_and_draw", broken_off)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            buffer.sample(4)
        buffer.update_priority(0, 7.0)
    monkeypatch.setattr(compiled, "assign_and_draw", program)
    buffer.sample(4)
    assert buffer.sampler.priorities[0] == 7.0
    for now, then in passed:
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_a_sampler_draws_by_its_own_priorities(copied, dtype):
    storage, index = LazyTensorStorage(SLOTS), torch.arange(SLOTS)
    storage.set(slice(0, SLOTS), index)
    sampler = PrioritizedSampler(SLOTS, 1.0, 1.0, dtype=dtype)
    sampler.sample(storage, 4)  # has had as much memory as all of them take
    other = copied(sampler)
    given = {sampler: torch.rand(SLOTS, dtype=dtype) + 1.0, other: torch.rand(SLOTS, dtype=dtype) + 2.0}
    for each, priority in given.items():
        each.update_priority(index, priority)
    for each, priority in given.items():
        slots, info = each.sample(storage, 8)  # brings what waits into the tree
        np.testing.assert_array_equal(each.priorities, priority)
        np.testing.assert_allclose(info["priority_weight"], priority.min() / priority[slots], rtol=1e-5)


@pytest.mark.parametrize(
    "use", [lambda s: s.priorities, lambda s: s.state, pickle.dumps, lambda s: setattr(s, "alpha", 0.5)]
)
def test_no_program_runs_in_a_forked_child(use):
    sampler, storage = PrioritizedSampler(4, 1.0, 1.0), LazyTensorStorage(4)
    storage.set(slice(0, 4), torch.arange(4))
    sampler.mark_update(torch.arange(4), storage=storage)
    here, sampler._pid = sampler._pid, -1  # as the child sees it, where a program would never end
    with pytest.raises(RuntimeError, match="forked"):
        use(sampler)
    sampler._pid = here
    assert sampler.alpha == 1.0 and sampler.priorities.tolist() == [1.0] * 4


def test_what_waits_can_be_copied():
    waiting = Waiting("float64")
    waiting.add(np.arange(3), np.array([1.0, 2.0, 3.0]))
    for each in (copy.copy(waiting), copy.deepcopy(waiting), pickle.loads(pickle.dumps(waiting))):
        each.add(np.array([7]), 8.0)
        taken = each.words()
        assert taken.slots[:4].tolist() == [0, 1, 2, 7] and taken.values[:4].tolist() == [1.0, 2.0, 3.0, 8.0]
        assert np.shares_memory(taken.closed(0.5, 8.0, np.zeros(2, np.uint32), 8), taken.slots)
    assert waiting.count == 3


def test_nothing_waits_in_memory_that_was_just_made(monkeypatch):
    waiting = Waiting("float32")
    waiting.add(np.arange(3), 1.0)
    waiting.words()
    hold = waiting._hold

    def broken_off(words):
        hold(words)
        raise AlarmError

    monkeypatch.setattr(waiting, "_hold", broken_off)
    with pytest.raises(AlarmError):
        waiting.clear()
    assert waiting.count == 0
