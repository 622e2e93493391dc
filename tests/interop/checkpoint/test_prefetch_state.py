"""Prefetched batches are no state: a buffer drops them when it is saved or copied, and draws them again, here as there."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from interop import (
    LazyTensorStorage,
    PrioritizedSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from tests.interop.checkpoint.resuming import same
from tests.interop.pair_history import items


class Own(Sampler):
    """Of the user's: it has to be asked, with nothing but its generator to make a difference."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        return torch.randint(len(storage), (batch_size,), generator=self._rng), {"drawn": torch.ones(batch_size)}


class Doubled(RandomSampler):
    """One of the library's, of which the user changed how it draws."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        return super().sample(storage, batch_size)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "prioritized": lambda: PrioritizedSampler(24, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2, strict_length=False),
    "staleness": StalenessAwareSampler,
    "groups": lambda: PromptGroupSampler(2, group_key="episode"),
    "own": Own,
    "doubled": Doubled,
}


def made(sampler: str, seed: int, depth: int | None = 3) -> Any:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(24),
        sampler=SAMPLERS[sampler](),
        batch_size=4,
        prefetch=depth,
        generator=torch.Generator().manual_seed(seed),
    )
    buffer.extend(items(np.arange(24), False))
    return buffer


def drawn(buffer: Any, count: int) -> list[Any]:
    return [buffer.sample().clone() for _ in range(count)]


def settled(buffer: Any) -> None:
    for pending in list(buffer.prefetch_queue._queue):
        pending.task.wait()


def loaded(buffer: Any, make: Callable[[int], Any], path: Path) -> Any:
    buffer.dumps(path)
    twin = make(99)
    drawn(twin, 2)  # to be dropped
    twin.loads(path)
    return twin


WAYS: dict[str, Callable[[Any, str, Path], Any]] = {
    "dumps": lambda buffer, sampler, path: loaded(buffer, lambda seed: made(sampler, seed), path / "c"),
    "deepcopy": lambda buffer, sampler, path: copy.deepcopy(buffer),
    "pickle": lambda buffer, sampler, path: pickle.loads(pickle.dumps(buffer)),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("way", WAYS)
def test_what_waits_is_drawn_again_here_and_there(sampler: str, way: str, tmp_path: Path) -> None:
    buffer = made(sampler, 0)
    drawn(buffer, 2)
    settled(buffer)
    buffer.set_at_("x", torch.tensor([500]), torch.tensor([3]))  # after the batches that wait were read
    twin = WAYS[way](buffer, sampler, tmp_path)
    assert len(twin.prefetch_queue) == len(buffer.prefetch_queue) == 0
    assert same(drawn(buffer, 2), drawn(twin, 2))
    for each in (buffer, twin):
        settled(each)
        each.extend(items(np.arange(100, 103), False))
        settled(each)
    assert same(drawn(buffer, 9), drawn(twin, 9))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_saving_and_prefetch_change_no_batch(sampler: str, tmp_path: Path) -> None:
    plain, saved = made(sampler, 0, None), made(sampler, 0)
    for turn in range(1, 12):
        assert same(plain.sample(), saved.sample())
        if turn % 2:
            saved.dumps(tmp_path / "c")


@pytest.mark.parametrize("way", ["file", "dict"])
def test_a_sampler_that_is_saved_by_itself_has_what_waits_remain(way: str, tmp_path: Path) -> None:
    buffer, twin = made("without replacement", 0), made("without replacement", 0, None)
    first = drawn(buffer, 1)
    if way == "file":
        buffer.sampler.dumps(tmp_path / "c")
        twin.sampler.loads(tmp_path / "c")
    else:
        twin.sampler.load_state_dict(buffer.sampler.state_dict())
    for each in (buffer, twin):
        assert sorted(torch.cat([batch["x"] for batch in (*first, *each)]).tolist()) == list(range(24))
        assert each.sampler.ran_out


# ------------------------------------------------------------------ ensembles


def ensemble(seed: int, depth: int | None = 3) -> Any:
    kinds = [RandomSampler(), SamplerWithoutReplacement(), PrioritizedSampler(24, 0.7, 0.5), Own()]
    members = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(24), sampler=kind, batch_size=2, prefetch=place or None)
        for place, kind in enumerate(kinds)
    ]
    whole = ReplayBufferEnsemble(
        *members, batch_size=12, prefetch=depth, num_buffer_sampled=6, generator=torch.Generator().manual_seed(seed)
    )
    for place, member in enumerate(members):
        member.extend(items(np.arange(16 + 2 * place), False).select("x", "obs"))
    return whole


@pytest.mark.parametrize("way", ["dumps", "pickle"])
def test_an_ensemble_goes_on_with_what_it_had_drawn_ahead(way: str, tmp_path: Path) -> None:
    whole = ensemble(0)
    [whole.sample() for _ in range(2)]
    [whole[1].sample(), whole[3].sample()]
    if way == "dumps":
        whole.dumps(tmp_path / "c")
        twin = ensemble(7)
        twin.loads(tmp_path / "c")
    else:
        twin = copy.deepcopy(whole)
    for _ in range(6):
        one, other = whole.sample(), twin.sample()
        assert torch.equal(one["x"], other["x"]) and torch.equal(one["index", "index"], other["index", "index"])
    for place in (1, 2, 3):
        assert same(drawn(whole[place], 5), drawn(twin[place], 5))
