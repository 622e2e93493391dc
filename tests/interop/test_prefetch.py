"""Batches drawn ahead of time."""

import contextlib
import itertools
import signal
import threading
import time

import pytest
import torch

from interop import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from interop.buffers import prefetch
from tests.interop.rows import plain_tensor
from tests.interop.test_threads import together


class Counting(RandomSampler):
    """Notes the size of each draw; raises at the draws named in `broken`."""

    def __init__(self, broken=()):
        self.sizes = []
        self.broken = broken

    def sample(self, storage, batch_size):
        self.sizes.append(batch_size)
        if len(self.sizes) in self.broken:
            raise ArithmeticError(f"draw {len(self.sizes)}")
        return super().sample(storage, batch_size)


def ahead(prefetch=1, sampler=None, storage=None, **kwargs):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(8) if storage is None else storage,
        sampler=sampler,
        prefetch=prefetch,
        batch_size=4,
        **kwargs,
    )
    buffer.extend(plain_tensor([1, 2, 3]))
    return buffer


def settled(buffer):
    """Wait for what is being drawn."""
    for job in buffer.prefetch_queue._queue:
        job.task.wait()


@pytest.mark.parametrize("depth", [1, 3])
def test_the_queue_is_filled_after_the_first_sample(depth):
    sampler = Counting()
    buffer = ahead(depth, sampler)
    assert sampler.sizes == []
    buffer.sample()
    settled(buffer)
    assert len(sampler.sizes) == 1 + depth
    for drawn in range(2, 6):
        buffer.sample()
        settled(buffer)
        assert len(sampler.sizes) == depth + drawn


def test_a_batch_size_is_needed_and_sharing_excluded():
    with pytest.raises(ValueError, match="batch_size"):
        ReplayBuffer(prefetch=1)
    with pytest.raises(ValueError, match="shared"):
        ReplayBuffer(prefetch=1, batch_size=2, shared=True)
    assert len(ReplayBuffer(prefetch=0)) == 0
    for depth in (-1, 1.5, "2"):
        with pytest.raises((TypeError, ValueError), match="prefetch"):
            ReplayBuffer(prefetch=depth, batch_size=2)
    with pytest.raises(ValueError):
        PrioritizedReplayBuffer(alpha=1.0, beta=1.0, prefetch=2)


@pytest.mark.parametrize("broken", [1, 2, 4])
def test_an_error_is_raised_once_and_no_batch_is_lost(broken):
    buffer = ahead(1, Counting(broken=(broken,)))
    raised = 0
    for _ in range(6):
        try:
            assert buffer.sample().shape == (4, 3)
        except ArithmeticError as error:
            raised += 1
            assert str(error) == f"draw {broken}"
    assert raised == 1


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("away", [0.0, 0.01])
def test_threads_make_batches_while_the_caller_is_away(depth, away):
    """Also after a loop that did nothing but draw, in which calls make their batches themselves."""
    makers = []
    buffer = ahead(depth, transform=lambda data: makers.append(threading.current_thread()) or data)
    for _ in range(10):
        buffer.sample()
        time.sleep(away)
    settled(buffer)
    del makers[:]
    for drawn in range(1, 10):
        buffer.sample()
        settled(buffer)
        assert len(makers) == drawn and threading.main_thread() not in makers


def test_long_batches_are_made_at_the_same_time():
    """Three threads beside the caller: with one at a time the loop would take four times as long as it sleeps."""
    active, at_once = [], []

    def slow(data):
        active.append(None)
        at_once.append(len(active))
        time.sleep(0.02)
        active.pop()
        return data

    buffer = ahead(3, transform=slow)
    for _ in range(20):
        buffer.sample()
    assert max(at_once) >= 3


@pytest.mark.parametrize("depth", [1, 3])
def test_without_threads_calls_make_their_batches(depth, monkeypatch):
    def refused(work, name):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(prefetch, "start_daemon", refused)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(40), sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=depth
    )
    buffer.extend(torch.arange(40))
    for _ in range(2):
        assert sorted(torch.cat([buffer.sample() for _ in range(10)]).tolist()) == list(range(40))


def test_one_thread_watches_no_longer_than_calls_follow_each_other():
    """The only thread of a queue of one makes the next batch after steps of a millisecond, as before a quick loop."""
    buffer = ahead(1)
    for _ in range(300):
        buffer.sample()
    for _ in range(20):
        buffer.sample()
        time.sleep(0.001)
    until = time.monotonic() + 10
    while buffer.prefetch_queue._calls.qsize() > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert buffer.prefetch_queue._calls.qsize() <= 1


class StoppedError(Exception):
    pass


def test_an_exception_of_a_signal_handler_reaches_the_call_although_the_queue_was_dropped(monkeypatch):
    monkeypatch.setattr(prefetch, "start_daemon", lambda work, name: None)  # calls make all batches

    def handler(number, frame):
        raise StoppedError

    armed = []

    def transform(data):
        if armed and threading.current_thread() is threading.main_thread():
            dropping = threading.Thread(target=buffer.drop_prefetched)
            dropping.start()
            dropping.join()
            signal.raise_signal(signal.SIGUSR1)
        return data

    buffer = ahead(3, transform=transform)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for _ in range(20):
            buffer.sample()
        armed.append(True)
        with pytest.raises(StoppedError):
            for _ in range(20):
                buffer.sample()
    finally:
        signal.signal(signal.SIGUSR1, before)
    armed.clear()
    assert buffer.sample().shape == (4, 3)


# ------------------------------------------------------------------ changes meanwhile


class Last(RandomSampler):
    def sample(self, storage, batch_size):
        return torch.full((batch_size,), len(storage) - 1), {}


class Gate:
    """A transform: batches drawn ahead stop here until it opens."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, data):
        if threading.current_thread().name.startswith("replay-prefetch") and not self.open.is_set():
            self.reached.set()
            assert self.open.wait(10)
        return data


def other_storage():
    storage = LazyTensorStorage(8)
    storage.set(slice(0, 2), plain_tensor([5, 5]))
    return storage


def start_over(buffer):
    buffer.empty()
    buffer.extend(plain_tensor([5]))


CHANGES = {
    "sampler": (lambda buffer: buffer.set_sampler(Last()), {3.0}),
    "storage": (lambda buffer: buffer.set_storage(other_storage()), {5.0}),
    "content": (start_over, {5.0}),
    "transform": (lambda buffer: buffer.append_transform(lambda data: data * 0), {0.0}),
}


def sampled_across(change, buffer, gate):
    """What a thread gets that waits for a batch, drawn ahead and held up in a transform, while a change is made."""
    buffer.sample()
    assert gate.reached.wait(10)
    batches = []
    waiting = threading.Thread(target=lambda: batches.append(buffer.sample()))
    waiting.start()
    time.sleep(0.05)
    change(buffer)
    gate.open.set()
    waiting.join(20)
    [batch] = batches
    return batch


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_that_a_thread_waits_for_is_drawn_anew_after_a_change(change):
    gate = Gate()
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, prefetch=1, transform=gate)
    buffer.extend(plain_tensor([1, 2, 3]))
    make, wanted = CHANGES[change]
    batches = [sampled_across(make, buffer, gate), buffer.sample()]
    assert [set(batch[:, 0].tolist()) for batch in batches] == [wanted, wanted]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_drops_what_was_drawn_ahead(change):
    buffer = ahead(3, sampler=Counting(broken=(2,)))
    buffer.sample()  # an error waits, too
    make, wanted = CHANGES[change]
    make(buffer)
    assert [set(buffer.sample()[:, 0].tolist()) for _ in range(5)] == [wanted] * 5


def test_dropping_what_is_being_drawn_does_not_hang():
    """The threads that draw need the lock that the call holds."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), prefetch=4, batch_size=32)
    buffer.extend(torch.zeros(64, 16))
    changes = itertools.cycle(
        (
            lambda: start_over(buffer),
            lambda: buffer.set_rng(None),
            lambda: buffer.set_sampler(RandomSampler()),
            lambda: buffer.set_storage(other_storage()),
        )
    )

    def read():
        for _ in range(100):
            with contextlib.suppress(RuntimeError):  # it was just emptied
                buffer.sample()

    assert together(read, read, lambda: [change() for change in itertools.islice(changes, 100)]) == []


def test_a_forked_child_draws_ahead_on_its_own(in_a_fork):
    out = in_a_fork("""
        import multiprocessing
        import torch
        from interop import LazyMemmapStorage, ReplayBuffer

        def worker():
            for _ in range(4):
                assert buffer.sample().shape == (4,) and buffer.next().shape == (4,)

        buffer = ReplayBuffer(storage=LazyMemmapStorage(64), batch_size=4, prefetch=2)
        buffer.extend(torch.arange(8.0))
        buffer.sample()
        process = multiprocessing.get_context("fork").Process(target=worker)
        process.start()
        process.join(30)
        print(process.exitcode)
        process.kill()
    """)
    assert out == "0\n"
