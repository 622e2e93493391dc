"""The folder of a checkpoint: what else is in it, what is left there, who else uses it."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fbuf.checkpoint import CheckpointCorrupt, CheckpointError, Reading, Writing, load
from tests.fbuf.checkpoint.trees import content, loaded, same, save

BIG = np.arange(500_000)


def test_other_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "c"
    (path / "mine").mkdir(parents=True)
    (path / "mine" / "data").write_bytes(b"1")
    for name in ("notes.txt", "data", "data-1", "data-0123456789abcdeg", ".MANIFEST.json.tmp", "MANIFEST.json.old"):
        (path / name).write_bytes(b"2")
    (path / "data-folder").mkdir()
    (path / "link").symlink_to(tmp_path)
    (path / "data-0123456789abcdef").symlink_to(path / "mine")
    before = content(path)
    for value in range(3):
        save(path, [value, BIG])
    after = content(path)
    assert {name: after[name] for name in before} == before
    assert (path / "data-folder").is_dir()
    assert len(os.listdir(path)) == 12
    assert same(loaded(path), [2, BIG])


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for exists in (False, True):
        (path / f"data-{'0' * 16}" / "files-0").mkdir(parents=True)
        (path / f"data-{'0' * 16}" / "000001").write_bytes(b"half")
        (path / f".MANIFEST.json.{'1' * 16}.tmp").write_bytes(b"half")
        if exists:
            assert same(loaded(path), "new")
        save(path, "new")
        assert sorted(name[:5] for name in os.listdir(path)) == ["MANIF", "data-"]
        assert same(loaded(path), "new")


def test_what_is_left_beside_a_damaged_checkpoint_stays_until_there_is_a_good_one(tmp_path: Path) -> None:
    save(tmp_path / "c", BIG)
    (tmp_path / "c" / "MANIFEST.json").unlink()
    (tmp_path / "c" / "MANIFEST.json").write_bytes(b"{")
    with pytest.raises(TypeError):
        save(tmp_path / "c", object())
    assert len(list(tmp_path.glob("c/data-*"))) == 1  # somebody may want to save it
    save(tmp_path / "c", BIG)
    assert same(loaded(tmp_path / "c"), BIG)
    assert len(os.listdir(tmp_path / "c")) == 2


# ------------------------------------------------------------------ paths


def test_paths_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for path in ("c", "link", "./c/../d", "ünï ☃", b"bytes"):
        if isinstance(path, bytes):
            with pytest.raises(TypeError):
                save(path, BIG)  # type: ignore[arg-type]
        else:
            save(path, BIG)  # type: ignore[arg-type]
            assert same(loaded(path), BIG)  # type: ignore[arg-type]
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "MANIFEST.json").exists()


TREE = {"x": BIG}


def test_folders_above_are_made(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a" / "step499"
    save(path, TREE)
    assert same(loaded(path), TREE)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        save(tmp_path / "file" / "step499", TREE)


def test_the_manifest_and_the_data_are_no_links(tmp_path: Path) -> None:
    save(tmp_path / "c", BIG)
    for name in ("MANIFEST.json", next(tmp_path.glob("c/data-*")).name):
        (tmp_path / "c" / name).rename(tmp_path / name)
        (tmp_path / "c" / name).symlink_to(tmp_path / name)
        with pytest.raises(CheckpointCorrupt, match=name):
            loaded(tmp_path / "c")
        (tmp_path / "c" / name).unlink()
        (tmp_path / name).rename(tmp_path / "c" / name)
    assert same(loaded(tmp_path / "c"), BIG)
    (tmp_path / "other").symlink_to(tmp_path / "c")
    assert same(loaded(tmp_path / "other"), BIG)


# ------------------------------------------------------------------ files of others


def test_files_that_somebody_else_writes(tmp_path: Path) -> None:
    def use(source: Reading) -> list[bytes]:
        inner = source.folder("inner")
        return [source.file("own.h5").read_bytes(), (inner / "a").read_bytes(), (inner / "deep/b").read_bytes()]

    with Writing(tmp_path / "c") as out:
        out.file("own.h5").write_bytes(b"one")
        (out.folder("inner") / "deep").mkdir(parents=True)
        (out._folder / "inner" / "a").write_bytes(b"two")
        (out._folder / "inner" / "deep" / "b").write_bytes(b"three")
        out.write("tree")
    assert load(tmp_path / "c", use) == [b"one", b"two", b"three"]
    for name in ("own.h5", "inner/a", "inner/deep/b"):
        victim = next(tmp_path.glob(f"c/data-*/{name}"))
        good = victim.read_bytes()
        victim.chmod(0o644)
        victim.write_bytes(b"x" * len(good))
        with pytest.raises(CheckpointCorrupt, match=name):
            load(tmp_path / "c", use)
        with pytest.raises(CheckpointCorrupt, match=name):
            loaded(tmp_path / "c")  # also where nobody asked for it
        victim.write_bytes(good)
    with pytest.raises(CheckpointCorrupt, match="names no file"):
        load(tmp_path / "c", lambda source: source.file("other"))


def test_a_file_that_is_promised_must_be_there(tmp_path: Path) -> None:
    save(tmp_path / "c", "old")

    def failing(do: Any, error: type[Exception]) -> None:
        with pytest.raises(error), Writing(tmp_path / "c") as out:
            out.write("new")
            do(out)
        assert loaded(tmp_path / "c") == "old"
        assert len(os.listdir(tmp_path / "c")) == 2

    failing(lambda out: out.file("missing"), CheckpointError)
    failing(lambda out: out.folder("missing"), FileNotFoundError)
    failing(lambda out: out.file("link").symlink_to(tmp_path), CheckpointError)
    failing(lambda out: out.file("../above"), CheckpointCorrupt)
    failing(lambda out: out.file("/absolute"), CheckpointCorrupt)
    failing(lambda out: out.write("twice"), CheckpointError)
    with pytest.raises(CheckpointError, match="nothing was written"), Writing(tmp_path / "c"):
        pass
    assert loaded(tmp_path / "c") == "old"


# ------------------------------------------------------------------ several at once


def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    order: list[str] = []

    def write(name: str) -> None:
        with Writing(tmp_path / "c") as out:
            order.append(f"{name} begins")
            time.sleep(0.05)
            out.write([name, BIG])
            order.append(f"{name} ends")

    threads = [threading.Thread(target=write, args=(str(each),)) for each in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert len(order) == 8
    assert all(one.replace("begins", "ends") == other for one, other in zip(order[::2], order[1::2], strict=True))
    assert same(loaded(tmp_path / "c"), [order[-1].split()[0], BIG])
    assert len(os.listdir(tmp_path / "c")) == 2


def test_a_thread_does_not_wait_for_itself(tmp_path: Path) -> None:
    """As a signal handler would that saves while its thread is saving."""
    with Writing(tmp_path / "c") as out:
        with pytest.raises(CheckpointError, match="by this thread"):
            save(tmp_path / "c", "inner")
        save(tmp_path / "d", "another")
        out.write("outer")
    assert loaded(tmp_path / "c") == "outer"
    save(tmp_path / "c", "again")
    assert loaded(tmp_path / "c") == "again"


def test_a_reader_sees_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path, stop, wrong, seen = tmp_path / "c", threading.Event(), [], set()
    save(path, [0, np.full(200_000, 0), np.full(5, 0)])

    def read() -> None:
        try:
            while not stop.is_set():
                number, large, small = loaded(path)
                seen.add(number)
                if not (large == number).all() or not (small == number).all() or large.size != 200_000:
                    wrong.append(number)
        except BaseException as error:
            wrong.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for each in readers:
        each.start()
    for number in range(1, 30):
        save(path, [number, np.full(200_000, number), np.full(5, number)])
    stop.set()
    for each in readers:
        each.join(60)
    assert not wrong
    assert len(seen) > 1
