"""What did not change is linked, not written again."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fbuf.checkpoint import CheckpointCorrupt, Columns
from tests.fbuf.checkpoint.trees import loaded, same, save

ROWS = 20_000


def _rows() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (ROWS, 40, 40), np.uint8), rng.random((ROWS, 5)), np.arange(ROWS)]


@pytest.fixture(scope="module")
def rows() -> list[np.ndarray]:
    return _rows()


def _new_bytes(path: Path, *others: Path) -> float:
    """The part of the bytes of a checkpoint that no other has too."""
    known = {each.stat().st_ino for other in others for each in other.rglob("*") if each.is_file()}
    files = [each.stat() for each in path.rglob("*") if each.is_file()]
    return sum(each.st_size for each in files if each.st_ino not in known) / sum(each.st_size for each in files)


@pytest.mark.parametrize("start", [5000, ROWS - 100])
def test_a_hundredth_of_the_rows(start: int, rows: list[np.ndarray], tmp_path: Path) -> None:
    save(tmp_path / "one", {"rows": Columns(rows, ROWS), "cursor": start})
    now = [each.copy() for each in rows]
    changed = (np.arange(ROWS // 100) + start) % ROWS
    for each in now:
        each[changed] += 1
    other = {"rows": Columns(now, ROWS), "cursor": start + ROWS // 100}
    save(tmp_path / "two", other, [tmp_path / "one"])
    assert _new_bytes(tmp_path / "two", tmp_path / "one") < 0.03
    assert same(loaded(tmp_path / "one"), {"rows": Columns(rows), "cursor": start})
    shutil.rmtree(tmp_path / "one")
    assert same(loaded(tmp_path / "two"), other)


@pytest.mark.parametrize("damage", ["flip", "half", "empty", "link", "folder", "gone", "pipe"])
def test_a_file_that_was_damaged_is_never_linked(damage: str, rows: list[np.ndarray], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    save(one, Columns(rows))
    victim = sorted(one.glob("data-*/*"))[7]
    good = victim.read_bytes()
    victim.chmod(0o644)
    if damage == "flip":
        victim.write_bytes(good[:99] + bytes([good[99] ^ 1]) + good[100:])
    elif damage in ("half", "empty"):
        victim.write_bytes(good[: len(good) // 2] if damage == "half" else b"")
    else:
        victim.unlink()
        (tmp_path / "elsewhere").write_bytes(good)
        make: dict[str, Any] = {
            "link": lambda: victim.symlink_to(tmp_path / "elsewhere"),
            "folder": victim.mkdir,
            "pipe": lambda: os.mkfifo(victim),
            "gone": lambda: None,
        }
        make[damage]()
    with pytest.raises(CheckpointCorrupt, match=victim.name):
        loaded(one)
    save(two, Columns(rows), [one])
    assert 0 < _new_bytes(two, one) < 0.03  # that one file
    assert same(loaded(two), Columns(rows))
    save(one, Columns(rows))  # and it is mended by being written over
    assert same(loaded(one), Columns(rows))
    assert not any(each.is_symlink() for each in one.rglob("*"))


@pytest.mark.parametrize("previous", ["nothing", "file", "damaged", "pipe"])
def test_another_checkpoint_that_is_none(previous: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    if previous == "file":
        other.write_text("no folder")
    elif previous != "nothing":
        other.mkdir()
        manifest = other / "MANIFEST.json"
        manifest.write_text("{") if previous == "damaged" else os.mkfifo(manifest)
    save(tmp_path / "c", np.arange(5), [other])
    assert same(loaded(tmp_path / "c"), np.arange(5))


def test_where_links_cannot_be_made(rows: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EXDEV, "another disk")

    save(tmp_path / "one", Columns(rows))
    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path / "two", Columns(rows), [tmp_path / "one"])
    assert _new_bytes(tmp_path / "two", tmp_path / "one") == 1
    assert same(loaded(tmp_path / "two"), Columns(rows))
