"""Short forms of what `python -m tests.faults` does at length."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import arguments, damaging, described, failing, interrupts, killing, losing, matrix, threads
from tests.faults.counts import Counts
from tests.faults.subjects import few

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of parameters that the checkpoint has otherwise


def test_a_killed_save_leaves_the_old_one_or_the_new_one() -> None:
    killing.at_operations(30, 1, few()).check(30, old=1, new=1, restarts=1)
    killing.at_random_times(6, megabytes=20).check(6, killed=1)


def test_an_operation_that_fails_leaves_the_old_one() -> None:
    failing.operations(70, 1, few()).check(70, raised=20)


def test_a_full_disk() -> None:
    counts = failing.full_disk(16)
    if not counts.cases:
        pytest.skip("no file system can be mounted here")
    counts.check(32, OSError=8, saved=8)


def test_an_error_names_the_damaged_file() -> None:
    damaging.files(150, 1, few()).check(150)


def test_descriptions_that_are_made_up() -> None:
    damaging.descriptions(200, 1, few()).check(200, refused=100)


def test_descriptions_of_datasets_that_are_changed() -> None:
    described.datasets(64, seed=1).check(64, **{"typed error": 40, "same rows": 5})


def test_buffers_that_are_built_otherwise() -> None:
    matrix.pairs(80, seed=1).check(70, loads=10, refused=20)


def test_arguments() -> None:
    arguments.calls(300).check(250, refused=100, taken=30)


def test_an_exception_at_any_line_leaves_a_call_done_or_not_done() -> None:
    calls = ("extend", "sample", "empty", "update_priority", "set_sampler", "dumps")
    interrupts.lines(180, 1, interrupts.FEW, calls).check(180, before=36, after=36)


def test_an_exception_at_any_line_leaves_a_whole_dataset_or_none() -> None:
    interrupts.datasets(30, 1).check(25)


@pytest.mark.slow
def test_more_exceptions_at_lines() -> None:
    interrupts.lines(4000, 2).check(3000)


def test_a_call_that_is_left_half_done_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is undone or finished."""
    monkeypatch.setattr("interop.buffers.replay_buffer.finish_or_undo", lambda *args, **options: None)
    assert interrupts.cases(interrupts.FEW[0], "extend", 3).wrong > 5


def test_checkpoints_beside_writers_are_of_one_moment() -> None:
    threads.checkpoints(4).check(20)


def test_prefetched_batches_that_are_slow_or_fail() -> None:
    threads.prefetches(15, seed=1000).check(15)


def in_a_process(code: str) -> Counts:
    """The counts of a test in a process in which JAX does not run: forked children of others may hang."""
    code = f"import json\n{code}\nprint(json.dumps(vars(counts)))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return Counts(**json.loads(done.stdout.splitlines()[-1]))


def test_a_killed_call_leaves_a_whole_dataset_or_none() -> None:
    loaders = ["toy", "minari", "hub_folder"]
    counts = in_a_process(f"from tests.faults.datasets import kills\ncounts = kills(6, 0, {loaders}, short=True)")
    counts.check(10, restarts=10)


# ------------------------------------------------------------------ more of it


@pytest.mark.slow
def test_more_descriptions_of_datasets() -> None:
    described.datasets(1200, seed=2).check(1200, **{"typed error": 600, "same rows": 100})


@pytest.mark.slow
def test_more_kills_and_losses() -> None:
    killing.at_operations(600, seed=2).check(600)
    losing.unflushed(900, 1, few()).check(900, old=1, new=1, different=100)
    threads.everything(4).check(10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "from tests.faults.datasets import kills\ncounts = kills(24, short=True)",
        "from tests.faults.memmap import kills\ncounts = kills(40, 7)",
        "from tests.faults.shards import kills\ncounts = kills(2, 3)",
    ],
    ids=["datasets", "memory map", "shards"],
)
def test_more_kills_elsewhere(code: str) -> None:
    if "shards" in code:
        pytest.importorskip("ray")
    in_a_process(code).check(2)


# ------------------------------------------------------------------ whether these tests can fail


def test_wrong_expectations_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = matrix.expected
    monkeypatch.setattr(matrix, "expected", lambda *args, **options: not real(*args, **options))
    counts = matrix.pairs(20, seed=1)
    assert counts.wrong == counts.cases > 0
    with pytest.raises(AssertionError):
        counts.check(0)


def test_checkpoints_of_two_moments_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves wait for nobody."""
    monkeypatch.setattr(threads.TensorDictReplayBuffer, "_unchanging", lambda self: contextlib.nullcontext())
    assert any(threads.checkpoints(20, ["tensor, uniform"]).wrong for _ in range(20))


@pytest.mark.slow
def test_a_save_without_flushes_or_one_rename_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoSteps:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def rename(self, one: Path, other: Path) -> None:
            if other.exists():
                os.unlink(other)
            os.rename(one, other)

    with monkeypatch.context() as patched:
        patched.setattr("fbuf.checkpoint.writing.flush", lambda path: None)
        assert losing.unflushed(900, 1, few()).wrong > 10
    monkeypatch.setattr("fbuf.checkpoint.writing.os", TwoSteps())
    assert killing.at_operations(10**6, 1, few()[2:3]).wrong > 0


@pytest.mark.parametrize("size", [2**31, 2**63, 2**70])
def test_a_batch_that_is_too_large_leaves_the_generator_alone(size: int) -> None:
    buffer, other = arguments.made("tensor, uniform"), arguments.made("tensor, uniform")
    with pytest.raises(ValueError, match="less than 2\\*\\*31"):
        buffer.sample(size)
    assert torch.equal(buffer.sample()["index"], other.sample()["index"])
