"""A folder that a storage with `shared_init` has: no other one writes to it, until those who were given it are gone."""

import copy
import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from interop import LazyMemmapStorage, ReplayBuffer, TensorDictReplayBuffer
from tests.faults.sharing import rows, torn


def in_another_process(code: str, **values: object) -> subprocess.Popen[str]:
    given = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    program = "import os, signal, torch\nfrom tests.interop.rows import flat_td\nfrom interop import *\n"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", f"{program}{given}\n{textwrap.dedent(code)}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def buffer_on(path: Path, ids: Any = None, **options: Any) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(20, scratch_dir=path, existsok=True, **options), batch_size=4
    )
    if ids is not None:
        buffer.extend(rows(torch.tensor(ids)))
    return buffer


def ids(buffer: TensorDictReplayBuffer) -> list[int]:
    assert torn(buffer[:]) == 0
    return buffer[:]["id"].tolist()


def contents(path: Path) -> dict[str, bytes]:
    return {each.relative_to(path).as_posix(): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("other_shared", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_a_second_storage_is_refused_and_touches_nothing(
    shared: bool, other_shared: bool, written: bool, tmp_path: Path
) -> None:
    if not (shared or other_shared) or not (shared or written):
        pytest.skip("is that of storages without shared_init, or none that has the folder")
    buffer = buffer_on(tmp_path / "a", [1, 2, 3] if written else None, shared_init=shared)
    before = contents(tmp_path / "a")
    with pytest.raises(RuntimeError, match=f"in use by another storage of this process .pid {os.getpid()}"):
        buffer_on(tmp_path / "a", [500], shared_init=other_shared)
    assert contents(tmp_path / "a") == before
    buffer.extend(rows(torch.tensor([4])))
    assert ids(buffer) == ([1, 2, 3, 4] if written else [4])


@pytest.mark.slow
@pytest.mark.parametrize("other_shared", [True, False])
def test_another_process_is_refused_until_the_one_that_has_it_is_killed(other_shared: bool, tmp_path: Path) -> None:
    code = """
        storage = LazyMemmapStorage(20, scratch_dir=folder, shared_init=True)
        print(os.getpid(), flush=True)
        input()
    """
    with in_another_process(code, folder=str(tmp_path)) as owner:
        pid = int(owner.stdout.readline())
        with pytest.raises(RuntimeError, match=f"the process {pid}"):
            buffer_on(tmp_path, [1], shared_init=other_shared)
        owner.kill()
    assert ids(buffer_on(tmp_path, [1], shared_init=other_shared)) == [1]


def test_the_end_of_the_one_that_has_it_frees_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    buffer_on(folder, shared_init=True)  # gone at once
    gc.collect()
    assert not folder.parent.exists()
    first = buffer_on(folder, shared_init=True)
    first.storage.close()
    with pytest.raises(RuntimeError, match="closed here"):
        first.extend(rows(torch.tensor([1])))
    assert not folder.parent.exists() and not first.storage.initialized

    second = buffer_on(folder, [1, 2], shared_init=True)
    second.storage.close()
    third = buffer_on(folder, [3], shared_init=True)
    with pytest.raises(RuntimeError, match="closed here"):
        second.extend(rows(torch.tensor([4])))
    assert (ids(second), ids(third)) == ([1, 2], [3])
    del second
    gc.collect()
    assert LazyMemmapStorage.open(folder, "r")[:]["id"].tolist() == [3]
    assert third.storage.cleanup() and set(contents(folder)) == {"storage.lock"}
    assert ids(buffer_on(folder, [5])) == [5]


def test_a_storage_that_is_there_is_gone_on_with_or_replaced_when_it_is_built(tmp_path: Path) -> None:
    buffer_on(tmp_path, [1, 2]).storage.close()
    with pytest.raises(RuntimeError, match="already exists as a storage"):
        LazyMemmapStorage(20, scratch_dir=tmp_path, shared_init=True)
    assert LazyMemmapStorage.open(tmp_path)[:]["id"].tolist() == [1, 2]

    gc.collect()
    (tmp_path / "storage.lock").write_bytes(b"")  # nor where it does not say which files there are
    buffer = buffer_on(tmp_path, [7], shared_init=True)
    assert ids(buffer) == [7]
    buffer.storage.close()
    assert LazyMemmapStorage.open(tmp_path)[:]["id"].tolist() == [7]


def test_what_a_process_that_was_killed_making_the_files_left_is_removed(in_a_fork: Any, tmp_path: Path) -> None:
    in_a_fork(
        """
        import os, torch
        from interop import LazyMemmapStorage, TensorDictReplayBuffer
        from interop.shared.files import Files
        from tests.faults.sharing import rows

        buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=place, shared_init=True))
        child = os.fork()
        if child == 0:
            Files.put_in_place = lambda files: os.kill(os.getpid(), 9)
            buffer.extend(rows(torch.tensor([1])))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 9 and os.path.exists(place + "/id.memmap")
        buffer.extend(rows(torch.tensor([2, 3])))
        assert buffer[:]["id"].tolist() == [2, 3]
        """,
        place=str(tmp_path),
    )


def _work(buffer: TensorDictReplayBuffer, pipe: Any) -> None:
    buffer.extend(rows(torch.tensor([10, 11])))
    pipe.send(True)
    pipe.recv()
    buffer.extend(rows(torch.tensor([12])))
    pipe.send(True)
    pipe.recv()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_writes_first_in_the_folder_of_the_one_that_started_it(
    method: str, in_a_fork: Any, tmp_path: Path
) -> None:
    in_a_fork(
        """
        import gc, multiprocessing, pytest, torch
        from pathlib import Path
        from interop import LazyMemmapStorage
        from tests.faults.sharing import rows
        from tests.interop.storages import test_folder_strangers as these

        folder = Path(place)
        buffer = these.buffer_on(folder, shared_init=True)
        context = multiprocessing.get_context(method)
        here, there = context.Pipe()
        worker = context.Process(target=these._work, args=(buffer, there))
        worker.start()
        there.close()
        assert here.recv()
        before = these.contents(folder)
        for options in {}, {"shared_init": True}:
            with pytest.raises(RuntimeError, match="in use"):
                these.buffer_on(folder, [500], **options)
        assert these.contents(folder) == before
        buffer.extend(rows(torch.tensor([13])))
        here.send(True)
        assert here.recv() and these.ids(buffer) == [10, 11, 13, 12]
        buffer.storage.close()
        with pytest.raises(RuntimeError, match="in use"):
            these.buffer_on(folder, [500])
        here.send(True)
        worker.join(60)
        assert worker.exitcode == 0 and these.ids(buffer) == [10, 11, 13, 12]
        assert these.ids(these.buffer_on(folder, [500])) == [500] and these.ids(buffer) == [10, 11, 13, 12]
        """,
        place=str(tmp_path),
        method=method,
    )


def test_a_copy_has_a_place_of_its_own(tmp_path: Path) -> None:
    buffer = buffer_on(tmp_path, [1], shared_init=True)
    twin = copy.deepcopy(buffer)
    twin.extend(rows(torch.tensor([2])))
    assert (ids(buffer), ids(twin)) == ([1], [1, 2]) and twin.storage.scratch_dir is None


def test_a_load_that_fails_leaves_the_folder_to_whoever_writes_first(tmp_path: Path) -> None:
    saved = ReplayBuffer(storage=LazyMemmapStorage(4))
    saved.extend(torch.arange(3))
    saved.dumps(tmp_path / "saved")
    leaves = [each for each in (tmp_path / "saved").rglob("*") if each.is_file() and each.suffix != ".json"]
    for leaf in leaves:
        os.chmod(leaf, 0o644)
        leaf.write_bytes(bytes(leaf.stat().st_size))
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "a", shared_init=True))
    with pytest.raises(RuntimeError):
        buffer.loads(tmp_path / "saved")
    assert not list((tmp_path / "a").rglob("*.memmap")) and not buffer.storage.initialized
    buffer.extend(torch.arange(5))
    assert sorted(buffer[:].tolist()) == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="in use"):
        LazyMemmapStorage(4, scratch_dir=tmp_path / "a", shared_init=True)
