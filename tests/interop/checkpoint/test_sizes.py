"""Checkpoints that announce much and hold little: the typed error, or the items, in memory by a factor of the files."""

import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zstandard

from fbuf.checkpoint import CheckpointCorrupt
from interop import CompressedListStorage, H5StorageCheckpointer, LazyTensorStorage, ReplayBuffer
from tests.faults.failing import ted
from tests.interop.peaks import LIMITED, bounded

GIB = 1 << 30
MOST = 200 << 20  # bytes of memory


def zeros(size: int, announced: bool = True) -> torch.Tensor:
    """So many zeros, compressed to a thirty-thousandth."""
    packer = zstandard.ZstdCompressor(level=3, write_content_size=announced).compressobj(size=size if announced else -1)
    data = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)), packer.flush()])
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def state(leaf: torch.Tensor, shape: list[int]) -> dict[str, Any]:
    """The state of a compressed list of one item, a tensor of this shape."""
    storage = CompressedListStorage(4)
    storage.set(0, torch.zeros(8, dtype=torch.uint8))
    found = storage.state_dict()
    found["_storage"] = [[leaf]]
    found["_metadata"][0]["shapes"] = [shape]
    return found


@LIMITED
@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("shape", [[8], [GIB + 1], [2**40], [2**62, 2**62]], ids=str)
def test_bytes_that_are_more_than_the_shape_says(announced: bool, shape: list[int]) -> None:
    given, storage = state(zeros(GIB, announced), shape), CompressedListStorage(4)
    with bounded(MOST), pytest.raises(CheckpointCorrupt):
        storage.load_state_dict(given)
    assert len(storage) == 0


@LIMITED
def test_zeros_that_are_as_many_as_the_shape_says(tmp_path: Path) -> None:
    """A list that somebody wrote: it takes its compressed bytes, until an item is read."""
    buffer, other = (ReplayBuffer(storage=CompressedListStorage(4)) for _ in range(2))
    buffer.storage.load_state_dict(state(zeros(GIB), [GIB]))
    buffer.dumps(tmp_path / "c")
    with bounded(MOST):
        other.loads(tmp_path / "c")
    assert len(other.storage) == 1


@LIMITED
def test_flags_of_an_h5_file_that_are_compressed_twice(tmp_path: Path) -> None:
    """They say where trajectories end, and are read first."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(200))
    buffer.extend(ted(200, 1))
    path, rows = tmp_path / "c.h5", 1 << 29
    H5StorageCheckpointer().dumps(buffer.storage, path)
    with h5py.File(path, "r+") as file:
        group = file["traj_0" if "traj_0" in file else next(name for name in file if name.startswith("traj_"))]
        shape = group["done"].shape[1:]
        del group["done"]
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_chunk((1 << 25, *shape))
        made.set_deflate(9)
        made.set_deflate(9)
        kind, space = h5py.h5t.py_create(np.dtype(bool)), h5py.h5s.create_simple((rows, *shape))
        it = h5py.h5d.create(group.id, b"done", kind, space, made)
        chunk = zlib.compress(zlib.compress(bytes(1 << 25), 9), 1) + bytes(200)
        for start in range(0, rows, 1 << 25):
            it.write_direct_chunk((start, *[0] * len(shape)), chunk)
    assert path.stat().st_size < 10_000_000
    storage = LazyTensorStorage(200)
    with bounded(MOST), pytest.raises(CheckpointCorrupt):
        H5StorageCheckpointer().loads(storage, path)
    assert len(storage) == 0
