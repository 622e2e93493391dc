"""Short forms of what `python -m tests.faults` does at length."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import damaging, failing, killing, losing
from tests.faults.subjects import few


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A child that was forked has no others."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def check(result: dict[str, Any], least: int) -> None:
    """Nothing is wrong, and something was done."""
    assert not result["wrong"], result["first wrong"]
    assert result["points"] >= least, result


def test_whoever_is_killed_leaves_the_old_one_or_the_new_one() -> None:
    result = killing.run(50, 1, few())
    check(result, 50)
    assert result["old"] and result["new"] and result["restarts"]


def test_at_random_times() -> None:
    result = killing.run_random(6, megabytes=20)
    check(result, 6)


def test_an_operation_that_fails_leaves_the_old_one() -> None:
    result = failing.run(80, 1, few())
    check(result, 70)
    assert result["raised"] > 25


def test_a_full_disk() -> None:
    result = failing.run_full()
    if "skipped" in result:
        pytest.skip(result["skipped"])
    check(result, 100)
    assert result["ENOSPC"] > 20 and result["saved"] > 20


@pytest.mark.slow
def test_what_was_not_flushed_may_be_lost() -> None:
    result = losing.run(900, 1, few())
    check(result, 900)
    assert result["old"] and result["new"] and result["different"] > 100


def test_damage_is_told_by_the_name_of_the_file() -> None:
    check(damaging.run(200, 1, damaging.damage_files, "damaging", few()), 200)


@pytest.mark.filterwarnings(
    "ignore:.*the checkpoint counts:UserWarning", "ignore:the buffer had batch_size:UserWarning"
)
def test_descriptions_that_are_made_up() -> None:
    check(damaging.run(300, 1, damaging.describe, "describing", few()), 300)


@pytest.mark.slow
def test_every_point_of_some() -> None:
    check(killing.run(600, seed=2), 600)


# ------------------------------------------------------------------ whether these tests can fail


@pytest.mark.slow
def test_what_is_not_flushed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fbuf.checkpoint.writing.flush", lambda path: None)
    assert losing.run(900, 1, few())["wrong"] > 10


@pytest.mark.slow
def test_what_is_not_put_in_place_at_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoSteps:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def rename(self, one: Path, other: Path) -> None:
            if other.exists():
                os.unlink(other)
            os.rename(one, other)

    monkeypatch.setattr("fbuf.checkpoint.writing.os", TwoSteps())
    assert killing.run(-1, 1, few()[2:3])["wrong"] > 0


def test_what_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Right(int):
        def __ne__(self, other: object) -> bool:
            return False

    class Sums:
        def crc32(self, *args: Any) -> int:
            return Right()

    monkeypatch.setattr("fbuf.checkpoint.reading.zlib", Sums())
    assert damaging.run(100, 1, damaging.damage_files, "damaging", few())["wrong"] > 0
