"""Loads into storages in folders count as a whole, of a process that is killed or gets a signal; also right after them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from interop.engine.kept_priorities import KeptPriorities
from interop.host.rows import TorchRows
from interop.shared.journal import Journal
from tests.interop.storages.named_folders import reopened
from tests.interop.storages.signals import raising, sent, standing

CAPACITY = 8
Call = Callable[..., Any]
# Where to be killed: a method, and whether before or after it. The first call of it in the load counts.
MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "rows are about to be written": (TorchRows, "write_run", False),
    "rows were written": (TorchRows, "write_run", True),
    "priorities are about to be kept": (KeptPriorities, "give", False),
    "priorities were kept": (KeptPriorities, "give", True),
    "the step is about to end": (Journal, "__exit__", False),
    "the step has ended": (Journal, "__exit__", True),
}
WITHOUT_ROWS = ("priorities were kept", "the step is about to end", "the step has ended")


def sampler() -> PrioritizedSampler:
    return PrioritizedSampler(CAPACITY, 1.0, 1.0)


def old(folder: Path) -> ReplayBuffer:
    """What is there before the load."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder), sampler=sampler())
    buffer.extend(torch.arange(101, 106))
    buffer.update_priority(torch.arange(5), torch.arange(5) + 21.0)
    return buffer


def new() -> ReplayBuffer:
    """What is loaded."""
    buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY), sampler=sampler())
    buffer.extend(torch.arange(1, 11))
    buffer.update_priority(torch.arange(CAPACITY), torch.arange(CAPACITY) + 2.0)
    return buffer


def at(moment: str, then: Callable[[], Any]) -> Callable[[], None]:
    """Have something done at a moment; what is returned puts the method back."""
    kind, name, after = MOMENTS[moment]
    real: Call = getattr(kind, name)

    def wrapped(self: Any, *given: Any, **named: Any) -> Any:
        if not after:
            then()
        result = real(self, *given, **named)
        if after:
            then()
        return result

    setattr(kind, name, wrapped)
    return lambda: setattr(kind, name, real)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Any, Any]:
    """What a buffer stands at before a load and after it."""
    return standing(old(tmp_path / "old")), standing(new())


def goes_on(buffer: ReplayBuffer) -> None:
    """What is written next comes after what is there."""
    rows, cursor, count, priorities, highest = standing(buffer)
    buffer.extend(torch.tensor([77]))
    rows[cursor : cursor + 1], priorities[cursor : cursor + 1] = [77], [highest]
    assert standing(buffer) == (rows, (cursor + 1) % CAPACITY, count + 1, priorities, highest)


@pytest.mark.parametrize("call", ["loads", "load_state_dict"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_what_is_in_the_folder_is_the_old_or_the_new(
    moment: str, call: str, tmp_path: Path, models: tuple[Any, Any]
) -> None:
    """What a process killed at that moment would leave: its files as they are then."""
    source, target = new(), old(tmp_path / "rows")
    source.dumps(tmp_path / "c")
    given = tmp_path / "c" if call == "loads" else source.state_dict()
    back = at(moment, lambda: shutil.copytree(tmp_path / "rows", tmp_path / "left", dirs_exist_ok=True))
    try:
        getattr(target, call)(given)
    finally:
        back()
    buffer = reopened(tmp_path / "left", sampler())
    assert standing(buffer) in models
    goes_on(buffer)


@pytest.mark.parametrize("moment", WITHOUT_ROWS)
def test_a_first_load_that_is_killed_leaves_nothing_or_all(
    moment: str, tmp_path: Path, models: tuple[Any, Any]
) -> None:
    new().dumps(tmp_path / "c")
    target = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows"), sampler=sampler())
    back = at(moment, lambda: shutil.copytree(tmp_path / "rows", tmp_path / "left", dirs_exist_ok=True))
    try:
        target.loads(tmp_path / "c")
    finally:
        back()
    try:
        storage = LazyMemmapStorage.open(tmp_path / "left")
    except FileNotFoundError:  # unfinished: it can be made anew
        storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "left")
    buffer = ReplayBuffer(storage=storage, sampler=sampler())
    if len(buffer):
        assert standing(buffer) == models[1]
    else:
        assert (buffer.write_count, buffer.writer.cursor) == (0, 0)
        buffer.extend(torch.tensor([5, 6]))
    goes_on(buffer)


# ------------------------------------------------------------------ signals


@pytest.fixture
def interrupts() -> Iterator[None]:
    with raising():
        yield


STEPS = {
    "buffers/checkpoints": 7,
    "engine/saved_rows": 5,
    "engine/table": 9,
    "storages/": 2,
    "samplers/": 13,
    "host/priorities": 5,
}  # files, lines apart


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("call", ["loads", "load_state_dict"])
@pytest.mark.parametrize("within", STEPS)
def test_a_load_that_gets_a_signal_is_done_or_not(
    within: str, call: str, tmp_path: Path, models: tuple[Any, Any]
) -> None:
    source = new()
    source.dumps(tmp_path / "c")
    given = tmp_path / "c" if call == "loads" else source.state_dict()
    target, expected, moment, came = old(tmp_path / "rows"), models[0], 1, 0
    state = target.state_dict()
    while (line := sent(lambda target=target: getattr(target, call)(given), moment, (within,))) is not None:
        found = standing(target)
        assert found in (expected, models[1]), line
        goes_on(target)
        later = standing(target)
        target.storage.close()
        target = reopened(tmp_path / "rows", sampler())
        assert standing(target) == later, line
        target.load_state_dict(state)
        assert standing(target) == expected, line
        moment, came = moment + STEPS[within], came + 1
    assert came > 2
