"""`verify` finds every damaged byte, names the file, raises nothing for damage, and needs little memory."""

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    Report,
    TensorDictReplayBuffer,
    seal,
    verify,
)
from interop.shared.folder_description import STATE, SUMS
from tests.interop.looking.places import a_checkpoint, a_folder, a_list, an_ensemble, sparse, steps

MADE = {"checkpoint": a_checkpoint, "list": a_list, "ensemble": an_ensemble, "rows": a_folder}


def files_of(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file() and each.stat().st_size)


def flip(path: Path, at: int) -> None:
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.mark.parametrize("name", MADE)
def test_one_bit_of_any_file_is_found(name: str, tmp_path: Path) -> None:
    path = MADE[name](tmp_path / "it")
    report = verify(path)
    assert report.ok and not report.damaged and not report.notes and report.bytes > 0
    unchecked = ("storage.lock", "meta.json")  # who owns the folder; and what only other programs read
    for each in files_of(path):
        if each.name in unchecked:
            continue
        size = 8 * 16 if each.name == STATE else each.stat().st_size  # the counters; the undo record is no data
        for at in (8 * 8 if each.name == STATE else 0, size // 2, size - 1) if each.name != STATE else (8 * 8 + 8,):
            flip(each, at)
            found = verify(path)
            assert not found.ok, (each, at)
            assert each.name in str(found.damaged[0]) or name == "ensemble"
            flip(each, at)
    assert verify(path).ok


def test_damage_names_the_keys_that_the_file_holds(tmp_path: Path) -> None:
    """Of a checkpoint, of files of many rows, of a pytree, and of a folder of rows."""
    many = TensorDictReplayBuffer(storage=LazyTensorStorage(30))
    many.extend(TensorDict({"x": torch.zeros(30, 2), "next": {"image": torch.zeros(30, 25_000)}}, [30]))
    many.dumps(tmp_path / "many")
    fbuf.save_state(tmp_path / "state", {"rows": np.zeros((400, 1000)), "count": np.zeros(3)})
    a_checkpoint(tmp_path / "checkpoint")
    a_folder(tmp_path / "folder")
    found: dict[str, list[str]] = {}
    for each in files_of(tmp_path):
        if each.suffix not in (".json", ".lock", ".state", ".sums"):
            middle = each.stat().st_size // 2
            flip(each, middle)
            at = tmp_path / each.relative_to(tmp_path).parts[0]
            for damage in verify(at).damaged:
                found.setdefault(at.name, []).append(damage.holds)
                assert str(damage).endswith(f"It holds {damage.holds}" if damage.holds else damage.what)
            flip(each, middle)
    parts = [re.fullmatch(r"rows (\d+) to (\d+) of x, next.image, index", each) for each in found["many"]]
    rows = [row for part in parts if part for row in range(int(part[1]), int(part[2]) + 1)]
    assert rows == list(range(30)) and len(found["many"]) > 2
    assert found["state"][-1] == "['count']" and found["state"][0].endswith(" of ['rows']")
    assert any("sampler.state._priorities" in each for each in found["checkpoint"])
    assert "rows 0 to 19 of next.reward" in found["folder"] and "rows 0 to 19 of action" in found["folder"]


@pytest.mark.parametrize("name", MADE)
def test_missing_shorter_and_replaced_files_are_named(name: str, tmp_path: Path) -> None:
    path = MADE[name](tmp_path / "it")
    others = (STATE, "MANIFEST.json")  # without which it is no checkpoint
    largest = max((each for each in files_of(path) if each.name not in others), key=lambda each: each.stat().st_size)
    content = largest.read_bytes()
    largest.chmod(0o644)
    largest.write_bytes(content[:-1])
    assert largest.name in str(verify(path).damaged[0])
    largest.unlink()
    assert largest.name in str(verify(path).damaged[0])
    other = tmp_path / "other"
    other.write_bytes(content)
    largest.symlink_to(other)
    assert not verify(path).ok
    assert str(path) in str(verify(path))


def test_a_folder_reports_all_of_its_members(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name, make in MADE.items():
        make(tmp_path / "run" / name)
    calls: list[tuple[int, int]] = []
    report = verify(tmp_path / "run", lambda done, total: calls.append((done, total)))
    assert report.ok and report.kind == "folder"
    assert calls and all(0 < done <= total for done, total in calls)
    flip(next((tmp_path / "run" / "rows").glob("action.memmap")), 3)
    report = verify(tmp_path / "run")
    assert [Path(each.file).name for each in report.damaged] == ["action.memmap"]
    assert report.to_dict()["damaged"][0]["what"].endswith("the first one at byte 0")


def test_checksums_of_rows_are_outdated_by_the_next_owner_and_written_at_close(tmp_path: Path) -> None:
    path = a_folder(tmp_path / "rows", checksums=False)
    assert "no checksums" in verify(path).notes[0] and not (path / SUMS).exists()
    seal(path)
    assert verify(path).notes == []
    storage = LazyMemmapStorage.open(path)
    assert "outdated" in verify(path).notes[0]
    with pytest.raises(RuntimeError, match="in use"):
        seal(path)
    buffer = TensorDictReplayBuffer(storage=storage)
    buffer.extend(steps(3))
    assert verify(path).ok
    storage.close()
    assert verify(path).notes == []
    reader = LazyMemmapStorage.open(path, "r")
    assert verify(path).notes == [] and len(reader) == 20
    LazyMemmapStorage.open(path).cleanup()
    assert not list(path.iterdir())


KILLED = """
import os, torch
from interop import LazyMemmapStorage

if (child := os.fork()) == 0:
    for run in range(2):
        storage = LazyMemmapStorage.open(path)
        storage.set(range(2), torch.full((2, 3), 7.0))
        if not run:
            storage.close()
    os.kill(os.getpid(), 9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
"""


def test_a_killed_writer_leaves_no_wrong_checksums(in_a_fork: Callable[..., str], tmp_path: Path) -> None:
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "rows", checksums=True)
    storage.set(range(4), torch.ones(4, 3))
    storage.close()
    in_a_fork(KILLED, path=str(tmp_path / "rows"))
    report = verify(tmp_path / "rows")
    assert report.ok and "has not closed it" in report.notes[0]
    seal(tmp_path / "rows")
    assert verify(tmp_path / "rows").notes == []


def test_writes_take_no_more_operations_with_checksums(tmp_path: Path) -> None:
    data = TensorDict({"x": torch.zeros(2, 3)}, [2])
    storages = [
        LazyMemmapStorage(8, scratch_dir=tmp_path / name, checksums=name == "with") for name in ("with", "without")
    ]
    for storage in storages:
        storage.set(range(2), data)
    assert not any((tmp_path / name / SUMS).exists() for name in ("with", "without"))
    for storage in storages:
        storage.close()
    assert (tmp_path / "with" / SUMS).exists() and not (tmp_path / "without" / SUMS).exists()


def memory_to_verify(path: Path) -> tuple[Report, int]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = verify(path)
    return report, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("size", [1 << 28, pytest.param(100 << 30, marks=pytest.mark.slow)])
def test_large_rows_are_streamed(size: int, tmp_path: Path) -> None:
    path = sparse(tmp_path / "rows", size)
    seal(path)
    report, memory = memory_to_verify(path)
    assert report.ok and report.bytes > size and not report.notes
    assert memory < 32 << 10  # KiB
    with open(
        path / "_-single-tensor-_.memmap" if (path / "_-single-tensor-_.memmap").exists() else largest(path), "r+b"
    ) as file:
        file.seek(size // 2)
        file.write(b"x")
    assert f"byte {size // 2:,}" in str(verify(path))


def largest(path: Path) -> Path:
    return max(path.iterdir(), key=os.path.getsize)
