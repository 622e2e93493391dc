"""Where checkpoints are: beside and in folders of memory maps, and where nothing can be written."""

import errno
import gc
import subprocess

import numpy as np
import pytest
import torch

from fbuf import load_state, save_state
from interop import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from tests.faults.failing import small_disk
from tests.faults.sharing import rows

pytestmark = pytest.mark.usefixtures("frozen")


def buffer_of(storage):
    return TensorDictReplayBuffer(storage=storage, batch_size=4)


def ids_in(path, capacity=100):
    target = buffer_of(LazyTensorStorage(capacity))
    target.loads(path)
    return target[:]["id"].tolist()


def test_a_checkpoint_around_the_folder_of_the_rows_is_a_copy(tmp_path):
    buffer = buffer_of(LazyMemmapStorage(100, scratch_dir=tmp_path / "c" / "storage"))
    (tmp_path / "c").mkdir()
    buffer.extend(rows(torch.arange(64)))
    buffer.dumps(tmp_path / "c")
    buffer.extend(rows(torch.arange(1000, 1100)))
    assert ids_in(tmp_path / "c") == list(range(64))
    buffer.dumps(tmp_path / "c")
    assert sorted(ids_in(tmp_path / "c")) == list(range(1000, 1100))


def test_a_checkpoint_in_the_folder_of_the_rows_is_a_copy(tmp_path):
    buffer = buffer_of(LazyMemmapStorage(100, scratch_dir=tmp_path / "rows"))
    buffer.extend(rows(torch.arange(64)))
    buffer.dumps(tmp_path / "rows")
    buffer.extend(rows(torch.arange(1000, 1030)))
    del buffer
    gc.collect()
    assert ids_in(tmp_path / "rows") == list(range(64))
    again = LazyMemmapStorage.open(tmp_path / "rows")
    assert again[:]["id"].tolist() == [*range(64), *range(1000, 1030)]


def test_where_nothing_can_be_written_everything_can_be_read(tmp_path):
    state = {"a": np.arange(3)}
    with small_disk(tmp_path, "20m") as mounted:
        if not mounted:
            pytest.skip("nothing can be mounted here")
        buffer = buffer_of(LazyTensorStorage(20))
        buffer.extend(rows(torch.arange(12)))
        buffer.dumps(tmp_path / "c")
        save_state(tmp_path / "s", state)
        named = buffer_of(LazyMemmapStorage(20, scratch_dir=tmp_path / "m"))
        named.extend(rows(torch.arange(12)))
        named.storage.close()
        del named
        gc.collect()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        assert ids_in(tmp_path / "c", 20) == list(range(12))
        assert load_state(tmp_path / "s", state)["a"].tolist() == [0, 1, 2]
        reader = LazyMemmapStorage.open(tmp_path / "m", "r")
        assert reader[:]["id"].tolist() == list(range(12))
        unwritten = buffer_of(LazyMemmapStorage(20, scratch_dir=tmp_path / "new"))
        for refused in (
            lambda: buffer.dumps(tmp_path / "c"),
            lambda: buffer.dumps(tmp_path / "d"),
            lambda: save_state(tmp_path / "s", state),
            lambda: LazyMemmapStorage.open(tmp_path / "m"),
            lambda: unwritten.extend(rows(torch.arange(12))),
        ):
            with pytest.raises(OSError) as told:
                refused()
            assert told.value.errno == errno.EROFS
        assert buffer[:]["id"].tolist() == list(range(12))
        del reader  # or its maps keep the file system busy
        gc.collect()
