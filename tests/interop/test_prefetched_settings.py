"""A parameter of a sampler that is set between two batches has the same effect with prefetch and without."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from interop.schedulers import StepScheduler
from tests.faults.signatures import signature

ROWS, BATCH = 48, 8


class Shifted(RandomSampler):
    """A sampler of a user's, with a parameter that only a scheduler tells of."""

    def __init__(self) -> None:
        self.shift = 1.0

    def draw(self, storage: Any, batch_size: int, key: Any) -> tuple[Any, dict[Any, Any]]:
        index, info = super().draw(storage, batch_size, key)
        return (index + int(self.shift)) % len(storage), info


def stale() -> StalenessAwareSampler:
    sampler = StalenessAwareSampler()
    sampler.consumer_version = 9
    return sampler


def groups() -> PromptGroupSampler:
    return PromptGroupSampler(4, group_key="prompt_id", staleness=stale())


SAMPLERS: dict[str, Callable[[], Any]] = {
    "prioritized": lambda: PrioritizedSampler(ROWS, 0.7, 0.4),
    "prioritized slices": lambda: PrioritizedSliceSampler(ROWS, 0.7, 0.4, slice_len=4, traj_key="episode"),
    "slices": lambda: SliceSampler(slice_len=4, traj_key="episode", strict_length=False),
    "slices once": lambda: SliceSamplerWithoutReplacement(slice_len=4, traj_key="episode"),
    "stale": stale,
    "groups": groups,
    "of a user": Shifted,
}


def later(sampler: Any, name: str, value: Any) -> None:
    setattr(sampler, name, value)


def stepped(make: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda sampler: make(sampler).step()


CHANGES: list[tuple[str, str, Callable[[Any], None]]] = [
    ("prioritized", "alpha", lambda each: later(each, "alpha", 0.1)),
    ("prioritized", "beta", lambda each: later(each, "beta", 1.0)),
    ("prioritized", "beta by a scheduler", stepped(lambda each: StepScheduler(each, "beta", gamma=2.0, n_steps=1))),
    ("prioritized", "alpha by a scheduler", stepped(lambda each: StepScheduler(each, "alpha", gamma=0.1, n_steps=1))),
    ("prioritized slices", "beta", lambda each: later(each, "beta", 1.0)),
    ("prioritized slices", "alpha", lambda each: later(each, "alpha", 0.1)),
    ("slices", "slice_len", lambda each: later(each, "slice_len", 2)),
    ("slices", "span", lambda each: later(each, "span", (0, 1))),
    ("slices once", "slice_len", lambda each: later(each, "slice_len", 2)),
    ("stale", "consumer_version", lambda each: later(each, "consumer_version", 30)),
    ("stale", "increment", lambda each: each.increment_consumer_version()),
    ("stale", "max_staleness", lambda each: later(each, "max_staleness", 4)),
    (
        "stale",
        "staleness_weight_fn",
        lambda each: later(each, "staleness_weight_fn", lambda staleness: staleness * 1.0 + 1),
    ),
    ("groups", "consumer_version", lambda each: later(each.staleness, "consumer_version", 30)),
    ("of a user", "shift", stepped(lambda each: StepScheduler(each, "shift", gamma=3.0, n_steps=1))),
]


def filled(sampler: Any, prefetch: int | None, seed: int = 0) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(ROWS),
        sampler=sampler,
        batch_size=BATCH,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(seed),
    )
    ids = torch.arange(ROWS)
    buffer.extend(
        TensorDict({"id": ids, "episode": ids // 6, "prompt_id": ids // 4, "policy_version": ids // 6}, [ROWS])
    )
    if sampler.hooks.takes_priorities:
        buffer.update_priority(ids, 0.1 + (ids % 7).float())
    return buffer


def seen(sampler: str, change: Callable[[Any], None], prefetch: int | None) -> list[str]:
    """Digests of the batches before and after the change."""
    buffer = filled(SAMPLERS[sampler](), prefetch)
    found = [signature(buffer.sample(return_info=True)) for _ in range(3)]
    change(buffer.sampler)
    return found + [signature(buffer.sample(return_info=True)) for _ in range(4)]


@pytest.mark.parametrize(("sampler", "name", "change"), CHANGES, ids=[f"{one}-{name}" for one, name, _ in CHANGES])
def test_a_parameter_reaches_the_next_batch_with_prefetch_too(
    sampler: str, name: str, change: Callable[[Any], None]
) -> None:
    plain = seen(sampler, change, None)
    assert seen(sampler, change, 3) == plain
    assert plain[3:] != seen(sampler, lambda each: None, None)[3:]  # it has an effect


def test_the_choice_of_members_reaches_the_next_batch_with_prefetch_too() -> None:
    def drawn(prefetch: int | None) -> list[list[int]]:
        members = [filled(RandomSampler(), None, seed) for seed in range(2)]
        ensemble = ReplayBufferEnsemble(
            *members, p=[0.5, 0.5], batch_size=BATCH, prefetch=prefetch, generator=torch.Generator().manual_seed(1)
        )
        found = [ensemble.sample(return_info=True)[1]["index", "buffer_ids"].flatten().tolist() for _ in range(3)]
        ensemble.sampler.p = [1.0, 0.0]
        return found + [
            ensemble.sample(return_info=True)[1]["index", "buffer_ids"].flatten().tolist() for _ in range(4)
        ]

    assert drawn(3) == drawn(None)
    assert all(set(each) == {0} for each in drawn(3)[3:])
