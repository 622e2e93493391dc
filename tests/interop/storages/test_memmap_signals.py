"""Signals whose handlers raise, in the middle of writes to a storage in a folder: a write is done, or it is not."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from tests.interop.storages.named_folders import reopened
from tests.interop.storages.signals import raising, sent, standing

CAPACITY = 6


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    with raising():
        yield


def sampler() -> PrioritizedSampler:
    return PrioritizedSampler(CAPACITY, 1.0, 1.0)


def wrapped(folder: Path) -> ReplayBuffer:
    """A ring that was filled and has gone on, in a new folder."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder))
    buffer.extend(torch.arange(1, 9))
    return buffer


def prioritized(folder: Path) -> ReplayBuffer:
    buffer = wrapped(folder)
    buffer.set_sampler(sampler())
    buffer.update_priority(torch.arange(CAPACITY), torch.arange(CAPACITY) + 2.0)
    return buffer


def unwritten(folder: Path) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder))


Make, Write = Callable[[Path], ReplayBuffer], Callable[[ReplayBuffer], Any]
WRITES: dict[str, tuple[Make, Write, int]] = {  # with how many lines a moment is from the next
    "extend": (wrapped, lambda buffer: buffer.extend(torch.tensor([21, 22, 23])), 7),
    "add": (wrapped, lambda buffer: buffer.add(torch.tensor(31)), 11),
    "set": (wrapped, lambda buffer: buffer.__setitem__(3, torch.tensor(41)), 5),
    "empty": (wrapped, lambda buffer: buffer.empty(), 5),
    "first extend": (unwritten, lambda buffer: buffer.extend(torch.tensor([21, 22, 23])), 29),
    "extend with priorities": (prioritized, lambda buffer: buffer.extend(torch.tensor([21, 22, 23])), 23),
    "update_priority": (
        prioritized,
        lambda buffer: buffer.update_priority(torch.tensor([1, 4]), torch.tensor([9.0, 0.5])),
        23,
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_done_or_not_and_what_follows_is_kept(name: str, tmp_path: Path) -> None:
    make, write, apart = WRITES[name]
    model = make(tmp_path / "model")
    allowed = [standing(model)]
    write(model)
    allowed.append(standing(model))
    folder, moment = tmp_path / "rows", 1
    while True:
        buffer = make(folder)
        line = sent(lambda buffer=buffer: write(buffer), moment)
        if line is None:
            break
        found = standing(buffer)
        assert found in allowed, line
        thread = threading.Thread(target=lambda buffer=buffer: buffer.extend(torch.tensor([77])), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), line
        later = standing(buffer)
        assert later[1:3] == ((found[1] + 1) % CAPACITY, found[2] + 1) and later[0][found[1]] == 77, line
        buffer.storage.close()
        assert standing(reopened(folder, sampler=sampler() if make is prioritized else None)) == later, line
        shutil.rmtree(folder)
        moment += apart
    assert moment > 5 * apart
