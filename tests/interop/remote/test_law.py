"""One batch over several shards is drawn by the law of one buffer that holds everything."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from interop import PrioritizedSampler, PrioritizedSliceSampler, RandomSampler, SliceSampler
from interop.remote.joining import joined
from interop.remote.shares import ShardContents, allot, rescale, subkeys
from tests.interop.remote.sharded import Sharded, buffers_of, key_of, rows

CAPACITY, ALPHA, BETA, EPS = 40, 0.7, 0.5, 1e-8
BATCH = 4096  # parts of which vary little: a program for each size of them, in steps of 1024, is compiled
SIZES = (7, 40, 25, 0)  # of each shard; the second one was written over


def priorities_of(count: int, seed: int) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, 1.5, count)).astype(np.float32)


def prioritized(beta: float = BETA, **kwargs: Any) -> PrioritizedSampler:
    return PrioritizedSampler(CAPACITY, ALPHA, beta, EPS, **kwargs)


def prioritized_slices() -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(CAPACITY, ALPHA, BETA, EPS, slice_len=2)


class Filled:
    """Shards after overwrites and updates, and by global index what is known of each item."""

    def __init__(self, sampler: Callable[[], Any]) -> None:
        self.sharded = Sharded(len(SIZES), buffers_of(sampler))
        self.numbers = np.full(len(SIZES) * CAPACITY, -1)  # of items, one after the other in a shard; -1 for none
        self.priorities = np.zeros(self.numbers.size)
        self.ends = np.zeros(self.numbers.size, np.bool_)
        for shard, size in zip(self.sharded.shards, SIZES, strict=True):
            for start, count in ((0, size), (size, 12 if size == CAPACITY else 0)):
                if count:
                    self.write(shard, start + 1000 * shard.number, count)
                    self.sharded.shares(6)  # with the priorities that wait
            self.update(shard, np.arange(0, size, 3), seed=99)

    def write(self, shard: Any, start: int, count: int) -> None:
        """Items in trajectories of three, the last of which may go on in the next write."""
        numbers, lengths = np.arange(start, start + count), [3] * (count // 3)
        priority = priorities_of(count, start)
        more = {"priority": torch.from_numpy(priority)} if shard.buffer.sampler.hooks.takes_priorities else {}
        index = shard.call("extend", (rows(numbers, lengths, **more),)).numpy()
        self.numbers[index], self.priorities[index] = numbers, priority
        self.ends[index] = np.isin(np.arange(count), np.cumsum(lengths) - 1)

    def update(self, shard: Any, slots: np.ndarray, seed: int) -> None:
        if slots.size and shard.buffer.sampler.hooks.takes_priorities:
            priority = priorities_of(len(slots), seed + shard.number)
            shard.call("update_priority", (torch.from_numpy(slots), torch.from_numpy(priority)))
            self.priorities[slots + shard.number * CAPACITY] = priority

    def masses(self) -> np.ndarray:
        return np.where(self.numbers >= 0, (self.priorities + EPS) ** ALPHA, 0)

    def trajectories(self, length: int) -> dict[int, list[int]]:
        """Where slices can begin, by the last item of the trajectory: by brute force."""
        at = {int(number): index for index, number in enumerate(self.numbers) if number >= 0}
        found: dict[int, list[int]] = {}
        for first, index in at.items():
            last = first
            while not self.ends[at[last]] and last + 1 in at:
                last += 1
            if last - first + 1 >= length:
                found.setdefault(last, []).append(index)
        return found

    def masses_of_starts(self) -> np.ndarray:
        """What the items weigh that can begin slices of two."""
        starts = np.concatenate(list(self.trajectories(2).values()))
        return np.where(np.isin(np.arange(self.numbers.size), starts), self.masses(), 0)


def assert_frequencies(index: np.ndarray, law: np.ndarray) -> None:
    counts = np.bincount(index, minlength=law.size)
    assert not counts[law == 0].any()
    drawn = law > 0
    assert stats.chisquare(counts[drawn], law[drawn] / law.sum() * counts.sum()).pvalue > 1e-3


def drawn_index(filled: Filled, batch: int, times: int, shares: Any = None) -> np.ndarray:
    """Which items came, by global index, after looking that each one is the item of that index."""
    found = []
    for _ in range(times):
        data, info = filled.sharded.sample(batch, shares)
        index = info["index"][0] if isinstance(info["index"], tuple) else info["index"]
        assert torch.equal(data["x"], torch.from_numpy(filled.numbers)[index])
        assert torch.equal(data["index"].reshape(-1), index)
        found.append(index.numpy())
    return np.concatenate(found)


def test_uniform_over_all_items() -> None:
    filled = Filled(RandomSampler)
    assert_frequencies(drawn_index(filled, BATCH, 3), (filled.numbers >= 0).astype(float))


def test_by_priority_over_all_items() -> None:
    filled = Filled(prioritized)
    masses = filled.masses()
    assert_frequencies(drawn_index(filled, BATCH, 5), masses)
    shares, of_shards = filled.sharded.shares(8), masses.reshape(len(SIZES), -1)
    assert [share.mass for share in shares] == pytest.approx(of_shards.sum(1), rel=1e-6)
    smallest = np.where(of_shards > 0, of_shards, np.inf).min(1)
    assert [share.smallest for share in shares] == pytest.approx(smallest, rel=1e-6)


@pytest.mark.parametrize("shape", [{"num_slices": 64}, {"slice_len": 3}], ids=repr)
def test_slices_of_each_trajectory_equally_often(shape: dict[str, int]) -> None:
    filled = Filled(lambda: SliceSampler(slice_len=3))
    for shard in filled.sharded.shards:
        shard.call("set_sampler", (SliceSampler(**shape),))
    law = np.zeros(filled.numbers.size)
    for starts in filled.trajectories(3).values():
        law[starts] = 1 / len(starts)
    index = drawn_index(filled, 192, 60).reshape(-1, 3)
    assert (np.diff(filled.numbers[index], axis=1) == 1).all()
    assert_frequencies(index[:, 0], law)
    assert all(
        getattr(shard.buffer.sampler, name) == value for shard in filled.sharded.shards for name, value in shape.items()
    )


def test_slices_by_the_priority_of_their_start() -> None:
    filled = Filled(prioritized_slices)
    index = drawn_index(filled, 2 * BATCH, 5).reshape(-1, 2)
    assert (np.diff(filled.numbers[index], axis=1) == 1).all()
    assert_frequencies(index[:, 0], filled.masses_of_starts())


@pytest.mark.parametrize(
    ("sampler", "law", "each"), [(prioritized, Filled.masses, 1), (prioritized_slices, Filled.masses_of_starts, 2)]
)
def test_weights_are_those_of_one_buffer(sampler: Any, law: Any, each: int) -> None:
    filled = Filled(sampler)
    masses = law(filled)
    data, info = filled.sharded.sample(BATCH * each)
    first = np.repeat(data["index"].reshape(-1)[::each].numpy(), each)
    expected = (masses[first] / masses[masses > 0].min()) ** -BETA
    assert torch.equal(data["priority_weight"], info["priority_weight"])
    assert info["priority_weight"].numpy() == pytest.approx(expected, rel=2e-6)


def test_weights_are_exact_for_shares_that_are_older_than_the_draw() -> None:
    filled = Filled(lambda: prioritized(beta=1.0))
    stale, before = filled.sharded.shares(8), filled.masses().reshape(len(SIZES), -1).sum(1)
    for shard in filled.sharded.shards[:3]:
        filled.update(shard, np.arange(0, 7), seed=7)
    filled.write(filled.sharded.shards[0], 500, 9)
    now = filled.masses().reshape(len(SIZES), -1)
    chance = before / before.sum() / np.where(now.sum(1) > 0, now.sum(1), 1)
    law = (now * chance[:, None]).reshape(-1)  # the mixture that is drawn from
    assert_frequencies(drawn_index(filled, BATCH, 5, stale), law)
    weighed, values = [], []
    for _ in range(8):
        _, info = filled.sharded.sample(BATCH, stale)
        weight = info["priority_weight"].numpy().astype(np.float64)
        assert weight * law[info["index"]] == pytest.approx(law[law > 0].min(), rel=1e-5)
        weighed.append(weight)
        values.append(filled.numbers[info["index"]] % 1000)
    weights, items = np.concatenate(weighed), np.concatenate(values)
    mean = (filled.numbers[filled.numbers >= 0] % 1000).mean()
    error = (weights * (items - mean)).std() / weights.mean() / np.sqrt(items.size)
    assert abs((weights * items).sum() / weights.sum() - mean) < 4 * error


def test_weights_reckon_with_the_smallest_mass_of_shards_that_drew_nothing() -> None:
    known = [ShardContents(3, 2.0, 0.5, 0.5), ShardContents(4, 6.0, 0.01, 0.5), ShardContents(0, 0.0, np.inf, 0.5)]
    factors = rescale(known, [ShardContents(5, 4.0, 0.25, 0.5), None, None])
    chances = np.array([2 / 8 * 0.25 / 4, 6 / 8 * 0.01 / 6])
    assert factors is not None
    assert factors[0] == pytest.approx((chances[0] / chances.min()) ** -0.5)
    assert rescale([ShardContents(3, 3.0)], [None]) == 1


@given(st.lists(st.sampled_from([0.0, 1e-30, 1.0, 3e38, 1e15]), min_size=1, max_size=6), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_shard_without_mass_gets_nothing(masses: list[float], seed: int) -> None:
    shares = [ShardContents(5, mass, 1.0) for mass in masses]
    if not any(masses):
        with pytest.raises(RuntimeError, match="non-positive p_sum"):
            allot(shares, 1, key_of(seed))
        return
    counts = allot(shares, 1000, key_of(seed))
    assert counts.sum() == 1000
    assert not counts[np.array(masses) == 0].any()


def test_nothing_to_draw() -> None:
    with pytest.raises(RuntimeError, match=r"Cannot sample from an empty storage"):
        allot([ShardContents(0, 0.0, np.inf)] * 2, 1, key_of(0))
    sharded = Sharded(2, buffers_of(lambda: SliceSampler(slice_len=3)))
    sharded.shards[0].call("extend", (rows(range(2), [2]),))
    with pytest.raises(RuntimeError, match="no shard has a slice of 3 items"):
        sharded.sample(6)


def test_a_part_follows_from_the_key_and_what_is_stored() -> None:
    one, other = Filled(prioritized).sharded.shards[1], Filled(prioritized).sharded.shards[1]
    key, later = subkeys(key_of(3), 2)
    other.buffer.sample(7)  # by its own generator
    drawn = [shard.draw(20, 64, key).info["index"] for shard in (one, other, one)]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], one.draw(20, 64, later).info["index"])


def test_the_order_of_a_batch_does_not_tell_the_shards() -> None:
    filled = Filled(RandomSampler)
    shares, counts = filled.sharded.shares(16), np.zeros((16, len(SIZES)))
    drawn, _ = filled.sharded.parts(16, shares)
    for seed in range(300):
        _, info = joined(shares, drawn, key_of(seed))
        counts[np.arange(16), info["index"].numpy() // CAPACITY] += 1
    assert stats.chi2_contingency(counts[:, counts.sum(0) > 0]).pvalue > 1e-3
