"""Signals whose handlers raise, in the middle of writes to a storage in a folder."""

import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from interop.shared.interrupts import uninterrupted
from tests.interop.storages.signals import raising, reopened, sent, standing

CAPACITY = 6
GUARDS = ("storages/writes", "shared/journal", "shared/undo", "host/rows", "host/ring", "writers/")


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    with raising():
        yield


def wrapped(folder: Path, sampler: Any = None) -> ReplayBuffer:
    """A ring that was filled and has gone on, in a new folder."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder), sampler=sampler)
    buffer.extend(torch.arange(1, 9))
    return buffer


def prioritized(folder: Path) -> ReplayBuffer:
    buffer = wrapped(folder, PrioritizedSampler(CAPACITY, 1.0, 1.0))
    buffer.update_priority(torch.arange(CAPACITY), torch.arange(CAPACITY) + 2.0)
    return buffer


def outcomes(make: Callable[[Path], ReplayBuffer], call: Callable[[ReplayBuffer], Any], folder: Path) -> list[Any]:
    """What a buffer stands at before and after the call."""
    buffer = make(folder)
    before = standing(buffer)
    call(buffer)
    return [before, standing(buffer)]


WRITES: dict[str, tuple[Callable[[ReplayBuffer], Any], int]] = {  # with how many lines a moment is from the next
    "extend": (lambda buffer: buffer.extend(torch.tensor([21, 22, 23])), 2),
    "add": (lambda buffer: buffer.add(torch.tensor(31)), 5),
    "set": (lambda buffer: buffer.__setitem__(3, torch.tensor(41)), 1),
    "write_at": (lambda buffer: buffer.writer.write_at([4, 1], torch.tensor([51, 52])), 5),
    "empty": (lambda buffer: buffer.empty(), 2),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_done_or_not_and_what_follows_is_kept(name: str, tmp_path: Path) -> None:
    write, apart = WRITES[name]
    allowed = outcomes(wrapped, write, tmp_path / "model")
    seen, moment = set(), 1
    while True:
        folder = tmp_path / "rows"
        buffer = wrapped(folder)
        line = sent(lambda buffer=buffer: write(buffer), moment, GUARDS)
        if line is None:
            break
        found = standing(buffer)
        assert found in allowed, line
        seen.add(allowed.index(found))
        assert buffer.extend(torch.tensor([77])).tolist() == [found[1]], line
        if len(buffer) > 3:
            buffer[3] = torch.tensor(78)
        later = standing(buffer)
        assert later[1:] == ((found[1] + 1) % CAPACITY, found[2] + 1) and later[0][found[1]] in (77, 78), line
        buffer.storage.close()
        assert standing(reopened(folder)) == later, line
        shutil.rmtree(folder)
        moment += apart
    assert moment > 20 and seen == {0, 1}


def test_signals_at_any_time_lose_nothing_that_returned(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path))
    buffer.extend(torch.arange(1000))
    rows, rng, fresh = torch.arange(3), random.Random(1), 10**6
    with raising(signal.SIGALRM):
        for _ in range(150):
            try:
                # Again after a while, for Python passes over what is raised where it collects garbage.
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 1e-3), 0.5)
                while True:
                    buffer.extend(rows)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                fresh += 10
            count = buffer.write_count  # the first to be asked puts back what was not ended
            cursor = buffer.writer._cursor
            buffer[(cursor + 500) % 1000] = torch.tensor(fresh)
            places = buffer.extend(torch.arange(fresh + 1, fresh + 4))
            assert places.tolist() == [(cursor + step) % 1000 for step in range(3)]
            assert (buffer.writer._cursor, buffer.write_count) == ((cursor + 3) % 1000, count + 3)
            assert int(buffer[(cursor + 500) % 1000]) == fresh
            assert buffer[places].tolist() == [fresh + 1, fresh + 2, fresh + 3]
    wanted = standing(buffer)
    buffer.storage.close()
    assert standing(reopened(tmp_path)) == wanted


@pytest.mark.parametrize(
    "within", ["shared/folder", "shared/files", "storages/memmap", "shared/journal", "storages/tensors"]
)
def test_the_first_write_is_done_or_not(within: str, tmp_path: Path) -> None:
    moment = 1
    while True:
        folder = tmp_path / "rows"
        buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder))
        line = sent(lambda buffer=buffer: buffer.extend(torch.tensor([1, 2])), moment, (within,))
        if line is None:
            break
        found = standing(buffer)
        assert found in (([], 0, 0), ([1, 2], 2, 2)), line
        try:
            buffer.extend(torch.tensor([3]))
        except Exception as error:
            raise AssertionError(f"after a signal at {line}: {error!r}") from error
        wanted = ([*found[0], 3], found[1] + 1, found[2] + 1)
        assert standing(buffer) == wanted, line
        buffer.storage.close()
        assert standing(reopened(folder)) == wanted, line
        shutil.rmtree(folder)
        moment += 3
    assert moment > 10


# ------------------------------------------------------------------ priorities


@pytest.mark.parametrize("name", ["update_priority", "extend"])
def test_priorities_in_memory_and_in_the_folder_are_those_of_before_or_after(name: str, tmp_path: Path) -> None:
    def write(buffer: ReplayBuffer) -> None:
        if name == "extend":
            buffer.extend(torch.tensor([21, 22, 23]))
        else:
            buffer.update_priority(torch.tensor([1, 4]), torch.tensor([9.0, 0.5]))

    allowed = outcomes(prioritized, write, tmp_path / "model")
    moment = 1
    while True:
        folder = tmp_path / "rows"
        buffer = prioritized(folder)
        line = sent(lambda buffer=buffer: write(buffer), moment)
        if line is None:
            break
        found = standing(buffer)
        assert found in allowed, line
        buffer.storage.close()
        assert standing(reopened(folder, PrioritizedSampler(CAPACITY, 1.0, 1.0))) == found, line
        shutil.rmtree(folder)
        moment += 17
    assert moment > 100


# ------------------------------------------------------------------ whoever waits


def test_a_signal_beside_the_turn_keeps_no_thread_waiting(tmp_path: Path) -> None:
    buffer = wrapped(tmp_path)
    access = buffer.storage.lock
    got: list[bool] = []

    def take() -> None:
        got.append(access.threads.acquire(timeout=60))
        if got[-1]:
            access.threads.release()

    moment = 1
    while line := sent(lambda: buffer.extend(torch.tensor([21])), moment, ("shared/storage_lock", "buffers/turn")):
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        assert got.pop(), line
        buffer.extend(torch.tensor([22]))
        moment += 1
    assert moment > 15


def test_no_thread_waits_for_a_write_that_a_signal_ended(tmp_path: Path) -> None:
    moment = 1
    while True:
        buffer = wrapped(tmp_path / "rows")
        line = sent(lambda buffer=buffer: buffer.extend(torch.tensor([21, 22, 23])), moment, GUARDS)
        if line is None:
            break
        thread = threading.Thread(target=lambda buffer=buffer: buffer.extend(torch.tensor([9])), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), line
        assert buffer.write_count in (9, 12), line
        buffer.storage.close()
        shutil.rmtree(tmp_path / "rows")
        moment += 9
    assert moment > 50


# ------------------------------------------------------------------ signals that wait


def test_handlers_are_called_at_the_end_and_are_as_they_were() -> None:
    came: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda *what: came.append(what[0]))
    mine = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGINT)
            assert came == []
            done = True
        assert done and came == [signal.SIGUSR1]
        assert (
            signal.getsignal(signal.SIGUSR1) is mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handlers_do_what_they_did_whenever_a_signal_comes() -> None:
    came: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda *what: came.append(what))
    mine = signal.getsignal(signal.SIGUSR1)

    def guarded() -> None:
        with uninterrupted():
            pass

    try:
        moment = 1
        while (line := sent(guarded, moment, ("shared/interrupts",))) is not None:
            before_this = len(came)
            signal.raise_signal(signal.SIGUSR1)
            assert len(came) == before_this + 1, line
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            guarded()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, line
            assert signal.getsignal(signal.SIGUSR1) is mine, line
            moment += 1
        assert moment > 10
    finally:
        signal.signal(signal.SIGUSR1, before)
