"""What there is no room for is refused before anything is allocated or written."""

import errno
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from fbuf import NotEnoughDiskError, NotEnoughMemoryError, free_memory
from interop import (
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
)


@pytest.fixture
def free(monkeypatch) -> dict[str, int]:
    """How much is free, "cpu" and "disk", as the test says."""
    told = {"cpu": 100 << 20, "disk": 100 << 20}
    monkeypatch.setattr(free_memory, "at", lambda place: told["cpu" if place == "cpu" else "disk"])
    return told


def large(count: int = 3) -> TensorDict:
    """Rows of 1 MiB, of which 110 are asked for."""
    return TensorDict({"x": torch.zeros(count, 1 << 19, dtype=torch.uint8), "y": torch.ones(count, 1 << 17)}, [count])


def standing(buffer: ReplayBuffer) -> tuple[Any, ...]:
    storage: Any = buffer.storage
    counts = len(buffer), buffer.write_count, buffer.writer.cursor, storage.initialized  # type: ignore[attr-defined]
    return (*counts, storage.ring.written, storage.ring.version)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LazyTensorStorage(110),
        lambda: LazyTensorStorage(110, ndim=2),
        lambda: LazyTensorStorage(70, consolidated=True),
        lambda: LazyFrameStorage(110, obs_key="x", stack=1, traj_key="id"),
    ],
    ids=["memory", "lanes", "consolidated", "frames"],
)
@pytest.mark.parametrize("one", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["extend", "add"])
def test_rows_for_which_there_is_no_memory(make, one, free) -> None:
    storage: Any = make()
    sampler = PrioritizedSampler(storage.max_size, 0.6, 0.4)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, writer=RoundRobinWriter())
    data = large()
    if isinstance(storage, LazyFrameStorage):
        data = TensorDict({**data, "id": torch.zeros(3, dtype=torch.int64), "next": large()}, [3])
    if storage.ndim == 2:
        data = data[:, None]
    before = standing(buffer)
    for _ in range(2):
        with pytest.raises(
            NotEnoughMemoryError, match=r"in the memory of cpu, where 100.0 MiB are free: .*'x'"
        ) as told:
            buffer.add(data[0]) if one else buffer.extend(data.transpose(0, 1) if storage.ndim == 2 else data)
        assert "nothing was allocated" in str(told.value)
        assert standing(buffer) == before
        with pytest.raises(NotEnoughMemoryError):
            buffer.plan(data.transpose(0, 1) if storage.ndim == 2 else data).check()
    free["cpu"] = 1 << 30
    if one:
        buffer.add(data[0])
    else:
        buffer.extend(data.transpose(0, 1) if storage.ndim == 2 else data)
    assert len(buffer) == (1 if one else 3)


@pytest.mark.parametrize("shared_init", [False, True])
def test_files_for_which_there_is_no_disk(shared_init, tmp_path, free) -> None:
    folder = tmp_path / "a" / "b"
    storage = LazyMemmapStorage(110, scratch_dir=folder, shared_init=shared_init)
    buffer = TensorDictReplayBuffer(storage=storage)
    before, there = standing(buffer), sorted(tmp_path.rglob("*"))
    with pytest.raises(NotEnoughDiskError, match=r"on the disk of .*where 100.0 MiB are free: .*x.memmap 55.0") as told:
        buffer.extend(large())
    assert isinstance(told.value, OSError) and told.value.errno == errno.ENOSPC
    assert standing(buffer) == before and sorted(tmp_path.rglob("*")) == there
    free["disk"] = 1 << 30
    buffer.extend(large())
    assert len(buffer) == 3


def test_files_in_the_place_of_others_need_room_beside_them(tmp_path, free) -> None:
    first = TensorDictReplayBuffer(storage=LazyMemmapStorage(3, scratch_dir=tmp_path / "a"))
    first.extend(large())
    first.storage.close()  # type: ignore[attr-defined]
    del first
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(110, scratch_dir=tmp_path / "a", existsok=True))
    with pytest.raises(NotEnoughDiskError):
        buffer.extend(large())
    again = LazyMemmapStorage.open(tmp_path / "a")  # what was there is as it was
    assert len(again) == 3 and bool((again[:]["y"] == 1).all())


def test_anonymous_maps_may_be_larger_than_what_there_is(free) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(110))
    with pytest.raises(NotEnoughDiskError):
        buffer.plan(large()).check()
    assert len(buffer.extend(large())) == 3


def test_a_checkpoint_that_there_is_no_memory_for(tmp_path, free) -> None:
    source = TensorDictReplayBuffer(storage=LazyMemmapStorage(110))
    source.extend(large())
    source.dumps(tmp_path / "c")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(110))
    before = standing(buffer)
    with pytest.raises(NotEnoughMemoryError):
        buffer.loads(tmp_path / "c")
    assert standing(buffer) == before
