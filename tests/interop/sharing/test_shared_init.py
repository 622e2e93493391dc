"""Storages that processes were given before anything was written."""

import copy
import gc
import pickle

import pytest
import torch

from interop import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

KINDS = [LazyTensorStorage, LazyMemmapStorage]


def test_what_it_excludes():
    for kind in KINDS:
        with pytest.raises(RuntimeError, match="compilable=False"):
            kind(8, shared_init=True, compilable=True)
    with pytest.raises(ValueError, match="consolidated"):
        LazyTensorStorage(8, shared_init=True, consolidated=True)
    with pytest.warns(UserWarning, match="CPU"):
        storage = LazyTensorStorage(8, shared_init=True, device="cuda")
    assert storage.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "cleanup"), [(LazyTensorStorage, True), (LazyTensorStorage, False), (LazyMemmapStorage, True)]
)
def test_the_folder_in_the_temporary_directory_goes_with_the_storage(kind, cleanup, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    more = {} if cleanup else {"cleanup_memmap": False}
    buffer = ReplayBuffer(storage=kind(8, shared_init=True, **more))
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("interop_storage_init_") and folder.stat().st_mode & 0o077 == 0
    (folder / "description.1").write_bytes(b"half of it")  # is not read
    assert not buffer.storage.initialized and len(buffer) == 0
    buffer.extend(torch.arange(12))
    assert buffer[:].tolist() == [8, 9, 10, 11, 4, 5, 6, 7] and any(folder.iterdir())
    del buffer
    gc.collect()
    assert folder.exists() == (not cleanup)


def test_a_folder_that_is_gone_is_an_error_at_the_first_write(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage = LazyTensorStorage(8, shared_init=True)
    for folder in tmp_path.iterdir():
        folder.rmdir()
    with pytest.raises(RuntimeError, match="is gone"):
        ReplayBuffer(storage=storage).extend(torch.arange(3))
    assert len(storage) == 0 and not storage.initialized


@pytest.mark.parametrize("again", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
@pytest.mark.parametrize("written", [False, True])
def test_a_copy_has_memory_of_its_own(again, written):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, shared_init=True))
    if written:
        buffer.extend(torch.arange(3))
    twin = again(buffer)
    twin.extend(torch.arange(5))
    assert len(buffer) == 3 * written and len(twin) == 5 + 3 * written
    buffer.extend(torch.full((2,), 9))
    assert twin[:].max() == 4


@pytest.mark.parametrize(
    ("kind", "named"), [("LazyTensorStorage", False), ("LazyMemmapStorage", False), ("LazyMemmapStorage", True)]
)
def test_the_first_writer_allocates_and_the_files_go_with_the_maker(in_a_fork, tmp_path, kind, named):
    in_a_fork(
        """
        import gc, os, torch
        from pathlib import Path
        import interop
        from interop import TensorDictReplayBuffer
        from tests.faults.sharing import rows, torn

        options = {"scratch_dir": place, "auto_cleanup": True} if named else {}
        buffer = TensorDictReplayBuffer(storage=getattr(interop, kind)(40, shared_init=True, **options), batch_size=4)
        children = []
        for first in (0, 10, 20):
            child = os.fork()
            if child == 0:
                buffer.extend(rows(torch.arange(first, first + 10)))
                assert torn(buffer.sample()) == 0
                del buffer
                gc.collect()
                raise SystemExit(0) if first else os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        assert buffer.storage.initialized and len(buffer) == 30 == buffer.write_count
        assert sorted(buffer[:]["id"].tolist()) == list(range(30)) and torn(buffer[:]) == 0
        try:
            buffer.extend(rows(torch.arange(3)).exclude("obs"))
            raise SystemError("was not refused")
        except (RuntimeError, TypeError, KeyError):
            assert len(buffer) == 30 == buffer.write_count
        assert not named or Path(place, "id.memmap").exists()
        del buffer
        gc.collect()
        assert not (named and Path(place, "id.memmap").exists())
        """,
        kind=kind,
        named=named,
        place=str(tmp_path / "held"),
    )
