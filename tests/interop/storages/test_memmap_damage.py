"""Damaged, unfinished and forged folders of a storage: an error that names the file, or what is there is right."""

import gc
import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from interop.engine.table import Claim
from interop.shared import folder_description
from tests.faults.damaging import changed, places
from tests.interop.rows import check_same, flat_td, nested_td
from tests.interop.storages.named_folders import made, reopened

CAPACITY = 6
KNOWN = {*range(8), *range(50, 60)}  # all rows that are ever written here
EXTREMES = (-1, 1, 2, 6, 7, 12, 1024, 1025, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))


def sampler() -> PrioritizedSampler:
    return PrioritizedSampler(CAPACITY, 1.0, 1.0, eps=0.0)


def everything(path: Path) -> dict[str, bytes]:
    return {each.relative_to(path).as_posix(): each.read_bytes() for each in path.rglob("*") if each.is_file()}


class Killed(BaseException):
    pass


@pytest.fixture(scope="module", params=["in a run", "in a list", "between writes"])
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a full ring as a killed process leaves it."""
    path = tmp_path_factory.mktemp("damage")
    buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=path / "rows"), sampler=sampler())
    buffer.extend(torch.arange(8))
    buffer.update_priority(torch.arange(CAPACITY), torch.arange(1.0, 7))
    with pytest.raises(Killed), buffer.storage.guard.transaction():
        if request.param == "in a run":
            buffer.storage.table.write_run(Claim(2, torch.arange(2, 5)), torch.tensor([50, 51, 52]))
        elif request.param == "in a list":
            buffer.storage.set(torch.tensor([1, 4, 2]), torch.tensor([53, 54, 55]))
        shutil.copytree(path / "rows", path / "left")
        raise Killed
    return path / "left"


def damaged(source: Path, target: Path, name: str, content: bytes) -> Path:
    """A copy with one file of other content."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    (target / name).write_bytes(content)
    return target


def opens(path: Path) -> bool:
    """Whether it opens; then it is written to, too. Any error that is not of a checkpoint is one of the test."""
    try:
        buffer = ReplayBuffer(storage=LazyMemmapStorage.open(path), sampler=sampler())
    except CheckpointCorrupt:
        return False
    rows = buffer[:].tolist() if len(buffer) else []
    assert set(rows) <= KNOWN and len(rows) <= CAPACITY
    slots = buffer.extend(torch.tensor([56, 57, 58]))
    assert int(slots.min()) >= 0 and int(slots.max()) < CAPACITY and buffer[slots].tolist() == [56, 57, 58]
    buffer[0] = torch.tensor(59)
    buffer.update_priority(torch.tensor([0]), 3.0)
    buffer.empty()
    buffer.extend(torch.arange(50, 58))
    assert sorted(buffer[:].tolist()) == [52, 53, 54, 55, 56, 57]
    buffer.storage.close()
    return True


def test_what_a_killed_process_leaves_opens_as_it_was(left: Path, tmp_path: Path) -> None:
    shutil.copytree(left, tmp_path / "rows")
    buffer = reopened(tmp_path / "rows", sampler=sampler())
    assert buffer[:].tolist() == [6, 7, 2, 3, 4, 5]
    assert (buffer.sampler.priorities.tolist(), buffer.sampler.default_priority) == ([1, 2, 3, 4, 5, 6], 6)


@pytest.mark.parametrize("name", ["storage.state", "storage.priorities"])
def test_words_of_the_counters_are_right_or_damage(name: str, left: Path, tmp_path: Path) -> None:
    content, rng, opened = (left / name).read_bytes(), random.Random(name), []
    last = len(content) // 8
    for word in [*range(min(24, last)), *range(max(24, last - CAPACITY), last)]:
        bad = bytearray(content)
        struct.pack_into("q", bad, 8 * word, rng.choice(EXTREMES))
        opened.append(opens(damaged(left, tmp_path / "rows", name, bytes(bad))))
    assert len(set(opened)) == 2  # some is damage, and some does not matter


NO_DESCRIPTIONS = (
    *(b"[]", b'"checksum"', b'{"checksum": 3, "storage": {}}', b'{"checksum": "00000000"}', b"\xff"),
    b'{"checksum": "00000000", "storage": ' + b"[" * 100_000,
)


def test_every_byte_of_the_description_counts(tmp_path: Path) -> None:
    made(tmp_path, flat_td(range(4))).storage.close()
    content = (tmp_path / "storage.json").read_bytes()
    bad = [content[:length] for length in range(0, len(content) - 1, 31)]  # but for the newline
    bad += [content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :] for at in range(0, len(content), 11)]
    for each in (*bad, *NO_DESCRIPTIONS):
        (tmp_path / "storage.json").write_bytes(each)
        with pytest.raises(CheckpointCorrupt, match=r"storage\.json"):
            LazyMemmapStorage.open(tmp_path, "r")


@pytest.mark.parametrize("name", ["obs.memmap", "storage.state", "storage.json", "storage.priorities", "storage.lock"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long", "link", "folder", "pipe"])
def test_damaged_files_are_named(name: str, damage: str, tmp_path: Path) -> None:
    made(tmp_path, flat_td(range(5)), sampler=PrioritizedSampler(5, 0.7, 0.5)).storage.close()
    gc.collect()
    path = tmp_path / name
    data = path.read_bytes()
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage in ("folder", "pipe"):
        (os.mkdir if damage == "folder" else os.mkfifo)(path)
    elif damage != "missing":
        path.write_bytes({"empty": b"", "short": data[:-3], "long": data + b"x"}[damage])
    gone = name in ("storage.priorities", "storage.lock") and damage == "missing"  # as if there had been none
    if gone or (name == "storage.lock" and damage in ("empty", "short", "long")):
        assert len(LazyMemmapStorage.open(tmp_path)) == 5
        return
    with pytest.raises((CheckpointCorrupt, OSError), match=name):
        LazyMemmapStorage.open(tmp_path)


# ------------------------------------------------------------------ what is unfinished, or is no storage


def test_a_folder_without_a_storage_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="no storage"):
            LazyMemmapStorage.open(path)
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_creation_is_removed_and_nothing_else(in_a_fork: Any, tmp_path: Path) -> None:
    in_a_fork(
        """
        import os
        from tests.interop.rows import nested_td
        from tests.interop.storages.named_folders import made

        if not (child := os.fork()):
            os.fsync = os.replace = os.rename = lambda *_: os._exit(9)
            made(place, nested_td([1, 2]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        """,
        place=str(tmp_path),
    )
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(FileNotFoundError):
        LazyMemmapStorage.open(tmp_path)
    check_same(made(tmp_path, flat_td([3]))[:], flat_td([3]))
    found = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"mine.txt", "obs.memmap", "done.memmap", "meta.json", *folder_description.OWN[:3]}


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(2**58, scratch_dir=tmp_path / "data"))
    with pytest.raises(OSError):
        buffer.extend(torch.zeros(2, dtype=torch.uint8))
    assert not (tmp_path / "data").exists()


def test_an_opened_storage_can_be_cleaned_up(tmp_path: Path) -> None:
    made(tmp_path, nested_td([1]), sampler=PrioritizedSampler(5, 0.7, 0.5))
    (tmp_path / "mine").write_text("kept")
    storage = reopened(tmp_path).storage
    assert storage.cleanup() is True and storage.cleanup() is False
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"mine"}


def test_keys_that_are_names_of_its_own_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rename"):
        made(tmp_path, TensorDict({"storage.state": {"a": torch.ones(2)}}, [2]))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ forged folders


@pytest.mark.parametrize("mode", ["r", "r+", "w", "shared"])
def test_nothing_is_read_from_or_written_behind_a_link(mode: Any, tmp_path: Path) -> None:
    path = tmp_path / "a"
    made(path, nested_td(range(5))).storage.close()
    gc.collect()
    shutil.move(path / "next", tmp_path / "elsewhere")
    (path / "next").symlink_to(tmp_path / "elsewhere")
    before = everything(tmp_path / "elsewhere")
    with pytest.raises(CheckpointCorrupt, match="a/next should be a folder, found a symbolic link"):
        if mode in ("r", "r+"):
            LazyMemmapStorage.open(path, mode)
        else:
            storage = LazyMemmapStorage(7, scratch_dir=path, existsok=True, shared_init=mode == "shared")
            ReplayBuffer(storage=storage).extend(nested_td([1]))
    assert everything(tmp_path / "elsewhere") == before
    assert os.readlink(path / "next") == str(tmp_path / "elsewhere")


@pytest.mark.parametrize("what", ["clean up", "make"])
def test_names_that_lead_elsewhere_are_not_removed(what: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("kept")
    inside = tmp_path / "a"
    made(inside, flat_td([1])).storage.close()
    gc.collect()
    (inside / "link").symlink_to(tmp_path)
    (inside / "folder").mkdir()
    names = ["../outside", str(tmp_path / "outside"), "link/outside", "folder", "", ".", "x" * 5000, "obs.memmap/x"]
    (inside / "storage.lock").write_text(json.dumps({"pid": 1, "files": names}))
    if what == "clean up":
        LazyMemmapStorage.open(inside).cleanup()
    else:
        (inside / "storage.json").unlink()
        ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=inside, existsok=True)).extend(flat_td([3]))
    assert (tmp_path / "outside").read_text() == "kept" and (inside / "link").is_symlink()
    assert (inside / "folder").is_dir()


VALUES = (
    *(None, True, -1, 0, 1, 2**31, 2**62, 10**30, 1.5, 1e999),
    *("", "x", "a/b", "..", "\0", "\ud800", [], [0], {}, [[]]),
)


def test_forged_descriptions_with_a_right_checksum_open_or_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    made(path, nested_td(range(5)), sampler=PrioritizedSampler(5, 0.7, 0.5)).storage.close()
    gc.collect()
    text = (path / "storage.json").read_text()
    described = json.loads(text)["storage"]
    rng, opened = random.Random(0), 0
    trials = [(place, value) for place in places(described) for value in (..., *rng.sample(VALUES, 4))]
    trials.remove(((), ...))
    trials += [(("layout", "leaves", 0, 2), "__import__('os')"), (("layout", "leaves", 0, 0, 0), "../x")]
    for place, value in trials:
        (path / "storage.json").write_text(
            folder_description.sealed(changed(described, place, "gone" if value is ... else "put", value))
        )
        try:
            LazyMemmapStorage.open(path, "r")
            opened += 1
        except (CheckpointCorrupt, CheckpointMismatch):
            continue
        except Exception as error:
            raise AssertionError(f"{place} as {value!r}") from error
    assert len(trials) > 100 and opened < len(trials) / 4
    (path / "storage.json").write_text(text)
    check_same(LazyMemmapStorage.open(path)[:], nested_td(range(5)))
