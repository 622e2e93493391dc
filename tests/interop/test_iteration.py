"""Iteration of datasets and ensembles ends: with the epoch of the sampler, or after as many items as are stored."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    ConsumingSampler,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from interop.datasets import MinariExperienceReplay, merged
from tests.interop.datasets.sources_law import FORMATS, play

MOST = 60


def rows(count: int, first: int = 0) -> TensorDict:
    done = (torch.arange(count) % 4 == 3).unsqueeze(1)
    return TensorDict({"x": torch.arange(count) + first, "next": {"done": done}}, [count])


def member(count: int, sampler: Any = None, first: int = 0) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(count), sampler=sampler, batch_size=4)
    rb.extend(rows(count, first))
    return rb


def iterated(buffer: Any) -> list[Any]:
    return list(itertools.islice(buffer, MOST))


def stepped(buffer: Any) -> list[Any]:
    """The batches of `next()`, up to its first None."""
    return list(itertools.islice(iter(buffer.next, None), MOST))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Files of a Minari dataset of 29 rows."""
    files = tmp_path_factory.mktemp("iterated")
    form = next(form for form in FORMATS if form.name == "minari_hdf5")
    form.write(files, play(np.random.default_rng(0), (5, 4, 8, 12), form.ends))
    return files


SAMPLERS: list[tuple[Callable[[], Any], int]] = [
    (lambda: None, 8),
    (RandomSampler, 8),
    (lambda: PrioritizedSampler(32, 0.7, 0.9), 8),
    (lambda: SliceSampler(slice_len=2, strict_length=False), 8),
    (SamplerWithoutReplacement, 8),
    (lambda: SamplerWithoutReplacement(drop_last=True), 7),
    (lambda: SliceSamplerWithoutReplacement(slice_len=2), 2),
]


@pytest.mark.parametrize("run", [iterated, stepped])
@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize(("sampler", "batches"), SAMPLERS)
def test_a_dataset(folder, run, prefetch, sampler, batches):
    data = MinariExperienceReplay(
        "toy/law-v0", 4, root=folder / "root", from_local=folder, sampler=sampler(), prefetch=prefetch
    )
    for _ in range(3):
        found = run(data)
        assert len(found) == batches
        if isinstance(data.sampler, SamplerWithoutReplacement):
            index = torch.cat([batch["index"].reshape(-1) for batch in found]).tolist()
            assert len({*index}) == len(index)
    assert len(data.sample()) == 4


def test_parts_and_breaks(folder):
    data = MinariExperienceReplay("toy/law-v0", 3, root=folder / "root", from_local=folder, split_trajs=True)
    assert [len(batch) for batch in iterated(data)] == [3, 3]
    for _ in range(5):
        for _batch in data:
            break
    assert len(iterated(data)) == 2


@pytest.mark.parametrize("run", [iterated, stepped])
@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("samplers", [(None, None), (SamplerWithoutReplacement, RandomSampler)])
@pytest.mark.parametrize("options", [{"p": [0.9, 0.1]}, {"num_buffer_sampled": 2}, {"sample_from_all": True}], ids=str)
def test_an_ensemble(run, prefetch, samplers, options):
    members = [member(count, sampler and sampler()) for count, sampler in zip((10, 21), samplers, strict=True)]
    both = ReplayBufferEnsemble(*members, batch_size=4, prefetch=prefetch, **options)
    for _ in range(2):
        assert len(run(both)) == 8
    members[0].extend(rows(10)[:3])  # of a full storage
    assert len(run(both)) == 8


def test_a_growing_ensemble_and_merged_datasets(folder):
    growing = TensorDictReplayBuffer(storage=LazyTensorStorage(100))
    growing.extend(rows(10))
    both = ReplayBufferEnsemble(member(10), growing, batch_size=10)
    assert len(iterated(both)) == 2
    growing.extend(rows(31))
    assert len(iterated(both)) == 6
    data = MinariExperienceReplay("toy/law-v0", root=folder / "root", from_local=folder)
    assert len(iterated(merged(data, data, batch_size=2))) == 29


def test_a_buffer_that_is_still_written_goes_on():
    """There the draws of a sampler without epochs have no natural end."""
    assert len(iterated(member(8))) == len(stepped(member(8))) == MOST


def test_a_sampler_of_two_epochs_a_row_is_not_cut():
    rb = member(8, ConsumingSampler(2))
    assert sum(len(batch) for batch in iterated(rb)) == 16
