"""A resized buffer behaves as one of that capacity that got the same newest items."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointMismatch
from interop import (
    CompressedListStorage,
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    Storage,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

OLD, SIZES = 10, (4, 10, 17)
SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "random": lambda n: RandomSampler(),
    "prioritized": lambda n: PrioritizedSampler(n, 0.7, 0.5),
    "highest stored": lambda n: PrioritizedSampler(n, 0.7, 0.5, max_priority_within_buffer=True),
    "without replacement": lambda n: SamplerWithoutReplacement(),
    "consuming": lambda n: ConsumingSampler(2),
    "slices": lambda n: SliceSampler(slice_len=2),
    "slice epochs": lambda n: SliceSamplerWithoutReplacement(slice_len=2),
    "prioritized slices": lambda n: PrioritizedSliceSampler(n, 0.7, 0.5, slice_len=2),
    "staleness": lambda n: StalenessAwareSampler(max_staleness=100),
    "groups": lambda n: PromptGroupSampler(2),
}
STORAGES: dict[str, Callable[[int], Storage]] = {
    "tensors": LazyTensorStorage,
    "maps": LazyMemmapStorage,
    "lists": ListStorage,
    "stacks": LazyStackStorage,
    "compressed": CompressedListStorage,
}


def steps(first: int, count: int) -> TensorDict:
    """Steps of episodes of three, with all entries that samplers look at."""
    t = torch.arange(first, first + count)
    nested = {"done": (t % 3 == 2)[:, None], "reward": t[:, None].float()}
    own = {"t": t, "policy_version": t, "prompt_id": t // 2}
    return TensorDict({**own, "next": TensorDict(nested, [count])}, [count])


def filled(storage: Storage, sampler: Sampler, first: int, count: int) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=4, generator=torch.Generator().manual_seed(0)
    )
    for start in range(first, first + count, 5):
        buffer.extend(steps(start, min(5, first + count - start)))
    return buffer


def draws(buffer: ReplayBuffer, count: int = 6) -> list[list[int]]:
    """What a buffer draws from a known generator."""
    buffer.set_rng(torch.Generator().manual_seed(3))
    buffer.batch_size = 2
    return [buffer.sample()["t"].tolist() for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_it_draws_as_a_buffer_of_that_capacity(name: str, size: int) -> None:
    resized = filled(LazyTensorStorage(OLD), SAMPLERS[name](OLD), 0, 23)
    resized.resize(size)
    kept = min(size, OLD)
    fresh = filled(LazyTensorStorage(size), SAMPLERS[name](size), 23 - kept, kept)
    assert resized.storage.max_size == size and len(resized) == len(fresh)
    for more in (0, 3, 8):  # as it is, and after further writes
        for buffer in (resized, fresh):
            if more:
                buffer.extend(steps(23 + more, more))
        assert resized[:]["t"].tolist() == fresh[:]["t"].tolist()
        assert draws(resized, 2) == draws(fresh, 2)
        for buffer in (resized, fresh):
            if "priorit" in name or "highest" in name:
                buffer.update_priority(torch.arange(3), torch.tensor([5.0, 0.5, 2.0]))
    assert resized.write_count == fresh.write_count + 23 - kept


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", STORAGES)
def test_every_storage_keeps_the_newest_items_in_order(name: str, size: int) -> None:
    pytest.importorskip("zstandard")
    buffer = filled(STORAGES[name](OLD), RandomSampler(), 0, 23)
    buffer.resize(size)
    kept = min(size, OLD)
    assert type(buffer.storage) is type(STORAGES[name](OLD))
    assert buffer[:]["t"].tolist() == list(range(23 - kept, 23))
    buffer.extend(steps(23, 3))
    held = sorted(buffer[:]["t"].tolist())
    assert held == list(range(26 - min(size, kept + 3), 26))
    assert buffer[:]["index"].tolist() == list(range(len(buffer)))


def test_lanes_and_frames_follow() -> None:
    lanes = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=0)
    lanes.extend(torch.arange(24).reshape(8, 3))
    lanes.resize(6)
    assert lanes.storage[:].tolist() == [[18, 19, 20], [21, 22, 23]]
    frames = TensorDictReplayBuffer(storage=LazyFrameStorage(8, obs_key="pixels", stack=2, check=False), batch_size=2)
    pixels = torch.arange(13)[:, None, None].expand(13, 2, 2).to(torch.uint8)
    stacks = torch.stack((pixels[:-1], pixels[1:]), 1)
    done = torch.zeros(11, 1, dtype=torch.bool)
    data = TensorDict({"pixels": stacks[:-1], "next": {"pixels": stacks[1:], "done": done}}, [11])
    frames.extend(data)
    before = frames.storage[:].clone()
    order = (torch.arange(8) + frames.storage.ring.cursor) % 8
    frames.resize(5)
    assert (frames.storage[:]["next", "pixels"] == before[order[3:]]["next", "pixels"]).all()


def test_priorities_uses_and_epochs_follow_their_items() -> None:
    buffer = filled(LazyTensorStorage(OLD), PrioritizedSampler(OLD, 0.7, 0.5), 0, 13)
    values = torch.arange(1.0, 11.0)
    buffer.update_priority(torch.arange(OLD), values)
    of_item = dict(zip(buffer[:]["t"].tolist(), values.tolist(), strict=True))
    buffer.resize(25)
    assert buffer.sampler.priorities.tolist() == [of_item[t] for t in buffer[:]["t"].tolist()]
    assert buffer.sampler.default_priority == 10 and buffer.sampler.max_size == 25

    epoch = filled(LazyTensorStorage(OLD), SamplerWithoutReplacement(), 0, 13)
    drawn = set(epoch.sample()["t"].tolist())
    epoch.resize(7)
    stays = set(range(6, 13))
    epoch.batch_size = 1
    rest = list(itertools.chain(*(epoch.sample()["t"].tolist() for _ in stays - drawn)))
    assert sorted(rest) == sorted(stays - drawn)

    once = filled(LazyTensorStorage(OLD), ConsumingSampler(1), 0, OLD)
    drawn = set(once.sample()["t"].tolist())
    once.resize(OLD + 5)
    assert len(once) == OLD - 4
    once.batch_size = 3
    assert not drawn & {*once.sample()["t"].tolist(), *once.sample()["t"].tolist()}


def test_rows_that_were_written_elsewhere_do_not_become_neighbours() -> None:
    def one(size: int) -> TensorDictReplayBuffer:
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(size), sampler=SliceSampler(slice_len=4), batch_size=4
        )
        row = torch.zeros(9, 1, dtype=torch.bool)
        buffer.extend(TensorDict({"t": torch.arange(9), "next": TensorDict({"done": row}, [9])}, [9]))
        buffer.storage.set(torch.arange(4, 6), buffer.storage.get(torch.arange(4, 6)))
        return buffer

    before, after = one(OLD), one(OLD)
    after.resize(30)
    assert {*before.storage.ring.discontinuities()} <= {*after.storage.ring.discontinuities(), OLD - 1}
    seen = {tuple(after.sample()["t"].tolist()) for _ in range(40)}
    assert seen == {tuple(before.sample()["t"].tolist()) for _ in range(40)}


def test_the_best_items_stay_where_the_writer_ranks_them() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), writer=TensorDictMaxValueWriter(), batch_size=2)
    buffer.extend(steps(0, 12))
    buffer.resize(3)
    assert sorted(buffer[:]["t"].tolist()) == [9, 10, 11]
    buffer.extend(steps(20, 1))
    assert sorted(buffer[:]["t"].tolist()) == [10, 11, 20]


def test_generations_from_before_name_no_row() -> None:
    from interop import TensorDictRoundRobinWriter

    writer = TensorDictRoundRobinWriter(track_generations=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(OLD), writer=writer, batch_size=4)
    buffer.extend(steps(0, 13))
    index = torch.arange(OLD)
    generation = writer.generations_of(index)
    buffer.resize(20)
    patch = TensorDict({"t": torch.full((OLD,), -1)}, [OLD])
    buffer.update_if_present(index=index, generation=generation, patch=patch)
    assert (buffer[:]["t"] >= 0).all()


def test_rows_in_files_go_to_another_folder(tmp_path: Path) -> None:
    buffer = filled(LazyMemmapStorage(OLD, scratch_dir=tmp_path / "old"), PrioritizedSampler(OLD, 0.7, 0.5), 0, 13)
    buffer.update_priority(torch.arange(3), 7.0)
    buffer.resize(6, scratch_dir=tmp_path / "new")
    kept = buffer.sampler.priorities.tolist()
    buffer.extend(steps(13, 1))
    buffer.storage.close()
    assert LazyMemmapStorage.open(tmp_path / "old", "r")[:]["t"].shape == (OLD,)
    again = TensorDictReplayBuffer(
        storage=LazyMemmapStorage.open(tmp_path / "new"), sampler=PrioritizedSampler(6, 0.7, 0.5), batch_size=2
    )
    assert sorted(again[:]["t"].tolist()) == list(range(8, 14))
    assert again.sampler.priorities.tolist()[1:] == kept[1:]


def test_after_an_error_nothing_has_changed(tmp_path: Path) -> None:
    class Own(RandomSampler):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

    def check(buffer: ReplayBuffer, error: type[Exception], match: str, **arguments: Any) -> None:
        parts = buffer.storage, buffer.sampler, buffer.writer
        before = copy.deepcopy(buffer.storage[:]), buffer.write_count, len(buffer)
        with pytest.raises(error, match=match):
            buffer.resize(**{"capacity": 4, **arguments})
        assert parts == (buffer.storage, buffer.sampler, buffer.writer)
        assert (buffer.storage[:] == before[0]).all() and (buffer.write_count, len(buffer)) == before[1:]

    check(filled(LazyTensorStorage(OLD), Own(), 0, 7), TypeError, "build a buffer of that capacity")
    check(filled(LazyTensorStorage(OLD), RandomSampler(), 0, 7), ValueError, "scratch_dir", scratch_dir=tmp_path)
    check(filled(LazyTensorStorage(OLD), RandomSampler(), 0, 7), ValueError, "at least 1", capacity=0)
    there = tmp_path / "there"
    taken = LazyMemmapStorage(3, scratch_dir=there)
    filled(taken, RandomSampler(), 0, 2)
    check(filled(LazyMemmapStorage(OLD), RandomSampler(), 0, 7), RuntimeError, "exists|in use", scratch_dir=there)
    one = filled(LazyTensorStorage(OLD), RandomSampler(), 0, 7)
    other = ReplayBuffer(storage=one.storage)
    check(one, RuntimeError, "other buffers")
    assert len(other) == 7
    dataset = TensorDictReplayBuffer(storage=one.storage, writer=ImmutableDatasetWriter())
    del one, other
    check(dataset, TypeError, "takes no rows")


# ------------------------------------------------------------------ checkpoints of another capacity


@pytest.mark.parametrize("size", (4, 17))
@pytest.mark.parametrize("name", SAMPLERS)
def test_loads_resizes(name: str, size: int, tmp_path: Path) -> None:
    saved = filled(LazyTensorStorage(OLD), SAMPLERS[name](OLD), 0, 23)
    if "priorit" in name or "highest" in name:
        saved.update_priority(torch.arange(3), torch.tensor([5.0, 0.5, 2.0]))
    if name != "groups":
        saved.sample()
    saved.dumps(tmp_path)
    loaded = filled(LazyTensorStorage(size), SAMPLERS[name](size), 100, 3)
    with pytest.raises(CheckpointMismatch):
        loaded.loads(tmp_path)
    assert loaded[:]["t"].tolist() == [100, 101, 102]
    loaded.loads(tmp_path, resize=True)
    saved.resize(size)
    assert loaded[:]["t"].tolist() == saved[:]["t"].tolist() and loaded.write_count == saved.write_count
    assert draws(loaded, 2) == draws(saved, 2)


def test_loads_resizes_lists_and_refuses_ensembles(tmp_path: Path) -> None:
    saved = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=ListStorage(OLD), batch_size=2)
    saved.extend(steps(0, 13))
    saved.update_priority(torch.arange(OLD), torch.arange(1.0, 11.0))
    saved.dumps(tmp_path / "one")
    small = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=ListStorage(5), batch_size=2)
    small.loads(tmp_path / "one", resize=True)
    assert small[:]["t"].tolist() == [8, 9, 10, 11, 12]
    assert np.array_equal(small.sampler.priorities, [9, 10, 1, 2, 3])
    same = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=ListStorage(OLD), batch_size=2)
    same.loads(tmp_path / "one", resize=True)  # of the same capacity it is a plain load
    assert same[:]["t"].tolist() == saved[:]["t"].tolist()
    ensemble = ReplayBufferEnsemble(saved, small)
    ensemble.dumps(tmp_path / "two")
    with pytest.raises(NotImplementedError, match="resize"):
        ensemble.loads(tmp_path / "two", resize=True)
