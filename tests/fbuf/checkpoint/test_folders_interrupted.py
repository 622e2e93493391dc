"""The folder of a checkpoint after interrupts, errors of the system, and newer versions."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fbuf.checkpoint import CheckpointMismatch
from fbuf.checkpoint.files import at_once, remove_folder
from tests.fbuf.checkpoint.trees import loaded, same, save

BIG = np.arange(500_000)


@contextlib.contextmanager
def _interrupted(name: str, when: str) -> Iterator[None]:
    """Ctrl-C just before, or just after, a function of `os` was called with the manifest, or with the data."""
    real = getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            raise KeyboardInterrupt
        real(*args, **kwargs)
        raise KeyboardInterrupt

    setattr(os, name, call)
    try:
        yield
    finally:
        setattr(os, name, real)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["mkdir", "open", "write", "fsync", "rename", "fstat", "listdir"])
def test_interrupts_leave_the_old_one_or_the_new_one(name: str, when: str, tmp_path: Path) -> None:
    save(tmp_path / "c", ["old", BIG])
    with pytest.raises(KeyboardInterrupt), _interrupted(name, when):
        save(tmp_path / "c", ["new", BIG + 1])
    assert same(loaded(tmp_path / "c"), ["old", BIG]) or same(loaded(tmp_path / "c"), ["new", BIG + 1])
    save(tmp_path / "c", ["newer", BIG])  # nobody waits
    assert same(loaded(tmp_path / "c"), ["newer", BIG])
    assert len(os.listdir(tmp_path / "c")) == 2


def test_an_interrupt_after_any_close_comes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the folder of the old checkpoint is removed: no handle is closed twice, for it may be another's by then."""
    real, calls, at, was_raised = os.close, 0, -1, False

    def close(handle: int) -> None:
        nonlocal calls, was_raised
        real(handle)
        if threading.current_thread() is threading.main_thread():  # where handlers of signals run
            calls += 1
            if calls == at:
                was_raised = True
                raise KeyboardInterrupt

    monkeypatch.setattr(os, "close", close)
    save(tmp_path / "c", ["old", BIG])
    calls = 0
    save(tmp_path / "c", ["new", BIG])
    for number in range(1, calls + 1):
        calls, at, was_raised, came_through = 0, number, False, False
        try:
            save(tmp_path / "c", ["newer", BIG])
        except KeyboardInterrupt:
            came_through = True
        assert came_through == was_raised  # other threads may have closed some of the files
        at = -1
        save(tmp_path / "c", ["new", BIG])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["open", "stat", "unlink", "rmdir", "close"])
def test_interrupts_of_the_removal_of_a_folder_come_through(name: str, when: str, tmp_path: Path) -> None:
    (tmp_path / "f" / "below" / "deeper").mkdir(parents=True)
    (tmp_path / "f" / "below" / "file").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "stays").touch()
    (tmp_path / "f" / "to a folder").symlink_to(tmp_path / "mine")
    (tmp_path / "f" / "to nothing").symlink_to(tmp_path / "nothing")
    with pytest.raises(KeyboardInterrupt), _interrupted(name, when):
        remove_folder(tmp_path / "f")
    remove_folder(tmp_path / "f")
    remove_folder(tmp_path / "f")  # it is gone
    assert [*tmp_path.rglob("*")] == [tmp_path / "mine", tmp_path / "mine" / "stays"]
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    remove_folder(tmp_path / "link")
    assert (tmp_path / "mine" / "stays").exists()


def test_a_rename_that_was_done_but_says_that_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system over a network."""
    real = os.rename

    def rename(*args: Any) -> None:
        real(*args)
        raise OSError("no answer")

    save(tmp_path / "c", ["old", BIG])
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="no answer"):
        save(tmp_path / "c", ["new", BIG])
    assert same(loaded(tmp_path / "c"), ["new", BIG])


def test_a_newer_schema_is_a_mismatch(tmp_path: Path) -> None:
    save(tmp_path / "c", 1)
    manifest = tmp_path / "c" / "MANIFEST.json"
    content = manifest.read_bytes().replace(b'"schema":1', b'"schema":2', 1)
    manifest.unlink()
    manifest.write_bytes(content)
    with pytest.raises(CheckpointMismatch, match="schema 2 is not known"):
        loaded(tmp_path / "c")


@pytest.mark.parametrize("interrupted", [False, True])
def test_of_jobs_in_threads_the_first_error_or_a_signal_is_raised(interrupted: bool) -> None:
    def job(number: int) -> int:
        time.sleep(0.05 if number < 2 else 0.001)
        if number in (1, 2):
            raise OSError(number)
        return number

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    assert at_once([partial(job, number) for number in (0, *range(3, 99))]) == [0, *range(3, 99)]
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.02 if interrupted else 0)
    try:
        with pytest.raises(KeyboardInterrupt if interrupted else OSError, match=None if interrupted else "^1$"):
            at_once([partial(job, number) for number in range(99)])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
