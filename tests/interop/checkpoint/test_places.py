"""Where checkpoints are: beside and in folders of memory maps, and where nothing can be written."""

import gc

import pytest
import torch

from interop import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
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
