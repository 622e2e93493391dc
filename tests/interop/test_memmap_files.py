"""LazyMemmapStorage: files, their names, who removes and replaces them."""

import gc
import json
import os
import tempfile

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

from interop import LazyMemmapStorage, ReplayBuffer, TensorDictReplayBuffer, TensorStorage
from interop.shared import folder
from tests.interop.rows import check_same, flat_td, nested_td, plain_tensor, tensors_of

pytestmark = pytest.mark.usefixtures("frozen")
NUMBER = "_-single-tensor-_.memmap"


OWN = {"storage.json", "storage.state", "storage.lock"}


def there(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def stored(rows, folder, **options):
    storage = LazyMemmapStorage(4, scratch_dir=folder, **options)
    storage.set(slice(0, 2), rows([1, 2]))
    return storage


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------ which files there are


def test_a_tensordict_takes_a_file_for_each_key_and_a_folder_for_each_level(tmp_path):
    storage = LazyMemmapStorage(5, scratch_dir=tmp_path / "data")
    assert storage.scratch_dir == str(tmp_path / "data") + "/"
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(nested_td([0, 1, 2]))
    assert names(tmp_path / "data") == {
        "obs.memmap", "next/pixels.memmap", "next/reward.memmap", "meta.json", "next/meta.json", *OWN,
    }  # fmt: skip
    assert json.loads((tmp_path / "data" / "meta.json").read_text())["shape"] == [5]
    opened = TensorDict.load_memmap(tmp_path / "data")
    check_same(opened[:3].clone().unlock_().apply(lambda leaf: torch.as_tensor(leaf).clone()), nested_td([0, 1, 2]))


def test_a_lone_tensor_and_pytrees_have_names_of_their_own(tmp_path, monkeypatch):
    ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "one")).extend(plain_tensor([1]))
    assert names(tmp_path / "one") == {"_-single-tensor-_.memmap", *OWN}
    ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "two")).extend(
        {"a": (torch.zeros(1), [torch.ones(1)])}
    )
    assert names(tmp_path / "two") == {"a/0.memmap", "a/1/0.memmap", *OWN}
    monkeypatch.setenv("SINGLE_TENSOR_BUFFER_NAME", "only")
    ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "three")).extend(plain_tensor([1]))
    assert names(tmp_path / "three") == {"only.memmap", *OWN}


def test_a_folder_that_cannot_be_made_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").write_text("")
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "file" / "data"))
    with pytest.raises(OSError):
        buffer.extend(flat_td([1]))
    assert len(buffer) == 0 and not buffer.storage.initialized and names(tmp_path) == {"file"}


@pytest.mark.parametrize("key", ["..", "a/b", ""])
def test_keys_cannot_lead_out_of_the_folder(tmp_path, key):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "data"))
    with pytest.raises(ValueError):
        buffer.extend({"fine": torch.zeros(2), key: torch.zeros(2)})
    assert len(buffer) == 0 and there(tmp_path) == set()


@pytest.mark.parametrize("device", ["cuda", "meta", torch.device("meta")])
def test_devices_other_than_the_cpu_are_refused(device):
    with pytest.raises(ValueError, match="transform"):
        LazyMemmapStorage(4, device=device)


def test_views_come_locked_and_samples_free():
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4))
    buffer.extend(nested_td([1, 2]))
    assert buffer[:].is_locked and buffer[0].is_locked and buffer[0:1].is_locked
    batch = buffer.sample(3)
    assert not batch.is_locked and not buffer[torch.tensor([0])].is_locked
    assert type(batch["obs"]) is torch.Tensor
    batch["new"] = torch.zeros(3)


def test_files_go_with_the_storage_when_asked(tmp_path):
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "data", auto_cleanup=True))
    buffer.extend(nested_td([1]))
    buffer.sample(2)
    assert "obs.memmap" in names(tmp_path / "data")
    del buffer
    gc.collect()
    assert there(tmp_path) == set() and os.listdir(tmp_path) == []


def test_cleaning_up_happens_once(tmp_path):
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "data")
    assert storage.cleanup() is False
    ReplayBuffer(storage=storage).extend(nested_td([1]))
    assert storage.cleanup() is True and storage.cleanup() is False
    assert there(tmp_path) == set()
    assert LazyMemmapStorage(4).cleanup() is False


# ------------------------------------------------------------------ what is removed


def test_files_that_were_replaced_are_those_of_who_replaced_them(tmp_path):
    first = stored(nested_td, tmp_path / "data", auto_cleanup=True)
    first.close()
    kept = stored(nested_td, tmp_path / "data", existsok=True)
    before = there(tmp_path)
    assert first.cleanup() is False and there(tmp_path) == before
    assert kept.cleanup() is True and there(tmp_path) == set()


def test_the_description_of_others_is_neither_written_over_nor_removed(tmp_path):
    meta = tmp_path / "meta.json"
    meta.write_text("mine")
    assert stored(plain_tensor, tmp_path).cleanup()  # a lone tensor has none
    with pytest.raises(RuntimeError, match=r"meta.json already exists"):
        stored(flat_td, tmp_path)
    assert there(tmp_path) == {"meta.json"} and meta.read_text() == "mine"
    assert stored(flat_td, tmp_path, existsok=True).cleanup() and there(tmp_path) == set()


def test_a_link_is_replaced_not_followed(tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / NUMBER).symlink_to(tmp_path / "other")
    with pytest.raises(RuntimeError, match="already exists"):
        stored(plain_tensor, tmp_path)
    stored(plain_tensor, tmp_path, existsok=True)
    assert (tmp_path / "other").read_text() == "kept" and not (tmp_path / NUMBER).is_symlink()


# ------------------------------------------------------------------ what is replaced


def test_who_has_a_file_open_keeps_it_when_it_is_replaced(tmp_path):
    old = LazyMemmapStorage(2**20, scratch_dir=tmp_path)
    old.set(slice(None), torch.ones(2**20))
    with pytest.raises(RuntimeError, match="in use"):
        LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True).set(0, torch.tensor(2.0))
    old.close()
    new = LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True)
    new.set(0, torch.tensor(2.0))
    assert bool((old[:] == 1).all()) and new[:].tolist() == [2] and (tmp_path / NUMBER).stat().st_size == 40
    assert there(tmp_path) == {NUMBER, *OWN}


def test_files_stay_where_new_ones_have_no_room(tmp_path):
    stored(flat_td, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in there(tmp_path)}
    with pytest.raises(OSError):
        LazyMemmapStorage(2**58, scratch_dir=tmp_path, existsok=True).set(0, flat_td([1])[0])
    assert {name: (tmp_path / name).read_bytes() for name in there(tmp_path)} == before


def test_space_is_reserved_where_the_system_has_no_call_for_it(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr(folder, "_CHUNK", bytes(7))
    storage = stored(plain_tensor, tmp_path)
    assert (tmp_path / NUMBER).stat().st_size == 48 and (tmp_path / NUMBER).stat().st_blocks > 0
    check_same(torch.as_tensor(storage[:]).clone(), plain_tensor([1, 2]))


# ------------------------------------------------------------------ memory of several processes


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_anonymous_maps_take_two_descriptors_however_many_leaves():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    storage = LazyMemmapStorage(4)
    storage.set(slice(0, 2), {str(place): torch.full((2, place), place) for place in range(20)})
    assert len(os.listdir("/proc/self/fd")) - before <= 2
    check_same(storage[1], {str(place): torch.full((place,), place) for place in range(20)})
    assert all(isinstance(leaf, MemoryMappedTensor) for leaf in tensors_of(storage[:]) if leaf.numel())
    del storage
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_given_memory_maps_stay_the_files_that_they_are(tmp_path):
    given = TensorDict({"a": torch.zeros(4)}, [4]).memmap_(tmp_path)
    storage = TensorStorage(given)
    assert storage.is_shared() and isinstance(storage.table.rows.tensors[0], MemoryMappedTensor)
    storage[1] = TensorDict({"a": torch.tensor(7.0)}, [])
    assert TensorDict.load_memmap(tmp_path)["a"].tolist() == [0, 7, 0, 0]


def test_the_folder_of_a_temporary_directory():
    kept = tempfile.TemporaryDirectory()
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=kept), batch_size=2)
    rb.extend(TensorDict({"a": torch.arange(3)}, batch_size=[3]))
    assert rb.storage.scratch_dir == kept.name + "/" and "a.memmap" in os.listdir(kept.name)
    del rb
    gc.collect()
    kept.cleanup()
