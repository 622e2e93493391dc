"""Saving where no file may be larger than a limit: an error as of a full disk, whoever writes the file."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from interop import (
    CompressedListStorage,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    Storage,
    StorageCheckpointerBase,
    TensorStorageCheckpointer,
)
from tests.faults.failing import ted

CHECKPOINTERS = [TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]


def refused(save: Callable[[Path], None], path: Path) -> None:
    """Nothing is left of a save with a limit of any size, and a save without works."""
    for limit in (0, 100, 60_000):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError) as raised:
                save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert raised.value.errno == errno.EFBIG and not os.listdir(path.parent)
    save(path)
    assert path.exists()


@pytest.mark.parametrize("kind", CHECKPOINTERS)
def test_tensors(kind: type[StorageCheckpointerBase], tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), checkpointer=kind())
    buffer.extend(ted(200, 1))
    refused(buffer.dumps, tmp_path / "c")


def test_an_h5_file_by_itself(tmp_path: Path) -> None:
    storage = LazyTensorStorage(200)
    ReplayBuffer(storage=storage).extend(ted(200, 1))
    refused(lambda path: H5StorageCheckpointer().dumps(storage, path), tmp_path / "c.h5")


@pytest.mark.parametrize("kind", [ListStorage, CompressedListStorage])
def test_lists(kind: type[Storage], tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=kind(200))
    buffer.extend([torch.randn(100) for _ in range(200)])
    refused(buffer.dumps, tmp_path / "c")
