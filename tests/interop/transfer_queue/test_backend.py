"""TransferQueue itself over files: all of its processes are killed, and the next run goes on."""

import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transfer_queue")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


class Run:
    """A run in a session of processes of its own."""

    def __init__(self, path: Path, temporary: Path) -> None:
        environment = os.environ | {
            "RAY_TMPDIR": str(temporary),
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        program = [sys.executable, "-m", "tests.interop.transfer_queue.a_run", str(path)]
        self._process = subprocess.Popen(
            program,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.answer("ready") == "ready"

    def answer(self, *known: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(known or ("[", "acknowledged")):
                return line.strip()
        raise AssertionError("the run has ended")

    def tell(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.answer()

    def send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the process and all below it, at once."""
        for child in _below(self._process.pid):
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


def _below(root: int) -> list[int]:
    """A process, and all that it has started, by what the kernel says."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, open_ = [], [root]
    while open_:
        found.append(open_.pop())
        open_ += parents.get(found[-1], [])
    return found


@pytest.fixture
def temporary() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path: Ray's sockets lie below it
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def groups(listed: str) -> list[int]:
    rows = ast.literal_eval(listed)
    assert all(complete for _, _, complete in rows)
    found = [group for _, group, _ in rows]
    assert all(found.count(group) == 4 for group in found)
    return sorted(set(found))


def test_acknowledged_groups_survive_a_kill_of_everything(tmp_path: Path, temporary: Path) -> None:
    trained: list[int] = []
    first = Run(tmp_path / "queue", temporary)
    try:
        for group in range(3):
            assert first.tell(f"put {group}") == "acknowledged"
        trained.append(_group(first.tell("train")))
        first.send("put 3")  # not acknowledged: whole afterwards, or not there
    finally:
        first.kill()
    second = Run(tmp_path / "queue", temporary)
    try:
        there = groups(second.tell("list"))
        assert set(range(3)) - set(trained) <= set(there) <= set(range(4)) - set(trained)
        assert second.tell("put 4") == "acknowledged"
        trained += [_group(second.tell("train")) for _ in range(len(there) + 1)]
        assert groups(second.tell("list")) == []
    finally:
        second.kill()
    assert len(trained) == len(set(trained)) and set(trained) >= {0, 1, 2, 4}
    assert list((tmp_path / "queue" / "segments").iterdir()) == []


def _group(answer: str) -> int:
    """The group of a batch of four rows, all of which are of it."""
    values = set(ast.literal_eval(answer))
    assert len(values) == 1
    return int(values.pop())
