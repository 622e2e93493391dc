"""Where a storage in a folder is: named by relative paths while the working directory changes, and copied with holes."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from tests.interop.rows import check_same, flat_td

SPACE = (".memmap", ".state", ".priorities")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Goes to one of several folders."""

    def go(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name

    return go


def priorities() -> PrioritizedSampler:
    return PrioritizedSampler(8, 1.0, 1.0)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------ relative paths


def test_a_relative_folder_stays_where_it_was_named(places: Any) -> None:
    one = places("one")
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir="rows"))
    two = places("two")
    buffer.extend(flat_td(range(4)))  # makes the files
    places("three")
    buffer.set_sampler(priorities())  # makes another one
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 9.0, 4.0]))
    buffer.extend(flat_td([4]))
    buffer.storage.close()
    assert "rows/storage.priorities" in names(one) and not names(two)
    places("one")
    storage = LazyMemmapStorage.open("rows")
    places("two")
    buffer = ReplayBuffer(storage=storage, sampler=priorities())
    check_same(buffer[:], flat_td(range(5)))
    assert buffer.sampler.priorities.tolist() == [1, 2, 9, 4, 9]
    buffer.extend(flat_td([5]))
    buffer.storage.close()
    check_same(LazyMemmapStorage.open(one / "rows", "r")[:], flat_td(range(6)))
    assert not names(two)


def test_files_of_a_relative_folder_are_removed_from_where_they_are(places: Any) -> None:
    one = places("one")
    buffer = ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir="rows", auto_cleanup=True))
    buffer.extend(flat_td(range(4)))
    two = places("two")
    (two / "rows").mkdir()
    (two / "rows" / "obs.memmap").write_text("kept")
    del buffer
    gc.collect()
    assert not names(one) and names(two) == {"rows/obs.memmap"}


def test_checkpoints_are_found_from_elsewhere(places: Any) -> None:
    one = places("one")
    buffer = ReplayBuffer(storage=LazyMemmapStorage(2**15, scratch_dir="rows"))
    buffer.extend(torch.arange(2**15))
    buffer.dumps("saved")
    two = places("two")
    buffer.extend(torch.tensor([-1]))
    buffer.dumps("saved")
    assert names(one) >= {"saved/MANIFEST.json"} and names(two) >= {"saved/MANIFEST.json"}
    last = ReplayBuffer(storage=LazyMemmapStorage(2**15, scratch_dir="loaded"))
    three = places("three")
    last.loads("../two/saved")
    assert last[:3].tolist() == [-1, 1, 2] and last.writer.cursor == 1 and not names(three)
    last.storage.close()
    assert ReplayBuffer(storage=LazyMemmapStorage.open("../two/loaded")).write_count == 2**15 + 1


# ------------------------------------------------------------------ holes


def sparse_copy(source: Path, target: Path) -> None:
    """A copy without blocks where there are zeros."""
    for path in source.rglob("*"):
        place = target / path.relative_to(source)
        if path.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        with place.open("wb") as file:
            file.truncate(len(content))
            for at in range(0, len(content), 4096):
                if any(content[at : at + 4096]):
                    file.seek(at)
                    file.write(content[at : at + 4096])


def space(folder: Path) -> dict[str, bool]:
    """Whether each file has its space on the disk."""
    found = {path.name: path.stat() for path in folder.rglob("*") if path.suffix in SPACE}
    return {name: stat.st_blocks * 512 >= stat.st_size for name, stat in found.items()}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy with holes of a folder with 2**18 rows, 5 of which were written."""
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(2**18, scratch_dir=tmp_path / "rows"), sampler=PrioritizedSampler(2**18, 1.0, 1.0)
    )
    buffer.extend(torch.arange(5))
    buffer.update_priority(torch.arange(5), torch.arange(5) + 1.0)
    buffer.storage.close()
    assert set(space(tmp_path / "rows").values()) == {True}
    sparse_copy(tmp_path / "rows", tmp_path / "copy")
    if all(space(tmp_path / "copy").values()):
        pytest.skip("this file system makes no holes")
    return tmp_path / "copy"


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no way to reserve space again")
def test_a_copy_with_holes_has_its_space_again_when_it_is_opened_to_write(copied: Path) -> None:
    before = space(copied)
    assert LazyMemmapStorage.open(copied, "r")[:].tolist() == [0, 1, 2, 3, 4] and space(copied) == before
    buffer = ReplayBuffer(storage=LazyMemmapStorage.open(copied), sampler=PrioritizedSampler(2**18, 1.0, 1.0))
    assert set(space(copied).values()) == {True}
    buffer.extend(torch.tensor([5]))
    assert buffer[:].tolist() == [0, 1, 2, 3, 4, 5] and buffer.sampler.priorities.tolist() == [1, 2, 3, 4, 5, 5]


def test_a_disk_without_room_for_the_holes_is_told(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in copied.iterdir() if path.name != "storage.lock"}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space"):
            LazyMemmapStorage.open(copied)
    assert {path: path.read_bytes() for path in copied.iterdir() if path.name != "storage.lock"} == before
    assert LazyMemmapStorage.open(copied)[:].tolist() == [0, 1, 2, 3, 4]  # nobody has it open
