"""LazyMemmapStorage: files, their names, who removes them."""

import gc
import json
import os

import pytest
import torch
from tensordict import TensorDict

from interop import LazyMemmapStorage, ReplayBuffer, TensorDictReplayBuffer
from tests.interop.rows import KINDS, check_same, flat_td, nested_td, plain_tensor, steps

OWN = {"storage.json", "storage.state", "storage.lock"}


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_tensordict_takes_a_file_for_each_key_and_a_folder_for_each_level(tmp_path):
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path / "data")
    assert storage.scratch_dir == str(tmp_path / "data") + "/"
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(nested_td([0, 1, 2]))
    assert files(tmp_path / "data") == {
        "obs.memmap", "next/pixels.memmap", "next/reward.memmap", "meta.json", "next/meta.json", *OWN,
    }  # fmt: skip
    assert json.loads((tmp_path / "data" / "meta.json").read_text())["shape"] == [5]
    opened = TensorDict.load_memmap(tmp_path / "data")
    check_same(opened[:3].clone().unlock_().apply(lambda leaf: torch.as_tensor(leaf).clone()), nested_td([0, 1, 2]))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_kind_live_in_files(tmp_path, kind):
    rows = KINDS[kind]
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "data"))
    buffer.extend(rows([0, 1, 2, 3, 4, 5]))
    check_same(buffer[:], rows([4, 5, 2, 3]))
    assert any(name.endswith(".memmap") for name in files(tmp_path / "data"))


def test_a_lone_tensor_and_pytrees_have_names_of_their_own(tmp_path, monkeypatch):
    ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "one")).extend(plain_tensor([1]))
    assert files(tmp_path / "one") == {"_-single-tensor-_.memmap", *OWN}
    ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "two")).extend(
        {"a": (torch.zeros(1), [torch.ones(1)])}
    )
    assert files(tmp_path / "two") == {"a/0.memmap", "a/1/0.memmap", *OWN}
    monkeypatch.setenv("SINGLE_TENSOR_BUFFER_NAME", "only")
    ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "three")).extend(plain_tensor([1]))
    assert files(tmp_path / "three") == {"only.memmap", *OWN}


def test_without_a_folder_there_are_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = LazyMemmapStorage(4)
    assert storage.scratch_dir is None
    ReplayBuffer(storage=storage).extend(flat_td([1]))
    assert files(tmp_path) == set()


def test_nothing_is_on_disk_before_the_first_write(tmp_path):
    LazyMemmapStorage(5, scratch_dir=tmp_path / "data")
    assert files(tmp_path) == set()


@pytest.mark.parametrize("rows", [nested_td, plain_tensor, KINDS["dict"]])
def test_files_that_are_there_are_not_written_over(tmp_path, rows):
    ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path)).extend(rows([1, 2]))
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    other = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path))
    with pytest.raises(RuntimeError, match="already exists"):
        other.extend(rows([3, 4]))
    assert len(other) == 0 and other.write_count == 0 and not other.storage.initialized
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_files_that_are_there_are_written_over_when_asked(tmp_path):
    ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path)).extend(nested_td([1, 2]))
    other = ReplayBuffer(storage=LazyMemmapStorage(6, scratch_dir=tmp_path, existsok=True))
    other.extend(nested_td([3]))
    check_same(other[:], nested_td([3]))
    assert (tmp_path / "obs.memmap").stat().st_size == 6 * 3 * 8


def test_a_folder_that_cannot_be_made_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").write_text("")
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "file" / "data"))
    with pytest.raises(OSError):
        buffer.extend(flat_td([1]))
    assert len(buffer) == 0 and not buffer.storage.initialized and files(tmp_path) == {"file"}


@pytest.mark.parametrize("key", ["..", "a/b", ""])
def test_keys_cannot_lead_out_of_the_folder(tmp_path, key):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "data"))
    with pytest.raises(ValueError):
        buffer.extend({"fine": torch.zeros(2), key: torch.zeros(2)})
    assert len(buffer) == 0 and files(tmp_path) == set()


@pytest.mark.parametrize("device", ["cuda", "meta", torch.device("meta")])
def test_devices_other_than_the_cpu_are_refused(device):
    with pytest.raises(ValueError, match="transform"):
        LazyMemmapStorage(4, device=device)


@pytest.mark.parametrize("device", ["cpu", "auto", torch.device("cpu"), None])
def test_every_name_of_the_cpu_is_taken(device):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, device=device))
    buffer.extend(flat_td([1]))
    assert buffer.storage.device == torch.device("cpu")


def test_views_come_locked_and_samples_free():
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4))
    buffer.extend(nested_td([1, 2]))
    assert buffer[:].is_locked and buffer[0].is_locked and buffer[0:1].is_locked
    batch = buffer.sample(3)
    assert not batch.is_locked and not buffer[torch.tensor([0])].is_locked
    assert type(batch["obs"]) is torch.Tensor
    batch["new"] = torch.zeros(3)


def test_views_of_tensordicts_can_be_edited_in_place():
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4))
    buffer.extend(nested_td([1, 2]))
    buffer[0]["obs"].zero_()
    check_same(buffer[:]["obs"], nested_td([0, 2])["obs"])
    assert buffer[:].is_locked


def test_reads_see_what_other_maps_of_the_file_write(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path))
    buffer.extend(plain_tensor([1, 2]))
    buffer.sample(3)
    path = tmp_path / "_-single-tensor-_.memmap"
    other = torch.from_file(str(path), shared=True, size=12, dtype=torch.float32)
    other.fill_(7)
    assert bool((buffer.sample(3) == 7).all()) and bool((buffer[:] == 7).all())


def test_files_stay_unless_the_storage_cleans_up(tmp_path):
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "data")
    ReplayBuffer(storage=storage).extend(nested_td([1]))
    del storage
    gc.collect()
    assert "obs.memmap" in files(tmp_path / "data")


def test_files_go_with_the_storage_when_asked(tmp_path):
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "data", auto_cleanup=True))
    buffer.extend(nested_td([1]))
    buffer.sample(2)
    assert "obs.memmap" in files(tmp_path / "data")
    del buffer
    gc.collect()
    assert files(tmp_path) == set() and os.listdir(tmp_path) == []


def test_cleaning_up_happens_once(tmp_path):
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "data")
    assert storage.cleanup() is False
    ReplayBuffer(storage=storage).extend(nested_td([1]))
    assert storage.cleanup() is True and storage.cleanup() is False
    assert files(tmp_path) == set()
    assert LazyMemmapStorage(4).cleanup() is False


def test_cleaning_up_leaves_the_files_of_others(tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path)
    ReplayBuffer(storage=storage).extend(nested_td([1]))
    storage.cleanup()
    assert files(tmp_path) == {"mine.txt"}


def test_who_cleans_up_by_default(tmp_path):
    assert LazyMemmapStorage(4).auto_cleanup is True
    assert LazyMemmapStorage(4, scratch_dir=tmp_path).auto_cleanup is False
    assert LazyMemmapStorage(4, scratch_dir=tmp_path, auto_cleanup=True).auto_cleanup is True


def test_tensorclasses_live_in_files(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path))
    buffer.extend(steps([1, 2]))
    assert {"obs.memmap", "reward.memmap"} <= files(tmp_path)
    check_same(buffer[:], steps([1, 2]))


def test_a_disk_too_small_is_an_error_and_leaves_nothing(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(2**58, scratch_dir=tmp_path / "data"))
    with pytest.raises(OSError):
        buffer.extend({"a": torch.zeros(2, dtype=torch.uint8)})
    assert len(buffer) == 0 and buffer.write_count == 0 and not (tmp_path / "data").exists()
