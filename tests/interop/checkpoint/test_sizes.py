"""Checkpoints that announce much and hold little: the typed error, or the items, in memory by a factor of the files."""

import zlib
from collections.abc import Callable
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


def chunk_of_zeros(file: h5py.File, name: str, size: int) -> None:
    """Replace a dataset by rows of zeros, compressed twice."""
    dtype, shape = file[name].dtype, file[name].shape[1:]
    del file[name]
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk((size, *shape))
    made.set_deflate(9)
    made.set_deflate(9)
    kind = h5py.h5t.py_create(dtype)
    it = h5py.h5d.create(file[name.rpartition("/")[0]].id, name.rpartition("/")[2].encode(), kind,
                         h5py.h5s.create_simple((size, *shape)), made)  # fmt: skip
    data = bytes(size * int(np.prod(shape)) * dtype.itemsize)
    it.write_direct_chunk((0,) * (1 + len(shape)), zlib.compress(zlib.compress(data, 9), 9))


def never_written(file: h5py.File, name: str, size: int) -> None:
    shape, dtype = file[name].shape[1:], file[name].dtype
    del file[name]
    file.create_dataset(name, (size, *shape), dtype, chunks=(100, *shape), compression="gzip")[:100] = 0


@LIMITED
@pytest.mark.parametrize("replace", [chunk_of_zeros, never_written])
def test_h5_files_that_hold_little(replace: Callable[[h5py.File, str, int], None], tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(200))
    buffer.extend(ted(200, 1))
    path = tmp_path / "c.h5"
    H5StorageCheckpointer().dumps(buffer.storage, path)
    with h5py.File(path, "r+") as file:
        names = list[str]()
        file.visititems(lambda name, held: names.append(name) if isinstance(held, h5py.Dataset) and held.ndim else None)
        names = [name for name in names if name.startswith("traj_")]
    for name in names[:6]:
        with h5py.File(path, "r+") as file:
            replace(file, name, (128 << 20) // max(1, file[name].dtype.itemsize * int(np.prod(file[name].shape[1:]))))
    storage = LazyTensorStorage(200)
    with bounded(MOST), pytest.raises(CheckpointCorrupt):
        H5StorageCheckpointer().loads(storage, path)
    assert len(storage) == 0
