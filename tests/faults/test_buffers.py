"""Short forms of what `python -m tests.faults` does with buffers at length."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.faults import __main__ as runner
from tests.faults import arguments, matrix, threads

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of parameters that the checkpoint has otherwise


def check(result: dict[str, Any], least: int) -> None:
    """Nothing is wrong, and something was done."""
    assert not result["wrong"], result["first wrong"]
    assert result["points"] >= least, result


def test_buffers_that_are_built_otherwise() -> None:
    result = matrix.run(80, seed=1)
    check(result, 70)
    assert result["loads"] > 10 and result["refused"] > 20


def test_what_is_expected_of_them_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    real = matrix.expected
    monkeypatch.setattr(matrix, "expected", lambda *args, **options: not real(*args, **options))
    assert matrix.run(20, seed=1)["wrong"] == matrix.run(20, seed=1)["points"]


def test_arguments() -> None:
    result = arguments.run(every=59)
    check(result, 250)
    assert result["refused"] > 100 and result["taken"] > 30


@pytest.mark.slow
def test_threads_that_do_everything() -> None:
    check(threads.run(4), 10)


def test_checkpoints_beside_writers_are_of_one_moment() -> None:
    check(threads.run_dumps(5), 25)


def test_checkpoints_of_two_moments_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody waits for whoever saves."""
    monkeypatch.setattr(threads.TensorDictReplayBuffer, "_turns", lambda self: contextlib.nullcontext())
    assert any(threads.run_dumps(20, seed, ["tensor, uniform"])["wrong"] for seed in range(20))


def test_batches_drawn_ahead_that_are_slow_or_fail() -> None:
    check(threads.run_prefetch(15, seed=1000), 15)


def test_every_command_of_the_runner_is_understood() -> None:
    for each in runner.RUNS:
        for command in filter(None, (each.command, each.quick)):
            name, *rest = runner.arguments_of(command)[1:]
            assert name == "pytest" or name.startswith("tests.faults."), (name, rest)
    assert runner.result_of('{"test": "x", "points": 3, "wrong": 1, "old": 2}\n') == (3, 1, "2 old")
    assert runner.result_of("5 passed in 3 s\n") == (5, 0, "")
    assert runner.result_of("20 kills in 1 s: 0 torn, 0 lost") == (20, 0, "")
    assert runner.result_of("all Counts(lost=1, torn=2, reads=4, tried=9)") == (9, 3, "4 batches read")


def test_the_page_has_a_place_for_the_table() -> None:
    page = runner.PAGE.read_text()
    assert 0 < page.find(runner.BEGIN) < page.find(runner.END)


# ------------------------------------------------------------------ what was found once


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_a_list_that_was_emptied_can_be_saved(rows: int, tmp_path: Path) -> None:
    buffer, other = threads.buffer_of("list, uniform"), threads.buffer_of("list, uniform")
    buffer.extend(threads.block(0)), buffer.extend(threads.block(1))
    buffer.empty()
    for each in threads.block(2)[:rows]:
        buffer.add(each)
    buffer.dumps(tmp_path / "c")
    other.loads(tmp_path / "c")
    assert len(other) == rows and all(
        (one == each).all() for one, each in zip(other.storage, buffer.storage, strict=True)
    )


@pytest.mark.parametrize("size", [2**31, 2**63, 2**70])
def test_a_batch_that_is_too_large_leaves_the_generator_alone(size: int) -> None:
    buffer = arguments.made("tensor, uniform")
    before = buffer._rng.get_state()
    with pytest.raises(ValueError, match="less than 2\\*\\*31"):
        buffer.sample(size)
    assert (buffer._rng.get_state() == before).all()
