"""Loads into storages in folders count as a whole, of a process that is killed or gets a signal; also right after them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interop import LazyMemmapStorage, ReplayBuffer
from tests.interop.checkpoint import killed_loads
from tests.interop.checkpoint.killed_loads import (
    CAPACITY,
    MOMENTS,
    RETURNED,
    WITHOUT_ROWS,
    at,
    new,
    old,
    sampler,
)
from tests.interop.storages.named_folders import reopened
from tests.interop.storages.signals import raising, sent, standing


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, in_a_fork: Callable[..., str]) -> Path:
    """The folders that killed processes have left."""
    root = tmp_path_factory.mktemp("killed")
    new().dumps(root / "c")
    in_a_fork(f"import pathlib, {killed_loads.__name__} as here; here.main(pathlib.Path(root))", root=str(root))
    return root


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


@pytest.mark.parametrize("name", RETURNED)
def test_a_load_that_returned_is_there_after_a_kill(name: str, killed: Path, models: tuple[Any, Any]) -> None:
    buffer = reopened(killed / name, sampler())
    assert standing(buffer) == models[1]
    goes_on(buffer)


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
        assert (buffer.write_count, buffer.writer._cursor) == (0, 0)
        buffer.extend(torch.tensor([5, 6]))
    goes_on(buffer)


# ------------------------------------------------------------------ signals


@pytest.fixture
def interrupts() -> Iterator[None]:
    with raising():
        yield


STEPS = {
    "buffers/checkpoints": 7,
    "checkpoint/tensor_states": 5,
    "storages/": 19,
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
