"""LazyMemmapStorage: whose the files are, and which memory other processes see."""

import gc
import multiprocessing
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict

from interop import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorStorage
from interop.host.maps import from_file
from interop.shared import files
from tests.interop import workers
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


# ------------------------------------------------------------------ what is removed


def test_a_storage_that_cleaned_up_leaves_the_files_of_the_next(tmp_path):
    first = stored(plain_tensor, tmp_path / "data", auto_cleanup=True)
    assert first.cleanup()
    second = stored(plain_tensor, tmp_path / "data")
    del first
    gc.collect()
    assert there(tmp_path) == {"data", f"data/{NUMBER}", *(f"data/{name}" for name in OWN)} and len(second) == 2


def test_files_that_were_replaced_are_those_of_who_replaced_them(tmp_path):
    first = stored(nested_td, tmp_path / "data", auto_cleanup=True)
    made = first.files
    first.close()
    kept = stored(nested_td, tmp_path / "data", existsok=True)
    before = there(tmp_path)
    assert first.cleanup() is False and made.remove() is False and there(tmp_path) == before
    assert kept.cleanup() is True and there(tmp_path) == set()


@pytest.mark.parametrize("rows", [plain_tensor, flat_td])
def test_what_was_there_before_stays(tmp_path, rows):
    (tmp_path / "data" / "mine").mkdir(parents=True)
    storage = stored(rows, tmp_path / "data")
    assert storage.cleanup() and there(tmp_path) == {"data", "data/mine"}


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
    monkeypatch.setattr(files, "_CHUNK", bytes(7))
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


@pytest.mark.slow
@pytest.mark.parametrize("named", [pytest.param(False, id="anonymous"), pytest.param(True, id="files")])
def test_a_spawned_worker_writes_where_everyone_reads(tmp_path, named):
    storage = LazyMemmapStorage(6, scratch_dir=tmp_path / "data" if named else None)
    buffer = ReplayBuffer(storage=storage)
    rows = {"a": torch.tensor([1 + 1j, 2]), "b": torch.arange(2), "empty": torch.zeros(2, 0)}
    buffer.extend(rows)
    view = buffer[:]["a"]
    memory = view.data_ptr()
    process = multiprocessing.get_context("spawn").Process(target=workers.extend_and_edit, args=(buffer, rows))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert buffer[:]["a"].tolist() == [1 + 1j, 5j, 1 + 1j, 2] and buffer[:]["b"].tolist() == [0, 1, 0, 1]
    assert set(buffer.sample(100)["a"].tolist()) == {1 + 1j, 5j, 2}
    assert buffer[:]["a"].data_ptr() == memory and view.tolist() == [1 + 1j, 5j]
    assert isinstance(buffer[:]["a"], MemoryMappedTensor)


def test_given_memory_maps_stay_the_files_that_they_are(tmp_path):
    given = TensorDict({"a": torch.zeros(4)}, [4]).memmap_(tmp_path)
    storage = TensorStorage(given)
    assert storage.is_shared() and isinstance(storage.rows.tensors[0], MemoryMappedTensor)
    storage[1] = TensorDict({"a": torch.tensor(7.0)}, [])
    assert TensorDict.load_memmap(tmp_path)["a"].tolist() == [0, 7, 0, 0]


@pytest.mark.slow
def test_a_child_forked_before_the_memory_moved_does_not_write_to_the_old():
    code = """
        import os, torch
        from interop import LazyTensorStorage, ReplayBuffer

        buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        buffer.extend(torch.arange(3))
        (reading, writing), child = os.pipe(), 0
        for moved in (False, True):
            child = os.fork()
            if child == 0:
                if moved:
                    os.read(reading, 1)
                try:
                    buffer.extend(torch.tensor([7]))
                except RuntimeError:
                    os._exit(1)
                os._exit(0)
            if moved:
                buffer.storage.rows.share()  # as for a worker that is spawned
                os.write(writing, b"x")
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), buffer[:].tolist())
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "0 [0, 1, 2, 7]\n1 [0, 1, 2, 7]\n", done.stderr[-3000:]


def test_a_storage_that_is_not_written_is_not_shared():
    assert not LazyTensorStorage(4).is_shared() and not LazyMemmapStorage(4).is_shared()


def test_a_private_map_may_be_larger_than_the_memory_of_the_machine(tmp_path):
    items = 3 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    with open(tmp_path / "rows.memmap", "wb") as file:
        file.truncate(4 * items)  # a file with a hole takes no space
    leaf = from_file(tmp_path / "rows.memmap", (items,), torch.float32, private=True)
    leaf[items - 1] = 1
    assert leaf[items - 1] == 1 and leaf[7] == 0
    assert os.stat(tmp_path / "rows.memmap").st_blocks == 0
