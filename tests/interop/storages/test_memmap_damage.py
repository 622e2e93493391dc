"""Damage in the files of a storage in a folder, byte by byte and word by word: it is told, or what is there is right."""

import random
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fbuf.checkpoint import CheckpointCorrupt
from interop import LazyMemmapStorage, RandomSampler, ReplayBuffer
from interop.shared.journal import Journal
from interop.shared.undo import Undo
from interop.storages import priorities

CAPACITY, SAMPLER = 6, RandomSampler()  # whose priorities these are
KNOWN = {*range(8), *range(50, 60)}  # all rows that are ever written here
EXTREMES = (-1, 1, 2, 6, 7, 12, 1024, 1025, 2**31, 2**40, 2**62, -(2**63))
STEPS = ("run", "list", "priorities", "none")  # what the process was killed in
NOTED = {
    "run": 3,
    "list": 6,
    "priorities": 0,
    "none": 0,
}  # words of the log before the bytes of rows, which nothing checks
HEAD, CELLS = 8, 8


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError("it takes too long")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module", autouse=True)
def short_files() -> Iterator[None]:
    """Copies are faster of records of priorities that are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priorities, "_BEFORE", Undo.before_log(3) + 4096)
        yield


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, short_files: None) -> dict[str, Path]:
    """Folders of full rings as a killed process leaves them, one for each kind of step that it may have been in."""
    found = {}
    for step in STEPS:
        found[step] = folder = tmp_path_factory.mktemp("damage") / step
        buffer = ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=folder / "rows"))
        buffer.extend(torch.arange(8))
        kept = buffer.storage.kept_priorities()
        kept.bind(SAMPLER)
        kept.give(SAMPLER, np.arange(CAPACITY), np.arange(1.0, 7), 6.0, 5)

        def killed(undo: Undo, folder: Path = folder) -> None:
            shutil.copytree(folder / "rows", folder / "left")
            raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Undo, "_commit", killed)
            with pytest.raises(Killed):
                if step == "run":
                    buffer.extend(torch.tensor([50, 51, 52]))
                elif step == "list":
                    buffer[torch.tensor([1, 4, 2])] = torch.tensor([53, 54, 55])
                elif step == "priorities":
                    kept.give(SAMPLER, np.array([1, 3]), np.array([9.0, 9.0]), 9.0, 1)
                else:
                    killed(kept)
    return {step: folder / "left" for step, folder in found.items()}


def opens(folder: Path) -> bool:
    """Whether it opens; then all that can be done to it is done. What is raised else is an error of the test."""
    try:
        storage = LazyMemmapStorage.open(folder)
        kept = storage.kept_priorities()
        if kept is not None:
            kept.read(len(storage))
    except CheckpointCorrupt:
        return False
    buffer = ReplayBuffer(storage=storage)
    rows = buffer[:].tolist() if len(buffer) else []
    assert set(rows) <= KNOWN and len(rows) <= CAPACITY
    if rows:
        buffer.sample(3)
    cursor = buffer.extend(torch.tensor([56, 57, 58]))
    assert int(cursor.min()) >= 0 and int(cursor.max()) < CAPACITY and buffer[cursor].tolist() == [56, 57, 58]
    buffer[0] = torch.tensor(59)
    buffer.extend(torch.arange(50, 58))
    buffer.empty()
    buffer.extend(torch.arange(50, 58))
    assert sorted(buffer[:].tolist()) == [52, 53, 54, 55, 56, 57]
    if kept is not None:
        kept.bind(SAMPLER)
        kept.give(SAMPLER, np.array([0]), np.array([3.0]), 3.0)
    storage.close()
    return True


def damaged(source: Path, target: Path, name: str, content: bytes) -> Path:
    """A copy with one file of other content."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    (target / name).write_bytes(content)
    return target


@pytest.mark.parametrize("step", STEPS)
def test_what_a_killed_process_leaves_opens_as_it_was(step: str, folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders[step], tmp_path / "rows")
    storage = LazyMemmapStorage.open(tmp_path / "rows")
    assert storage[:].tolist() == [6, 7, 2, 3, 4, 5]
    found = storage.kept_priorities().read(CAPACITY)
    assert (found.given.tolist(), found.highest, found.highest_slot) == ([1, 2, 3, 4, 5, 6], 6, 5)


@pytest.mark.parametrize("flip", [0x01, 0x80, 0x20])
def test_every_byte_of_the_description_counts(flip: int, folders: dict[str, Path], tmp_path: Path) -> None:
    content = (folders["none"] / "storage.json").read_bytes()
    for at in range(0, len(content), 6):
        bad = bytearray(content)
        bad[at] ^= flip
        folder = damaged(folders["none"], tmp_path / "rows", "storage.json", bytes(bad))
        with pytest.raises(CheckpointCorrupt, match=r"storage\.json"):
            LazyMemmapStorage.open(folder, "r")
    for length in range(0, len(content) - 1, 9):  # but for the newline
        folder = damaged(folders["none"], tmp_path / "rows", "storage.json", content[:length])
        with pytest.raises(CheckpointCorrupt, match=r"storage\.json"):
            LazyMemmapStorage.open(folder)


@pytest.mark.parametrize("step", STEPS)
def test_words_of_the_state_are_right_or_told(step: str, folders: dict[str, Path], tmp_path: Path) -> None:
    content = (folders[step] / "storage.state").read_bytes()
    words = [*range(HEAD + 2 * CELLS + NOTED[step])]
    rng, opened = random.Random(step), []
    for word in words:
        for value in rng.sample(EXTREMES, 2):
            bad = bytearray(content)
            struct.pack_into("q", bad, 8 * word, value)
            opened.append(opens(damaged(folders[step], tmp_path / "rows", "storage.state", bytes(bad))))
    assert len(set(opened)) == 2  # some of it is told, and some of it does not matter


@pytest.mark.parametrize("step", ["priorities", "none"])
def test_words_of_the_priorities_are_right_or_told(step: str, folders: dict[str, Path], tmp_path: Path) -> None:
    content = (folders[step] / "storage.priorities").read_bytes()
    log = HEAD + 2 * 3
    words = [*range(log + 5 * (step == "priorities")), *range(len(content) // 8 - CAPACITY, len(content) // 8)]
    rng, opened = random.Random(step), []
    for word in words:
        for value in rng.sample(EXTREMES, 2):
            bad = bytearray(content)
            struct.pack_into("q", bad, 8 * word, value)
            opened.append(opens(damaged(folders[step], tmp_path / "rows", "storage.priorities", bytes(bad))))
    assert len(set(opened)) == 2


def test_flipped_bits_anywhere_are_right_or_told(folders: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(5)
    for number in range(150):
        step = STEPS[number % len(STEPS)]
        name = rng.choice(["storage.state", "storage.state", "storage.priorities", "storage.lock", "storage.json"])
        bad = bytearray((folders[step] / name).read_bytes())
        for _ in range(rng.choice([1, 1, 2, 3])):
            at = rng.randrange(min(len(bad), 8 * (HEAD + 12)))
            bad[at] ^= 1 << rng.randrange(8)
        opens(damaged(folders[step], tmp_path / "rows", name, bytes(bad)))


@pytest.mark.parametrize("cell", [1, 3, 5, 9])
def test_counters_that_cannot_grow_are_told(cell: int, folders: dict[str, Path], tmp_path: Path) -> None:
    bad = bytearray((folders["none"] / "storage.state").read_bytes())
    struct.pack_into("q", bad, 8 * (HEAD + cell), 2**63 - 1)
    opens(damaged(folders["none"], tmp_path / "rows", "storage.state", bytes(bad)))


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b"00000000 {}\n", b"[" * 5000, b"\xff" * 50, None])
def test_what_the_lock_says_does_not_matter(content: bytes | None, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = damaged(folders["none"], tmp_path / "rows", "storage.lock", content or b"")
    if content is None:
        (folder / "storage.lock").unlink()
    assert LazyMemmapStorage.open(folder)[:].tolist() == [6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize("word", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("value", [-1, 2**62, 2**63 - 1])
def test_readers_are_told_too(word: int, value: int, folders: dict[str, Path], tmp_path: Path) -> None:
    bad = bytearray((folders["none"] / "storage.state").read_bytes())
    struct.pack_into("q", bad, 8 * word, value)
    folder = damaged(folders["none"], tmp_path / "rows", "storage.state", bytes(bad))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    try:
        assert LazyMemmapStorage.open(folder, "r")[:].tolist() == [6, 7, 2, 3, 4, 5]
        assert word in (1, 2, 3), "nothing else is immaterial"
    except CheckpointCorrupt:
        pass
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_state_of_another_storage_is_told_or_fits(folders: dict[str, Path], tmp_path: Path) -> None:
    other = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path / "other"))
    other.extend(torch.arange(900))
    other.storage.close()
    state = (tmp_path / "other" / "storage.state").read_bytes()
    size = (folders["none"] / "storage.state").stat().st_size
    assert size >= Journal.size(1, 1, 1, 1)
    folder = damaged(folders["none"], tmp_path / "rows", "storage.state", state[:size].ljust(size, b"\0"))
    with pytest.raises(CheckpointCorrupt, match="counters"):
        LazyMemmapStorage.open(folder)
