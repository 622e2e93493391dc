"""Handlers of signals that raise in calls: each call is done or not done, and the exception comes at once."""

import _thread
import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from interop import (
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from interop.host.threads import came_from_a_signal, finished, uninterrupted

TIMES, ROWS = 60, 64


class AlarmError(Exception):
    """An error that a handler raises: no KeyboardInterrupt."""


@pytest.fixture(params=[signal.SIGALRM, signal.SIGINT, signal.SIGTERM], ids=["SIGALRM", "SIGINT", "SIGTERM"])
def number(request: Any) -> Iterator[int]:
    def raising(number: int, frame: Any) -> None:
        raise AlarmError

    before = signal.signal(request.param, raising)
    gc.disable()  # Python drops what a handler raises in a callback of the collector, and JAX has one
    yield request.param
    gc.enable()
    signal.signal(request.param, before)


def buffers() -> dict[str, Callable[[], ReplayBuffer]]:
    def made(storage: Any, sampler: Any, **more: Any) -> ReplayBuffer:
        generator = torch.Generator().manual_seed(0)
        return ReplayBuffer(storage=storage, sampler=sampler, batch_size=8, generator=generator, **more)

    return {
        "tensors": lambda: made(LazyTensorStorage(ROWS), RandomSampler()),
        "epochs, prefetch": lambda: made(LazyTensorStorage(ROWS), SamplerWithoutReplacement(), prefetch=2),
        "lists, prefetch": lambda: made(ListStorage(ROWS), RandomSampler(), prefetch=2, collate_fn=torch.stack),
    }


def send(thread: int, number: int, after: float) -> None:
    time.sleep(after)
    signal.pthread_kill(thread, number)


@pytest.mark.parametrize("name", buffers())
def test_signals_at_random_times_leave_whole_calls(number: int, name: str) -> None:
    """The handler raises an `Exception`, and must not be mistaken for an error of the call."""
    buffer, rng = buffers()[name](), random.Random(0)
    buffer.extend(torch.arange(ROWS))
    written, came, main = ROWS, 0, threading.main_thread().ident
    assert main is not None
    for turn in range(TIMES):
        before, after = written, rng.uniform(0, 4e-3)
        try:
            _thread.start_new_thread(send, (main, number, after))
            for _ in range(10_000):
                before = written
                buffer.extend(torch.arange(written, written + 5))
                written += 5
                buffer.sample()
        except AlarmError:
            came += 1
        assert came == turn + 1
        if buffer.write_count != written:
            assert buffer.write_count == before + 5
            written = before + 5
        held = torch.stack([*buffer.storage]) if name.startswith("lists") else buffer[:]
        assert held.sort().values.tolist() == list(range(written - ROWS, written))
        assert len(buffer.sample()) == 8


def test_an_exception_of_a_handler_is_told_from_an_error(number: int) -> None:
    with pytest.raises(AlarmError) as raised:
        signal.raise_signal(number)
    assert came_from_a_signal(raised.value) and came_from_a_signal(KeyboardInterrupt())
    with pytest.raises(ZeroDivisionError) as error:
        1 // 0
    assert not came_from_a_signal(error.value)


def test_a_change_that_is_interrupted_is_made_again(number: int) -> None:
    steps = list[str]()

    def change() -> str:
        steps.append("begun")
        if len(steps) == 1:
            signal.raise_signal(number)
        steps.append("ended")
        return "result"

    with pytest.raises(AlarmError):
        finished(change)
    assert steps == ["begun", "begun", "ended"]
    assert finished(lambda: "result") == "result"


def test_handlers_wait_and_are_in_their_place_again(number: int) -> None:
    handler, inside = signal.getsignal(number), False
    with pytest.raises(AlarmError), uninterrupted():
        signal.raise_signal(number)
        inside = True
    assert inside and signal.getsignal(number) is handler
