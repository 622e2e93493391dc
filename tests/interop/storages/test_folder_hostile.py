"""Folders that someone else has made, to lead a storage elsewhere or astray: links, and JSON that is no description."""

import copy
import gc
import json
import os
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from interop.shared import folder
from tests.interop.rows import check_same, flat_td, nested_td
from tests.interop.storages.named_folders import made


def everything(path: Path) -> dict[str, bytes]:
    return {each.relative_to(path).as_posix(): each.read_bytes() for each in path.rglob("*") if each.is_file()}


# ------------------------------------------------------------------ links


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder of nested rows, one folder of which is elsewhere, behind a link."""
    made(tmp_path / "a", nested_td(range(5))).storage.close()
    gc.collect()
    shutil.move(tmp_path / "a" / "next", tmp_path / "elsewhere")
    (tmp_path / "a" / "next").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "a"


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_folder_behind_a_link_is_told_by_name(mode: Any, linked: Path) -> None:
    before = everything(linked.parent)
    with pytest.raises(CheckpointCorrupt, match="a/next should be a folder, found a symbolic link"):
        LazyMemmapStorage.open(linked, mode)
    (linked.parent / "b").symlink_to(linked)  # the one that is named may be a link
    (linked / "next").unlink()
    shutil.move(linked.parent / "elsewhere", linked / "next")
    check_same(LazyMemmapStorage.open(linked.parent / "b", mode)[:], nested_td(range(5)))
    assert {name for name in before if "memmap" in name} == {
        name.replace("a/next", "elsewhere") for name in everything(linked.parent) if "memmap" in name and name[0] != "b"
    }


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("is_storage", [True, False])
def test_files_are_not_put_behind_a_link(shared: bool, is_storage: bool, linked: Path) -> None:
    if not is_storage:
        shutil.rmtree(linked)
        linked.mkdir()
        (linked / "next").symlink_to(linked.parent / "elsewhere")
    storage = LazyMemmapStorage(7, scratch_dir=linked, existsok=True, shared_init=shared)
    before = everything(linked.parent)
    with pytest.raises(CheckpointCorrupt, match="a/next should be a folder"):
        ReplayBuffer(storage=storage).extend(nested_td([1]))
    storage.close()
    del storage
    gc.collect()
    after = everything(linked.parent)
    if shared:  # a storage without items was made in the folder at once, and is gone with its object
        before, after = (
            {name: held for name, held in each.items() if name.startswith("elsewhere/")} for each in (before, after)
        )
    else:
        assert before.pop("a/storage.lock", None) is None or after.pop("a/storage.lock")  # it says who was there
    assert after == before
    assert os.readlink(linked / "next") == str(linked.parent / "elsewhere")


def test_a_file_in_the_place_of_a_folder_is_told_by_name(linked: Path) -> None:
    (linked / "next").unlink()
    (linked / "next").write_text("mine")
    with pytest.raises(CheckpointCorrupt, match="a/next should be a folder, found something else"):
        LazyMemmapStorage.open(linked)
    with pytest.raises(CheckpointCorrupt, match="a/next should be a folder"):
        ReplayBuffer(storage=LazyMemmapStorage(7, scratch_dir=linked, existsok=True)).extend(nested_td([1]))
    assert (linked / "next").read_text() == "mine"


@pytest.mark.parametrize("name", ["storage.lock", "storage.json"])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_plain_file_is_told_by_name(name: str, kind: str, tmp_path: Path) -> None:
    made(tmp_path / "a", flat_td([1])).storage.close()
    gc.collect()
    path = tmp_path / "a" / name
    if kind == "link":
        shutil.move(path, tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        (os.mkdir if kind == "folder" else os.mkfifo)(path)
    with pytest.raises(CheckpointCorrupt, match=f"{name} should be a plain file"):
        LazyMemmapStorage.open(tmp_path / "a")


# ------------------------------------------------------------------ what the lock says

ODD = {
    "list": "[]",
    "nothing": "{}",
    "no files": '{"pid": 1}',
    "number": '{"pid": 1, "files": 3}',
    "numbers": '{"pid": 1, "files": [3]}',
    "null": '{"pid": 1, "files": ["a\\u0000b"]}',
    "half a letter": '{"pid": 1, "files": ["a\\ud800"]}',
    "no pid": '{"files": []}',
    "pid": '{"pid": [], "files": []}',
    "huge pid": '{"pid": 1e999, "files": []}',
    "long pid": '{"pid": ' + "9" * 5000 + ', "files": []}',
    "deep": "[" * 100_000,
    "deep files": '{"pid": 1, "files": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "text": "nonsense",
    "empty": "",
}


def lock(path: Path, text: str) -> None:
    (path / "storage.lock").write_bytes(f"{zlib.crc32(text.encode()):08x} {text}\n".encode())


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_a_lock_that_says_what_none_says_is_told_by_name(text: str, tmp_path: Path) -> None:
    made(tmp_path, flat_td([1, 2])).storage.close()
    gc.collect()
    lock(tmp_path, text)
    before = everything(tmp_path)
    again = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path, existsok=True))
    for attempt in (lambda: LazyMemmapStorage.open(tmp_path), lambda: again.extend(flat_td([3]))):
        with pytest.raises(CheckpointCorrupt, match=r"storage\.lock"):
            attempt()
    assert everything(tmp_path) == before
    check_same(LazyMemmapStorage.open(tmp_path, "r")[:], flat_td([1, 2]))
    (tmp_path / "storage.lock").unlink()
    check_same(LazyMemmapStorage.open(tmp_path)[:], flat_td([1, 2]))  # nobody has been left to hold it


def test_who_is_refused_is_told_so_whatever_the_lock_says(tmp_path: Path) -> None:
    buffer = made(tmp_path, flat_td([1, 2]))
    lock(tmp_path, "[]")
    with pytest.raises(RuntimeError, match="in use by the process unknown"):
        LazyMemmapStorage.open(tmp_path)
    check_same(buffer[:], flat_td([1, 2]))


@pytest.mark.parametrize("what", ["clean up", "make"])
def test_names_that_lead_elsewhere_are_not_removed(what: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("kept")
    inside = tmp_path / "a"
    buffer = made(inside, flat_td([1]))
    buffer.storage.close()
    del buffer
    gc.collect()
    (inside / "link").symlink_to(tmp_path)
    (inside / "folder").mkdir()
    names = ["../outside", str(tmp_path / "outside"), "link/outside", "folder", "", ".", "x" * 5000, "obs.memmap/x"]
    lock(inside, json.dumps({"pid": 1, "files": names}))
    if what == "clean up":
        storage = LazyMemmapStorage.open(inside)
        storage.cleanup()
    else:
        (inside / "storage.json").unlink()
        ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=inside, existsok=True)).extend(flat_td([3]))
    assert (tmp_path / "outside").read_text() == "kept" and (inside / "link").is_symlink()
    assert (inside / "folder").is_dir()


# ------------------------------------------------------------------ what the description says


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        '"checksum"',
        "{}",
        '{"checksum": 3, "storage": {}}',
        '{"checksum": "00000000"}',
        '{"checksum": "00000000", "x": "\\"storage\\": }"}',
        '{"checksum": "00000000", "storage": ' + "[" * 100_000,
        '{"checksum": "00000000", "storage": ' + "9" * 5000 + "}",
        "\udcff",
    ],
)
def test_a_description_that_is_none_is_told_by_name(text: str, tmp_path: Path) -> None:
    made(tmp_path, flat_td([1])).storage.close()
    gc.collect()
    (tmp_path / "storage.json").write_bytes(text.encode(errors="surrogateescape"))
    for mode in "r", "r+":
        with pytest.raises(CheckpointCorrupt, match=r"storage\.json"):
            LazyMemmapStorage.open(tmp_path, mode)


@pytest.mark.parametrize("given", [[], 3, None, "x", {}, 1e999])
def test_a_sealed_description_that_is_none_is_told_by_name(given: Any, tmp_path: Path) -> None:
    made(tmp_path, flat_td([1])).storage.close()
    gc.collect()
    (tmp_path / "storage.json").write_text(folder._sealed(given))
    with pytest.raises(CheckpointCorrupt, match=r"storage\.json"):
        LazyMemmapStorage.open(tmp_path)


VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**62,
    10**30,
    1.5,
    1e999,
    "",
    "x",
    "a/b",
    "..",
    "\0",
    "\ud800",
    [],
    [0],
    {},
    [[]],
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(node, dict):
        return found + [each for key, below in node.items() for each in places(below, (*path, key))]
    if isinstance(node, list):
        return found + [each for key, below in enumerate(node) for each in places(below, (*path, key))]
    return found


def changed(described: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value in one place; without the entry for `...`."""
    described = copy.deepcopy(described)
    node = described
    for step in path[:-1]:
        node = node[step]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return described


def test_sealed_descriptions_of_anything_open_or_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a"
    made(path, nested_td(range(5)), sampler=PrioritizedSampler(5, 0.7, 0.5)).storage.close()
    gc.collect()
    text = (path / "storage.json").read_text()
    described = json.loads(text)["storage"]
    rng, opened = random.Random(0), 0
    trials = [(place, value) for place in places(described) for value in (..., *rng.sample(VALUES, 5))]
    for place, value in trials:
        (path / "storage.json").write_text(folder._sealed(changed(described, place, value)))
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


def test_rows_of_nothing_are_not_larger_than_memory(tmp_path: Path) -> None:
    made(tmp_path, torch.zeros(2, 0)).storage.close()
    gc.collect()
    described = json.loads((tmp_path / "storage.json").read_text())["storage"]
    described["layout"]["leaves"][0][1] = [0, 2**62, 2**62]
    (tmp_path / "storage.json").write_text(folder._sealed(described))
    with pytest.raises(CheckpointCorrupt, match=r"storage\.json"):
        LazyMemmapStorage.open(tmp_path)
