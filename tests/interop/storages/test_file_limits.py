"""A limit on the size of files is an OSError of the write that it stops, which can be tried again."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tensordict import TensorDict

from interop import LazyFrameStorage, LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from interop.shared.shared_int import in_shared_memory

CAPACITY, LIMIT = 1000, 1 << 16
KINDS = {
    "anonymous": lambda place: LazyMemmapStorage(CAPACITY),
    "files": lambda place: LazyMemmapStorage(CAPACITY, scratch_dir=place),
    "shared_init": lambda place: LazyTensorStorage(CAPACITY, shared_init=True),
    "anonymous shared_init": lambda place: LazyMemmapStorage(CAPACITY, shared_init=True),
    "files shared_init": lambda place: LazyMemmapStorage(CAPACITY, scratch_dir=place, shared_init=True),
}


@contextmanager
def limited() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_write(kind, emptied, tmp_path):
    buffer = TensorDictReplayBuffer(storage=KINDS[kind](tmp_path / "held"), batch_size=4)
    if emptied:
        buffer.extend(TensorDict({"other": torch.arange(4)}, [4]))
        buffer.empty()
    rows = TensorDict({"id": torch.arange(4), "obs": torch.ones(4, 100)}, [4])
    for _ in range(2):
        with limited(), pytest.raises(OSError) as raised:
            buffer.extend(rows)
        assert raised.value.errno == errno.EFBIG and len(buffer) == buffer.write_count == 0
    buffer.extend(rows)
    assert buffer[:]["id"].tolist() == [0, 1, 2, 3]


def frames() -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyFrameStorage(CAPACITY, obs_key="obs", stack=1), batch_size=4)
    after = TensorDict({"obs": torch.ones(4, 100), "done": torch.zeros(4, 1, dtype=torch.bool)}, [4])
    buffer.extend(TensorDict({"obs": torch.ones(4, 100), "next": after}, [4]))
    return buffer


def tensors() -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=4)
    buffer.extend(TensorDict({"obs": torch.ones(4, 100)}, [4]))
    return buffer


@pytest.mark.parametrize("make", [tensors, frames])
def test_memory_that_moves_to_where_processes_share_it(make):
    buffer = make()
    with limited(), pytest.raises(OSError, match="/dev/shm") as raised:
        buffer.storage.rows.share()
    assert raised.value.errno == errno.EFBIG
    assert (buffer[:]["obs"] == 1).all() and len(buffer) == 4
    buffer.storage.rows.share()
    assert buffer.storage.rows.shared and (buffer.sample()["obs"] == 1).all()


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError):
        in_shared_memory(torch.zeros(3, device="meta"))
