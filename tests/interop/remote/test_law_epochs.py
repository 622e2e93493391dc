"""Batches without replacement over several shards: epochs over the union of what they hold."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from interop import LazyTensorStorage, SamplerWithoutReplacement, SliceSamplerWithoutReplacement, TensorDictReplayBuffer
from interop.buffers.requested_batch import drawn_by_key
from interop.remote.epochs import EpochPlan
from interop.samplers.shares import ShardContents
from tests.interop.remote.sharded import Sharded, buffers_of, key_of, rows

STEP = st.one_of(
    st.tuples(st.just("extend"), st.integers(0, 2), st.integers(1, 9)), st.tuples(st.just("sample"), st.integers(1, 12))
)


def sharded_of(sizes: tuple[int, ...], **kwargs: Any) -> Sharded:
    sharded = Sharded(len(sizes), buffers_of(lambda: SamplerWithoutReplacement(**kwargs)))
    for shard, size in zip(sharded.shards, sizes, strict=True):
        if size:
            shard.call("extend", (rows(np.arange(size) + 1000 * shard.number),))
    return sharded


def shares_of(sizes: tuple[int, ...], **kwargs: Any) -> list[ShardContents]:
    return [ShardContents(size, float(size), 1.0, in_epochs=True, **kwargs) for size in sizes]


@given(st.lists(STEP, max_size=25), st.booleans())
@settings(max_examples=30, deadline=None)
def test_epochs_are_those_of_one_buffer_and_no_item_comes_twice(steps: list[Any], drop_last: bool) -> None:
    sharded, seen = sharded_of((0, 0, 0), drop_last=drop_last), set[int]()
    one = TensorDictReplayBuffer(
        storage=LazyTensorStorage(120), sampler=SamplerWithoutReplacement(drop_last), batch_size=1
    )
    for name, *given_ in steps:
        if name == "extend":
            shard, count = given_
            room = sharded.capacity - len(sharded.shards[shard].buffer)
            if room:
                new = rows(np.arange(min(count, room)) + 1000 * shard)
                sharded.shards[shard].call("extend", (new,))
                one.extend(new)
                seen.clear()
            continue
        try:
            expected = drawn_by_key(one, given_[0], key_of(0))[1]["index"].numel()
        except (RuntimeError, ValueError) as error:
            with pytest.raises(type(error), match=str(error)[:20]):
                sharded.sample(given_[0])
            continue
        index = sharded.sample(given_[0])[1]["index"].tolist()
        assert len(index) == len(set(index)) == expected
        if len(seen) + len(index) > len(one):
            seen.clear()
        if drop_last and seen.intersection(index):
            seen.clear()  # what was left for too small a batch is left out
        assert not seen.intersection(index)
        seen.update(index)


@pytest.mark.parametrize("drop_last", [False, True])
def test_every_item_once_an_epoch(drop_last: bool) -> None:
    sharded = sharded_of((7, 40, 0, 16), drop_last=drop_last)
    for _ in range(3):
        index = [sharded.sample(10)[1]["index"] for _ in range(6 if drop_last else 7)]
        assert [len(each) for each in index] == [10] * 6 + [3] * (not drop_last)
        assert torch.cat(index).unique().numel() == (60 if drop_last else 63)


def test_the_first_batches_are_uniform() -> None:
    plan, counts = EpochPlan(), np.zeros(30)
    for seed in range(400):
        found = plan.plan(shares_of((4, 16, 10)), 9, key_of(seed))
        for parts, begin in zip(found.parts, (0, 4, 20), strict=True):
            if parts is not None:
                np.add.at(counts, parts.positions + begin, 1)
        plan.restart()
    assert stats.chisquare(counts).pvalue > 1e-3


def test_parts_of_several_batches_may_be_drawn_in_any_order() -> None:
    sharded = sharded_of((9, 21))
    shares = sharded.shares(10)
    plans = [sharded.plans.plan(shares, 10, key_of(seed)) for seed in range(6)]  # two epochs
    assert [plan.ran_out for plan in plans] == [False, False, True] * 2
    found: list[list[int]] = [[], []]
    for number in (4, 1, 5, 0, 3, 2):
        for shard, count, part in zip(sharded.shards, plans[number].counts, plans[number].parts, strict=True):
            if count:
                found[number // 3] += shard.draw(int(count), 10, key_of(number), part).info["index"].tolist()
    assert [sorted(each) for each in found] == [[*range(9), *range(40, 61)]] * 2


@pytest.mark.parametrize("change", ["units move to another shard", "version", "restart"])
def test_what_begins_an_epoch(change: str) -> None:
    plan = EpochPlan()
    plan.plan(shares_of((5, 8)), 10, key_of(0))
    shares = shares_of((6, 7) if change == "units move to another shard" else (5, 8), version=int(change == "version"))
    if change == "restart":
        plan.restart()
    assert plan.plan(shares, 10, key_of(1)).counts.sum() == 10  # of 13: three would be left
    assert plan.plan(shares, 10, key_of(1)).ran_out


def test_slices_of_each_trajectory_once_an_epoch() -> None:
    sharded = Sharded(3, buffers_of(lambda: SliceSamplerWithoutReplacement(num_slices=4)))
    for shard, count in zip(sharded.shards, (3, 10, 0), strict=True):
        if count:
            shard.call("extend", (rows(np.arange(3 * count) + 1000 * shard.number, [3] * count),))
    for epoch in range(3):
        found = [sharded.sample(8)[0]["x"].reshape(-1, 2) for _ in range(4)]
        assert [len(each) for each in found] == [4, 4, 4, 1]
        x = torch.cat(found)
        assert (x[:, 1] - x[:, 0] == 1).all()
        assert sorted((x[:, 0] % 1000 // 3 + 100 * (x[:, 0] // 1000)).tolist()) == [*range(3), *range(100, 110)], epoch
    sharded.sample(8)
    sharded.shards[1].call("extend", (rows(np.arange(1030, 1044), [3] * 4),))  # the oldest ones are written over
    x = torch.cat([sharded.sample(8)[0]["x"].reshape(-1, 2) for _ in range(4)])[:, 0]
    assert (x % 1000 // 3 + 100 * (x // 1000)).unique().numel() == len(x)


def test_a_shard_that_changed_after_the_plan() -> None:
    sharded = Sharded(2, buffers_of(lambda: SliceSamplerWithoutReplacement(slice_len=2)))
    for shard in sharded.shards:
        shard.call("extend", (rows(np.arange(12) + 1000 * shard.number, [3] * 4),))
    plan = sharded.plans.plan(sharded.shares(16), 8, key_of(0))
    sharded.shards[1].call("extend", (rows(np.arange(1012, 1018), [3] * 2),))
    drawn = sharded.shards[1].draw(4, 16, key_of(1), plan.parts[1])
    assert (drawn.data["x"][::2] % 1000 // 3).unique().numel() == 4
    sharded.shards[1].call("empty")
    with pytest.raises(RuntimeError, match=r"4 units were planned, the shard has 0.*emptied"):
        sharded.shards[1].draw(4, 16, key_of(2), plan.parts[1])
