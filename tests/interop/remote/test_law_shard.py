"""A shard: what may be called on it, and what waits while it is held."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interop import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sequence,
    SliceSampler,
    TensorDictReplayBuffer,
)
from interop.remote.places import to_local
from interop.remote.shard import READS, WRITES, Shard
from tests.interop.remote.sharded import Sharded, buffers_of, key_of, rows


def test_writes_and_draws_wait_while_a_shard_is_held() -> None:
    shard = Shard(1, 2, buffers_of(RandomSampler))
    shard.call("extend", (rows(range(5)),))
    shard.hold()
    with pytest.raises(RuntimeError, match=r"shard 1 was not free within 0\.01 s"):
        shard.hold(0.01)
    done: list[str] = []
    calls: dict[str, Callable[[], Any]] = {
        "extend": lambda: shard.call("extend", (rows(range(3)),)),
        "draw": lambda: shard.draw(2, 2, key_of(0)),
        "share": lambda: shard.share(2),
    }
    threads = [threading.Thread(target=lambda name=name: (calls[name](), done.append(name))) for name in calls]
    for thread in threads:
        thread.start()
    assert shard.call("__len__") == 5
    assert shard.call("__getitem__", (slice(None),))["x"].tolist() == [*range(5)]
    assert shard.call("write_count") == 5
    for thread in threads:
        thread.join(0.05)
    assert not done
    shard.release()
    for thread in threads:
        thread.join(20)
    assert sorted(done) == sorted(calls)
    with pytest.raises(RuntimeError, match="shard 1 is not held"):
        shard.release()


def test_every_name_is_a_name_of_a_buffer_and_no_other_can_be_called() -> None:
    shard = Shard(0, 1, buffers_of(RandomSampler))
    assert all(hasattr(shard.buffer, name) for name in READS | WRITES)
    assert shard.call("append_transform", (lambda data: data,)) is None
    for name in ("sample", "set_rng", "_storage", "prefetch"):
        with pytest.raises(AttributeError, match=f"a shard has no {name}"):
            shard.call(name)


@pytest.mark.parametrize("ndim", [1, 2])
def test_priorities_go_home_by_the_index_of_samples(ndim: int) -> None:
    def make() -> TensorDictReplayBuffer:
        storage = LazyTensorStorage(12, ndim=ndim)
        return TensorDictReplayBuffer(
            storage=storage, sampler=PrioritizedSampler(12, 1.0, 0.5), priority_key="p", dim_extend=0
        )

    sharded = Sharded(3, make)
    for shard in sharded.shards:
        new = rows(torch.arange(12) + 12 * shard.number)
        index = shard.call("extend", (new.reshape(6, 2) if ndim == 2 else new,))
        assert index.reshape(-1, ndim)[0].tolist() == [12 * shard.number, 0][:ndim]
    data, info = sharded.sample(60)
    data["p"] = data["x"].float() + 1
    index = info["index"] if ndim == 1 else torch.stack(info["index"], -1)
    assert torch.equal(index, data["index"])
    for shard, (at, mine) in zip(sharded.shards, to_local(data["index"], 3, 12), strict=True):
        part = data[at].set("index", mine)
        shard.call("update_tensordict_priority", (part,))
        sampler: Any = shard.buffer.sampler
        expected = torch.ones(12)
        expected[part["x"] - 12 * shard.number] = part["p"]
        assert torch.equal(sampler.priorities, expected)


STEP = st.tuples(st.integers(0, 2), st.integers(1, 5), st.one_of(st.none(), st.floats(0, 50, width=32)))


@given(st.lists(STEP, max_size=8))
@settings(max_examples=30, deadline=None)
def test_new_items_get_the_highest_priority_that_a_client_has_seen_in_any_shard(steps: list[Any]) -> None:
    sharded = Sharded(3, buffers_of(lambda: PrioritizedSampler(40, 0.7, 0.5)))
    one, highest = PrioritizedSampler(120, 0.7, 0.5), 1.0  # `one` has all items by global index
    for number, count, priority in steps:
        shard = sharded.shards[number]
        shard.raise_default_priority(highest)
        if priority is None:
            index = shard.call("extend", (rows(range(count)),))
            one.mark_update(index)
        elif len(shard.buffer):
            shard.call("update_priority", (torch.tensor([0]), priority))
            one.update_priority(torch.tensor([40 * number]), priority)
        assert shard.highest == shard.share(4).highest == shard.buffer.sampler.default_priority
        highest = max(highest, shard.highest)
    assert highest == one.default_priority
    for shard in sharded.shards:
        mine = shard.buffer.sampler.priorities
        assert torch.equal(mine, one.priorities[40 * shard.number :][: len(mine)])


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_raised_default_priority_is_kept(storage: Any, tmp_path: Path) -> None:
    one, other = (
        Shard(0, 1, lambda: ReplayBuffer(storage=storage(9), sampler=PrioritizedSampler(9, 1, 1))) for _ in "ab"
    )
    one.call("extend", (torch.arange(3),))
    one.raise_default_priority(7.0)
    one.raise_default_priority(None)
    one.raise_default_priority(3.0)
    one.call("dumps", (tmp_path,))
    other.call("loads", (tmp_path,))
    for shard in (one, other):
        shard.call("add", (torch.tensor(3),))
        assert shard.buffer.sampler.priorities.tolist() == [1, 1, 1, 7]
    with pytest.raises(ValueError, match="finite"):
        one.raise_default_priority(float("nan"))


def refused(**kwargs: Any) -> Sharded:
    sharded = Sharded(2, lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(20), **kwargs))
    for shard in sharded.shards:
        shard.call("extend", (rows(range(12), [6, 6]),))
    return sharded


class Own(RandomSampler):
    def draw(self, storage: Any, batch_size: int, key: Any) -> Any:
        return torch.zeros(batch_size, dtype=torch.int64), {}


def test_what_cannot_be_drawn_over_shards() -> None:
    with pytest.raises(
        TypeError, match="ConsumingSampler cannot draw batches over several shards: use one shard, or a Ran"
    ):
        refused(sampler=ConsumingSampler(2)).sample(4)
    with pytest.raises(TypeError, match="Own draws by its own method: use a sampler of the library"):
        refused(sampler=Own()).sample(4)
    with pytest.raises(TypeError, match=r"cannot be drawn with sample_unit=Sequence.*"):
        refused(sample_unit=Sequence(length=2)).sample(4)
    with pytest.raises(RuntimeError, match="batch_size=5 is not a multiple of slice_len=2"):
        refused(sampler=SliceSampler(slice_len=2)).sample(5)
