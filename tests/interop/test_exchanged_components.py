"""Buffers whose components are exchanged, and buffers that share a storage: each draws exactly the stored items."""

import contextlib
import itertools
import time

import pytest
import torch

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from tests.interop.rows import check_same, flat_td
from tests.interop.test_threads import check_whole, together

CAPACITY = 24

SAMPLERS = {
    "uniform": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 1.0, 1.0),
}
STORAGES = {
    "memory": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "list": ListStorage,
    "given": lambda capacity: TensorStorage(torch.zeros(capacity, dtype=torch.int64)),
    "memory, 2 dims": lambda capacity: LazyTensorStorage(capacity, ndim=2),
    "memmap, 2 dims": lambda capacity: LazyMemmapStorage(capacity, ndim=2),
    "given, 2 dims": lambda capacity: TensorStorage(torch.zeros(capacity // 2, 2, dtype=torch.int64), ndim=2),
}
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS)
each_storage = pytest.mark.parametrize("storage", STORAGES)


def rows(storage, numbers):
    """A batch of these numbers; in two lanes for a storage with two item dims."""
    items = torch.as_tensor(list(numbers))
    return items if storage.ndim == 1 else items.reshape(-1, 2).T.contiguous()


def buffer_of(sampler, storage, numbers, **kwargs):
    """A buffer with these numbers. Other rows of given memory are zeros."""
    made = STORAGES[storage](CAPACITY) if isinstance(storage, str) else storage
    buffer = ReplayBuffer(storage=made, sampler=SAMPLERS[sampler](), **kwargs)
    if len(numbers):
        buffer.extend(rows(made, numbers))
    return buffer


def held(buffer):
    return sorted(buffer[:].reshape(-1).tolist())


def check_draws(buffer):
    """Check that draws are of stored items: each once an epoch, or each with priority 1."""
    items = held(buffer)
    if isinstance(buffer.sampler, PrioritizedSampler):
        check_same(buffer.sampler.priorities, torch.ones(len(items)))
    exact = isinstance(buffer.sampler, SamplerWithoutReplacement)
    if exact:
        buffer.sampler.clear()
    batch, info = buffer.sample(512, return_info=True)
    assert sorted(batch.tolist()) == items if exact else set(batch.tolist()) == set(items)
    check_same(batch, torch.as_tensor(collated(buffer.storage[info["index"]])))


def collated(items):
    return torch.stack(items) if isinstance(items, list) else items


# ------------------------------------------------------------------ exchanged


@pytest.mark.parametrize("before", SAMPLERS)
@pytest.mark.parametrize("after", SAMPLERS)
@each_storage
def test_another_sampler_draws_what_is_stored(before, after, storage):
    buffer = buffer_of(before, storage, range(1, 11))
    buffer.sample(3)
    old = buffer.sampler
    if before == "prioritized":
        buffer.update_priority(torch.zeros(1, buffer.storage.ndim, dtype=torch.int64), 50.0)
    new = SAMPLERS[after]()
    assert buffer.set_sampler(new) is old and buffer.sampler is new
    check_draws(buffer)
    buffer.extend(rows(buffer.storage, range(11, 15)))
    check_draws(buffer)
    buffer.set_sampler(old)  # which has missed the last writes
    check_draws(buffer)


@pytest.mark.parametrize("before", ["list", "memmap, 2 dims"])
@pytest.mark.parametrize(("after", "count"), list(zip(STORAGES, [6, 10, 16, 6, 10, 16, 12], strict=True)))
@each_sampler
def test_another_storage_is_drawn_from(before, after, sampler, count):
    buffer = buffer_of(sampler, before, range(1, 11))
    buffer.sample(3)
    other = ReplayBuffer(storage=STORAGES[after](CAPACITY))
    other.extend(rows(other.storage, range(101, 101 + count)))
    old = buffer.storage
    assert buffer.set_storage(other.storage) is old and buffer.storage is other.storage
    assert old.followers.all() == []
    check_draws(buffer)
    buffer.extend(rows(buffer.storage, range(201, 205)))
    assert set(range(201, 205)) <= set(held(buffer))
    check_draws(buffer)


@each_sampler
@each_storage
def test_another_writer_continues_at_the_cursor(sampler, storage):
    buffer = buffer_of(sampler, storage, range(1, 11))
    buffer.sample(2)
    if sampler == "prioritized":
        buffer.update_priority(torch.zeros(1, buffer.storage.ndim, dtype=torch.int64), 50.0)
    old, new = buffer.writer, RoundRobinWriter()
    assert buffer.set_writer(new) is old and buffer.writer is new
    if sampler == "prioritized":
        assert buffer.sampler.priorities[0] == 50
    elif sampler == "without replacement":
        assert len(buffer.sample(512)) == len(buffer) - 2
    buffer.extend(rows(buffer.storage, range(201, 205)))
    ndim = buffer.storage.ndim
    assert buffer.write_count == 14 // ndim
    assert collated(buffer.storage[10 // ndim : 14 // ndim]).reshape(-1).tolist() == list(range(201, 205))
    if sampler == "prioritized":
        assert set(buffer.sampler.priorities[10:14].tolist()) == {50.0}


# ------------------------------------------------------------------ several buffers on one storage


@pytest.mark.parametrize("one", SAMPLERS)
@pytest.mark.parametrize("two", SAMPLERS)
@each_storage
def test_writes_through_one_buffer_are_drawn_by_another(one, two, storage):
    first = buffer_of(one, storage, range(1, 5))
    second = buffer_of(two, first.storage, ())
    check_draws(second)
    for start in range(5, 41, 4):  # over the end of the ring
        batch = rows(first.storage, range(start, start + 4))
        if start % 8 == 1:
            first.extend(batch)
        else:
            for item in batch.unbind(-1):
                first.add(item)
    check_draws(first)
    check_draws(second)
    assert held(first) == list(range(17, 41))


@each_sampler
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("storage", ["memory", "memmap", "list"])
def test_emptying_through_one_buffer_starts_every_other_over(sampler, prefetch, storage):
    buffer = buffer_of(sampler, storage, range(1, 11), batch_size=3, prefetch=prefetch)
    other = ReplayBuffer(storage=buffer.storage)
    for _ in range(3):
        buffer.sample()
        if sampler == "prioritized":
            buffer.update_priority(torch.arange(4), 9.0)
        other.empty()
        assert len(buffer) == 0
        with pytest.raises(RuntimeError, match="empty"):
            buffer.sample()
        other.extend(torch.tensor([50, 51, 52, 53]))
        for _ in range(4):
            assert set(buffer.sample().tolist()) <= {50, 51, 52, 53}
        if sampler == "prioritized":
            check_same(buffer.sampler.priorities, torch.ones(4))


# ------------------------------------------------------------------ prefetch


@each_sampler
@pytest.mark.parametrize("taken", [1, 3])
def test_a_new_seed_has_the_same_effect_with_prefetch(sampler, taken):
    drawn = []
    for prefetch in (None, 1, 4):
        generator = torch.Generator().manual_seed(3)
        buffer = buffer_of(sampler, "memory", range(20), batch_size=4, prefetch=prefetch, generator=generator)
        before = [buffer.sample() for _ in range(taken)]
        buffer.set_rng(torch.Generator().manual_seed(11))
        drawn.append(before + [buffer.sample() for _ in range(7)])
    check_same(drawn[1], drawn[0])
    check_same(drawn[2], drawn[0])


# ------------------------------------------------------------------ threads


@each_sampler
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
def test_threads_sample_extend_update_and_exchange_at_once(sampler, prefetch, make):
    storage = make(CAPACITY)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=6, prefetch=prefetch)
    other = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS["prioritized"](), batch_size=6)
    buffer.extend(flat_td([0] * 6))
    end = time.monotonic() + 0.1
    counts = dict.fromkeys(["sample", "extend", "update", "exchange"], 0)

    def repeat(name, *calls):
        def run():
            for call in itertools.cycle(calls):
                if time.monotonic() > end and counts[name]:
                    return
                call()
                counts[name] += 1

        return run

    def sample():
        batch = buffer.sample()
        check_whole(batch)
        assert 1 <= len(batch) <= 6 and int(batch["index"].max()) < CAPACITY

    def update():
        batch = other.sample()
        check_whole(batch)
        with contextlib.suppress(IndexError):  # of items that are not there any more
            other.update_tensordict_priority(batch.set("td_error", torch.rand(len(batch))))

    def start_over():
        with storage.lock.held():  # else others find it empty
            other.empty()
            other.extend(flat_td([1] * 6))

    errors = together(
        repeat("sample", sample),
        repeat("sample", sample),
        repeat("extend", lambda: buffer.extend(flat_td([3] * 4)), lambda: other.add(flat_td([8])[0])),
        repeat("update", update),
        repeat(
            "exchange",
            lambda: buffer.set_sampler(SAMPLERS[sampler]()),
            lambda: buffer.set_rng(torch.Generator().manual_seed(1)),
            lambda: buffer.set_writer(TensorDictRoundRobinWriter()),
            start_over,
        ),
    )
    assert errors == [] and all(counts.values())
    check_whole(buffer[:])
    if sampler == "without replacement":
        buffer.set_sampler(SAMPLERS[sampler]())
        drawn = torch.cat([batch["index"] for batch in buffer])
        assert sorted(drawn.tolist()) == list(range(len(buffer)))
