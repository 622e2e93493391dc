"""StalenessAwareSampler."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from interop.samplers.staleness import Weighed
from tests.interop.rows import ALL_STORAGES, check_same, refused


def of(versions, **entries):
    versions = torch.as_tensor(versions)
    return TensorDict({"policy_version": versions, "id": torch.arange(len(versions)), **entries}, [len(versions)])


def buffer_of(versions, storage=LazyTensorStorage, seed=0, **choices):
    sampler = StalenessAwareSampler(**choices)
    generator = torch.Generator().manual_seed(seed)
    buffer = TensorDictReplayBuffer(storage=storage(32), sampler=sampler, generator=generator)
    buffer.extend(of(versions))
    return buffer, sampler


def known(weights):
    weights = np.asarray(weights, float)
    return Weighed(weights, np.cumsum(weights), np.flatnonzero(weights))


@pytest.mark.parametrize("storage", ALL_STORAGES)
def test_a_batch_tells_how_stale_it_is(storage):
    buffer, sampler = buffer_of([0, 3, 5, 7, 4], ALL_STORAGES[storage])
    sampler.consumer_version = 7
    batch, info = buffer.sample(5, return_info=True)
    assert sorted(batch["index"].tolist()) == [0, 1, 2, 3, 4]
    assert set(info) == {"index", "staleness"} and info["index"].dtype == torch.int64
    check_same(batch["staleness"], 7 - batch["policy_version"].float())
    check_same(batch["id"], batch["index"])


def test_what_is_too_stale_is_never_drawn():
    buffer, sampler = buffer_of([0, 1, 2, 3, 4, 4], max_staleness=2)
    sampler.consumer_version = 4
    assert set(buffer.sample(300)["index"].tolist()) == {2, 3, 4, 5}
    sampler.max_staleness = 0
    assert set(buffer.sample(300)["index"].tolist()) == {4, 5}
    sampler.max_staleness = -1
    assert set(buffer.sample(300)["index"].tolist()) == {0, 1, 2, 3, 4, 5}
    sampler.max_staleness = 1
    sampler.increment_consumer_version()
    assert sampler.consumer_version == 5 and set(buffer.sample(300)["index"].tolist()) == {4, 5}
    sampler.consumer_version = 9
    with refused(buffer, RuntimeError, "max_staleness=1"):
        buffer.sample(2)


def test_an_item_weighs_less_the_staler_it_is():
    buffer, sampler = buffer_of([0, 2, 3, 4, 4])
    sampler.consumer_version = 4
    counts = np.bincount(np.concatenate([buffer.sample(1)["index"].numpy() for _ in range(4000)]), minlength=5)
    weights = 1 / (4 - np.array([0, 2, 3, 4, 4]) + 1)
    assert stats.chisquare(counts, weights / weights.sum() * 4000).pvalue > 1e-4
    counts = np.bincount(buffer.sample(20000)["index"].numpy(), minlength=5)  # more than there are: with replacement
    assert stats.chisquare(counts, weights / weights.sum() * 20000).pvalue > 1e-4


@pytest.mark.parametrize(("weights", "count"), [([1, 2, 3, 0, 4], 2), ([5, 1] + [0.5] * 10, 3), ([1e20, 1, 2], 3)])
def test_draws_are_one_after_the_other_by_the_weights_of_those_left(weights, count):
    held, rng = known(weights), np.random.default_rng(7)
    heavy = [place for place, weight in enumerate(weights) if weight]
    chances = {}
    for order in itertools.permutations(heavy, count):
        chance, left = 1.0, float(sum(sorted(weights)))
        for place in order:
            chance *= weights[place] / left
            left = sum(weights[other] for other in heavy if other not in order[: order.index(place) + 1])
        chances[order] = chance
    assert sum(chances.values()) == pytest.approx(1)
    rounds = 6000
    found = dict.fromkeys(chances, 0)
    for _ in range(rounds):
        found[tuple(held.draw(count, rng).tolist())] += 1
    often = [order for order in chances if chances[order] * rounds >= 5]
    rest = rounds - sum(found[order] for order in often), rounds - sum(chances[order] for order in often) * rounds
    counts, wanted = [found[order] for order in often], [chances[order] * rounds for order in often]
    if rest[1] > 5:
        counts, wanted = [*counts, rest[0]], [*wanted, rest[1]]
    assert stats.chisquare(counts, np.array(wanted) * sum(counts) / sum(wanted)).pvalue > 1e-4


@pytest.mark.parametrize("shape", [(), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bfloat16])
def test_versions_of_any_number_type(shape, dtype):
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), sampler=StalenessAwareSampler(version_key=("meta", "version")))
    versions = torch.tensor([1, 2, 4]).to(dtype).reshape(3, *shape)
    buffer.extend(TensorDict({"meta": TensorDict({"version": versions}, [3]), "id": torch.arange(3)}, [3]))
    buffer.sampler.consumer_version = 4
    batch, info = buffer.sample(3, return_info=True)
    check_same(info["staleness"], torch.tensor([3.0, 2.0, 0.0])[batch["id"]])


def test_every_change_counts_at_the_next_draw():
    buffer, sampler = buffer_of([0] * 32, max_staleness=0)
    twin = ReplayBuffer(storage=buffer.storage)
    sampler.consumer_version = 1
    with pytest.raises(RuntimeError):
        buffer.sample(1)
    buffer.extend(of([1, 1]))
    assert set(buffer.sample(50)["index"].tolist()) == {0, 1}
    buffer.add(of([1])[0])
    assert set(buffer.sample(50)["index"].tolist()) == {0, 1, 2}
    twin.extend(of([1]).set("index", torch.zeros(1, dtype=torch.int64)))
    twin.extend(of([0]).set("index", torch.zeros(1, dtype=torch.int64)))
    assert set(buffer.sample(50)["index"].tolist()) == {0, 1, 2, 3}
    buffer[5] = of([1])[0]
    assert set(buffer.sample(50)["index"].tolist()) == {0, 1, 2, 3, 5}
    twin.set_at_("policy_version", torch.tensor([1]), torch.tensor([6]))
    assert set(buffer.sample(50)["index"].tolist()) == {0, 1, 2, 3, 5, 6}
    buffer["policy_version"] = torch.ones(32, dtype=torch.int64)
    assert len(set(buffer.sample(32)["index"].tolist())) == 32
    buffer.storage.set(torch.tensor([9]), of([0]).set("index", torch.tensor([9])), set_cursor=False)
    assert 9 not in buffer.sample(50)["index"]
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample(1)
    buffer.extend(of([1, 0]))
    assert set(buffer.sample(50)["index"].tolist()) == {0}


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_items_without_one_number_as_a_version_are_refused(storage):
    for data, error in (
        (of([1, 2]).exclude("policy_version"), KeyError),
        (of([[1, 2], [1, 2]]), ValueError),
        (of([True, False]), TypeError),
        (of([1.0, float("inf")]), ValueError),
    ):
        buffer = TensorDictReplayBuffer(storage=storage(4), sampler=StalenessAwareSampler())
        buffer.extend(data)
        with refused(buffer, error, "version"):
            buffer.sample(1)


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        (lambda s: s * float("nan"), ValueError),
        (lambda s: 1.0 / s, ValueError),
        (lambda s: torch.full(s.shape, 1e308, dtype=torch.double), ValueError),
        (lambda s: torch.ones(3), ValueError),
        (lambda s: torch.zeros_like(s), RuntimeError),
    ],
)
def test_weights_that_cannot_be_drawn_from_are_refused(weights, error):
    buffer, _ = buffer_of([0, 0], staleness_weight_fn=weights)
    with refused(buffer, error):
        buffer.sample(1)
