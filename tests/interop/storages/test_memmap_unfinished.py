"""LazyMemmapStorage.open: what unfinished work and damage in a folder look like."""

import gc
import json
import zlib

import pytest
import torch
from tensordict import TensorDict, tensorclass

from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from interop import LazyMemmapStorage, PrioritizedSampler, ReplayBuffer
from interop.shared import folder
from tests.interop.rows import check_same, flat_td, nested_td
from tests.interop.storages.named_folders import made, reopened


def test_a_folder_without_a_storage_is_not_found(tmp_path):
    for folder_ in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="no storage"):
            LazyMemmapStorage.open(folder_)
    assert list(tmp_path.iterdir()) == []


def test_what_an_unfinished_creation_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("kept")

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(folder.Files, "put_in_place", killed)
        patch.setattr(folder.Files, "remove", lambda self: False)
        patch.setattr(folder.Owner, "list", _once(folder.Owner.list, 3))
        with pytest.raises(Killed):
            made(tmp_path, nested_td([1, 2]))
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"obs.memmap", "reward.memmap", "storage.state", "mine.txt"} <= left and "storage.json" not in left
    with pytest.raises(FileNotFoundError):
        LazyMemmapStorage.open(tmp_path)
    buffer = made(tmp_path, flat_td([3]))
    check_same(buffer[:], flat_td([3]))
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "mine.txt", "obs.memmap", "done.memmap", "meta.json", *folder.OWN[:3],
    }  # fmt: skip


def _once(method, times):
    """The method for its first calls, later nothing."""
    calls = []

    def called(self, *given):
        calls.append(0)
        return method(self, *given) if len(calls) <= times else None

    return called


def test_names_in_the_list_lead_nowhere_else(tmp_path):
    (tmp_path / "outside").write_text("kept")
    inside = tmp_path / "data"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path)
    text = json.dumps({"pid": 1, "files": ["../outside", str(tmp_path / "outside"), "link/outside"]})
    (inside / "storage.lock").write_text(f"{zlib.crc32(text.encode()):08x} {text}\n")
    made(inside, flat_td([1]))
    assert (tmp_path / "outside").read_text() == "kept"


def test_a_storage_that_was_never_written_can_be_made_again(tmp_path):
    buffer = made(tmp_path, flat_td([1]))
    buffer.storage.journal._head[4] = 0  # as if the first step had not been ended
    del buffer
    check_same(made(tmp_path, flat_td([2]))[:], flat_td([2]))


@pytest.mark.parametrize("name", ["obs.memmap", "storage.state", "storage.json", "storage.priorities"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "long", "link"])
def test_damaged_files_are_told_by_name(name, damage, tmp_path):
    made(tmp_path, flat_td(range(5)), sampler=PrioritizedSampler(5, 0.7, 0.5))
    gc.collect()
    path = tmp_path / name
    data = path.read_bytes()
    path.unlink()
    if damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage != "missing":
        path.write_bytes({"empty": b"", "short": data[:-3], "long": data + b"x"}[damage])
    wanted = FileNotFoundError if (name, damage) == ("storage.json", "missing") else (CheckpointCorrupt, OSError)
    if (name, damage) == ("storage.priorities", "missing"):  # as if no sampler had ever had any
        assert len(LazyMemmapStorage.open(tmp_path)) == 5
        return
    if (name, damage) == ("storage.json", "long"):
        wanted = CheckpointCorrupt
    with pytest.raises(wanted, match=name):
        LazyMemmapStorage.open(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(capacity=6),
        lambda d: d.update(capacity="5"),
        lambda d: d.update(rows=2**60),
        lambda d: d.update(lanes=[2]),
        lambda d: d.update(format=3),
        lambda d: d["files"].pop("obs.memmap"),
        lambda d: d["layout"]["leaves"].pop(),
        lambda d: d["layout"]["leaves"][0].__setitem__(2, "__import__('os')"),
        lambda d: d["layout"]["leaves"][0][0].__setitem__(0, "../x"),
        lambda d: d.pop("layout"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(change, tmp_path):
    made(tmp_path, flat_td(range(5)))
    gc.collect()
    path = tmp_path / "storage.json"
    described = json.loads(path.read_text())["storage"]
    change(described)
    path.write_text(folder._sealed(described))
    with pytest.raises((CheckpointCorrupt, ValueError)):
        LazyMemmapStorage.open(tmp_path)
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointCorrupt, match=r"storage\.json"):
        LazyMemmapStorage.open(tmp_path)


@pytest.mark.parametrize("cell", range(6))
@pytest.mark.parametrize("value", [-1, 7, 2**62])
def test_counters_out_of_range_are_refused(cell, value, tmp_path):
    buffer = made(tmp_path, flat_td(range(4)))
    buffer.storage.journal._cells[cell] = value
    del buffer
    gc.collect()
    if cell > 1 and value > 0:  # counts may be any
        LazyMemmapStorage.open(tmp_path)
        return
    with pytest.raises(CheckpointCorrupt):
        LazyMemmapStorage.open(tmp_path)


def test_a_class_of_items_has_to_be_known(tmp_path):
    @tensorclass
    class Local:
        a: torch.Tensor

    made(tmp_path, Local(a=torch.zeros(2), batch_size=[2]))
    gc.collect()
    with pytest.raises(CheckpointMismatch, match="Local"):
        LazyMemmapStorage.open(tmp_path)


@pytest.mark.parametrize("key", ["storage.json", "storage.lock", ("storage.state", "a")])
def test_keys_that_are_names_of_its_own_files_are_no_trouble(key, tmp_path):
    data = TensorDict({}, [2])
    data[key] = torch.ones(2)
    if isinstance(key, tuple):
        with pytest.raises(ValueError, match="rename"):
            made(tmp_path, data)
        assert list(tmp_path.iterdir()) == []
    else:
        made(tmp_path, data)
        assert bool((reopened(tmp_path)[:][key] == 1).all())


def test_a_full_disk_leaves_what_was_there(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(2**58, scratch_dir=tmp_path / "data"))
    with pytest.raises(OSError):
        buffer.extend(torch.zeros(2, dtype=torch.uint8))
    assert not (tmp_path / "data").exists()
    made(tmp_path / "data", flat_td([1]))
    check_same(reopened(tmp_path / "data")[:], flat_td([1]))


def test_an_opened_storage_can_be_cleaned_up(tmp_path):
    made(tmp_path / "data", nested_td([1]), sampler=PrioritizedSampler(5, 0.7, 0.5))
    (tmp_path / "data" / "mine").write_text("kept")
    storage = reopened(tmp_path / "data").storage
    assert storage.cleanup() is True and storage.cleanup() is False
    assert {path.name for path in (tmp_path / "data").rglob("*") if path.is_file()} == {"mine"}
