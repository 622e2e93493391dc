"""Kills, interrupts and full disks at every place of a call: it is done, or not begun, and the next call works."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import interop.transfer_queue
from tests.faults.file_operations import nothing, watched
from tests.interop.transfer_queue.histories import CALLS, prepared, state

ROOT = Path(__file__).parents[3]
CODE = str(Path(interop.transfer_queue.__file__).parent)


@pytest.mark.parametrize("call", CALLS)
def test_a_kill_at_any_file_operation_loses_nothing(tmp_path: Path, call: str) -> None:
    program = [sys.executable, "-m", "tests.interop.transfer_queue.killed_calls", str(tmp_path), call]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 8


@pytest.mark.parametrize("call", CALLS)
def test_a_full_disk_at_any_file_operation_changes_nothing(tmp_path: Path, call: str) -> None:
    files = prepared(tmp_path / "whole")
    before = state(tmp_path / "whole")
    with watched(nothing) as names:
        CALLS[call](files, tmp_path / "whole")
    after = state(tmp_path / "whole")
    failed = 0
    for number, name in enumerate(names):
        if name not in ("write", "open", "rename"):
            continue
        path = tmp_path / str(number)
        files = prepared(path)

        def hook(at: int, name: str, when: str, args: tuple[Any, ...], result: Any, number: int = number) -> Any:
            return full if (at, when) == (number, "before") else None

        with watched(hook):
            try:
                CALLS[call](files, path)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failed += 1
        assert state(path) in (before, after)
        CALLS[call](files, path)
        assert state(path) == after
    assert failed >= 1


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_at_any_line_loses_nothing(tmp_path: Path, call: str) -> None:
    files = prepared(tmp_path / "whole")
    before = state(tmp_path / "whole")
    CALLS[call](files, tmp_path / "whole")
    after = state(tmp_path / "whole")
    line = 0
    while line < 2000 and interrupted(files := prepared(path := tmp_path / str(line)), path, call, line):
        found = state(path)
        assert found in (before, after), line
        assert rows_of(files) == sorted(found), line
        CALLS[call](files, path)
        assert state(path) == after, line
        line += 1
    assert line > 30


def rows_of(files: interop.transfer_queue.QueueFiles) -> list[int]:
    return sorted(row.index for row in files.stored())


def interrupted(files: interop.transfer_queue.QueueFiles, path: Path, call: str, line: int) -> bool:
    """Interrupt the call at a line of the package. False where it has fewer lines."""
    left = line

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(CODE):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        CALLS[call](files, path)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
    return False
