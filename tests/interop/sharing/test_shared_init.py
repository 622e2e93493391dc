"""Storages that processes were given before anything was written."""

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch

from interop import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from tests.faults.sharing import rows

KINDS = [LazyTensorStorage, LazyMemmapStorage]


@pytest.mark.parametrize("kind", KINDS)
def test_alone_it_is_a_storage_like_others_whose_folder_goes_with_it(kind):
    buffer = TensorDictReplayBuffer(storage=kind(8, shared_init=True))
    folder = buffer.storage._first.folder
    assert folder.name.startswith("interop_storage_init_") and folder.stat().st_mode & 0o077 == 0
    assert not buffer.storage.initialized and len(buffer) == 0
    buffer.extend(rows(torch.arange(12)))
    assert buffer[:]["id"].tolist() == [8, 9, 10, 11, 4, 5, 6, 7] and any(folder.iterdir())
    del buffer
    gc.collect()
    assert not folder.exists()


def test_what_it_excludes():
    for kind in KINDS:
        with pytest.raises(RuntimeError, match="compilable=False"):
            kind(8, shared_init=True, compilable=True)
    with pytest.raises(ValueError, match="consolidated"):
        LazyTensorStorage(8, shared_init=True, consolidated=True)
    with pytest.warns(UserWarning, match="CPU"):
        storage = LazyTensorStorage(8, shared_init=True, device="cuda")
    assert storage.device == torch.device("cpu")


def test_a_folder_that_is_to_stay():
    storage = LazyTensorStorage(8, shared_init=True, cleanup_memmap=False)
    folder = storage._first.folder
    del storage
    gc.collect()
    assert folder.exists()
    folder.rmdir()


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


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
@pytest.mark.parametrize("named", [False, True])
def test_whoever_writes_first_allocates_and_the_folder_goes_with_its_maker(in_a_fork, tmp_path, kind, named):
    if named and kind == "LazyTensorStorage":
        pytest.skip("has no folder of its own")
    in_a_fork(
        """
        import gc, os, torch
        from pathlib import Path
        import interop
        from interop import TensorDictReplayBuffer
        from tests.faults.sharing import rows, torn

        options = {"scratch_dir": place, "auto_cleanup": True} if named else {}
        buffer = TensorDictReplayBuffer(storage=getattr(interop, kind)(40, shared_init=True, **options), batch_size=4)
        folder = buffer.storage._first.folder
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
        assert folder.exists() and (not named or Path(place, "id.memmap").exists())
        del buffer
        gc.collect()
        assert not folder.exists() and not (named and Path(place, "id.memmap").exists())
        """,
        kind=kind,
        named=named,
        place=str(tmp_path / "held"),
    )


def test_items_of_another_kind_are_refused_whoever_wrote_first(in_a_fork):
    in_a_fork("""
        import os, torch
        from interop import LazyTensorStorage, ReplayBuffer

        buffer = ReplayBuffer(storage=LazyTensorStorage(8, shared_init=True))
        child = os.fork()
        if child == 0:
            buffer.extend(torch.zeros(3, 2))
            os._exit(0)
        os.waitpid(child, 0)
        assert buffer.storage[:].shape == (3, 2)
        try:
            buffer.extend(torch.zeros(3, 5))
            raise SystemError("was not refused")
        except RuntimeError as error:
            assert "shape" in str(error)
        assert len(buffer) == 3 == buffer.write_count
    """)


def test_a_folder_that_is_gone_is_an_error_at_the_first_write():
    storage = LazyTensorStorage(8, shared_init=True)
    Path(storage._first.folder).rmdir()
    with pytest.raises(RuntimeError, match="is gone"):
        ReplayBuffer(storage=storage).extend(torch.arange(3))
    assert len(storage) == 0 and not storage.initialized


def test_a_description_that_is_not_finished_is_not_read():
    storage = LazyTensorStorage(8, shared_init=True)
    (storage._first.folder / "description.1").write_bytes(b"half of it")
    assert not storage.initialized
    ReplayBuffer(storage=storage).extend(torch.arange(3))
    assert storage.initialized and len(storage) == 3
