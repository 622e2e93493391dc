"""SamplerWithoutReplacement: each stored item once an epoch, in uniformly random order, whatever happens meanwhile."""

import itertools
import time

import numpy as np
import pytest
import torch

from interop import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorStorage,
)
from tests.interop.rows import ALL_STORAGES, plain_tensor, refused


def buffer_of(count, batch_size=3, storage=LazyTensorStorage, seed=0, capacity=None, prefetch=None, **kwargs):
    """Rows 0, 1, ... drawn without replacement."""
    sampler = kwargs.pop("sampler", None) or SamplerWithoutReplacement(**kwargs)
    buffer = ReplayBuffer(
        storage=storage(capacity or max(count, 1)),
        sampler=sampler,
        batch_size=batch_size,
        prefetch=prefetch,
        generator=torch.Generator().manual_seed(seed),
    )
    if count:
        buffer.extend(plain_tensor(list(range(count))))
    return buffer


def ids(batch):
    return [int(each) for each in batch[:, 0]]


def epoch_of(buffer):
    drawn = [ids(batch) for batch in itertools.islice(buffer, 2000)]
    assert buffer.sampler.ran_out
    return drawn


def flat(batches):
    return [each for batch in batches for each in batch]


@pytest.mark.parametrize("make", [*ALL_STORAGES, "given"])
@pytest.mark.parametrize("prefetch", [None, 1, 3])
def test_an_epoch_of_a_buffer_is_every_item_once(make, prefetch):
    def storage(capacity):
        return TensorStorage(plain_tensor([0] * capacity)) if make == "given" else ALL_STORAGES[make](capacity)

    buffer = buffer_of(10, storage=storage, prefetch=prefetch)
    epochs = [epoch_of(buffer) for _ in range(4)]
    assert all([len(batch) for batch in epoch] == [3, 3, 3, 1] for epoch in epochs)
    assert all(sorted(flat(epoch)) == list(range(10)) for epoch in epochs)
    assert len({tuple(flat(epoch)) for epoch in epochs}) > 1


@pytest.mark.parametrize("prefetch", [None, 1, 4])
def test_ran_out_tells_of_the_end_until_the_next_batch(prefetch):
    buffer = buffer_of(10, prefetch=prefetch)
    assert [(buffer.sample() is not None, buffer.sampler.ran_out)[1] for _ in range(8)] == [
        False,
        False,
        False,
        True,
    ] * 2
    buffer.sampler.ran_out = False
    assert buffer.sampler.ran_out is False


@pytest.mark.parametrize("prefetch", [None, 1, 4])
def test_next_gives_none_between_epochs(prefetch):
    buffer = buffer_of(10, prefetch=prefetch)
    taken = [buffer.next() for _ in range(10)]
    assert [each is None for each in taken] == [False] * 4 + [True] + [False] * 4 + [True]
    assert sorted(flat(map(ids, taken[:4]))) == sorted(flat(map(ids, taken[5:9]))) == list(range(10))


@pytest.mark.parametrize("prefetch", [None, 1, 2, 4])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_loop_that_was_left_goes_on_with_the_rest(prefetch, stop):
    buffer = buffer_of(10, prefetch=prefetch)
    first = [ids(batch) for batch in itertools.islice(buffer, stop)]
    rest = epoch_of(buffer)
    assert sorted(flat(first) + flat(rest)) == list(range(10))
    assert sorted(flat(epoch_of(buffer))) == list(range(10))


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("refill", [4, 10, 13])
def test_emptying_begins_an_epoch(prefetch, refill):
    buffer = buffer_of(10, capacity=20, prefetch=prefetch)
    for _ in range(3):
        buffer.sample()
        buffer.empty()
        assert not buffer.sampler.ran_out
        buffer.extend(plain_tensor(list(range(refill))))
        assert sorted(flat(epoch_of(buffer))) == list(range(refill))


def test_another_number_of_items_begins_an_epoch_and_writing_over_items_does_not():
    buffer = buffer_of(6, 4, capacity=8)
    buffer.sample()
    buffer.extend(plain_tensor([6, 7]))
    assert sorted(flat(epoch_of(buffer))) == list(range(8))
    first = buffer.sample(return_info=True)[1]["index"]
    buffer.extend(plain_tensor([9, 9]))
    second = buffer.sample(return_info=True)[1]["index"]
    assert sorted(first.tolist() + second.tolist()) == list(range(8)) and buffer.sampler.ran_out


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_refused_draw_changes_nothing(prefetch, storage):
    buffer = buffer_of(0, 4, storage=storage, capacity=20, drop_last=True, prefetch=prefetch)
    with refused(buffer, RuntimeError, "empty"):
        buffer.sample()
    buffer.extend(plain_tensor([0, 1, 2]))
    with refused(buffer, ValueError, "drop_last"):
        buffer.sample()
    buffer.extend(plain_tensor(list(range(3, 13))))
    first = ids(buffer.sample())
    shown = repr(buffer.sampler)
    with refused(buffer, ValueError, "drop_last"):
        buffer.sampler.sample(buffer.storage, 14)
    assert repr(buffer.sampler) == shown
    assert len(set(first + flat(epoch_of(buffer)))) == 12


class Failing(LazyTensorStorage):
    """Raises at the reads named in `broken`."""

    broken, reads = (), 0

    def get(self, index):
        self.reads += 1
        if self.reads in self.broken:
            raise ArithmeticError(f"read {self.reads}")
        return super().get(index)


def drawn_despite(buffer, errors, count):
    """What `count` calls give, and how many of them raised."""
    drawn, raised = [], 0
    for _ in range(count):
        try:
            drawn.append(ids(buffer.sample()))
        except errors:
            raised += 1
    return drawn, raised


@pytest.mark.parametrize("prefetch", [None, 1, 3])
@pytest.mark.parametrize("broken", [(1,), (2,), (4,), (2, 3), (3, 4)])
def test_items_that_could_not_be_read_remain_to_be_drawn(prefetch, broken):
    buffer = buffer_of(10, storage=Failing, prefetch=prefetch)
    buffer.storage.broken = broken
    drawn, raised = [], 0
    while sum(map(len, drawn)) < 10:
        found, wrong = drawn_despite(buffer, ArithmeticError, 1)
        drawn, raised = drawn + found, raised + wrong
    assert 0 < raised <= len(broken) and sorted(flat(drawn)) == list(range(10))  # one error drops what failed behind it
    assert buffer.sampler.ran_out
    buffer.storage.broken = ()
    assert sorted(flat(epoch_of(buffer))) == list(range(10))


def refusing(*broken):
    """A transform that raises at these calls."""
    seen = []

    def refuse(data):
        seen.append(ids(data))
        if len(seen) in broken:
            raise ArithmeticError
        return data

    return refuse


def test_what_a_transform_refuses_was_drawn():
    buffer = buffer_of(12)
    buffer.append_transform(refusing(2))
    drawn, raised = drawn_despite(buffer, ArithmeticError, 4)
    assert raised == 1 and len(set(flat(drawn))) == 9 and buffer.sampler.ran_out
    assert sorted(flat(epoch_of(buffer))) == list(range(12))


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_what_a_transform_refuses_ahead_of_time_comes_again(prefetch):
    one, two = (buffer_of(12, prefetch=prefetch) for _ in range(2))
    one.append_transform(refusing(2))
    drawn, raised = drawn_despite(one, ArithmeticError, 5)
    assert raised == 1 and sorted(map(sorted, drawn)) == sorted(sorted(ids(two.sample())) for _ in range(4))
    assert one.sampler.ran_out and sorted(flat(drawn)) == list(range(12))


# ------------------------------------------------------------------ prefetch and forked children


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("seed", range(2))
def test_an_epoch_is_exact_in_any_timing_of_threads(depth, seed):
    waits = iter(np.random.default_rng(seed).exponential(0.002, 100_000).tolist())
    buffer = buffer_of(50, 7, prefetch=depth)
    buffer.append_transform(lambda data: time.sleep(next(waits)) or data)
    for _ in range(5):
        drawn = epoch_of(buffer)
        assert [len(batch) for batch in drawn] == [7] * 7 + [1]
        assert sorted(flat(drawn)) == list(range(50))


CHANGES = {
    "generator": lambda buffer: buffer.set_rng(torch.Generator().manual_seed(3)),
    "transform": lambda buffer: buffer.append_transform(lambda data: data),
    "same sampler": lambda buffer: buffer.set_sampler(buffer.sampler),
    "same storage": lambda buffer: buffer.set_storage(buffer.storage),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_batches_that_are_dropped_remain_to_be_drawn(change, taken):
    buffer = buffer_of(10, prefetch=3)
    first = [ids(buffer.sample()) for _ in range(taken)]
    CHANGES[change](buffer)
    assert sorted(flat(first + epoch_of(buffer))) == list(range(10))
    assert sorted(flat(epoch_of(buffer))) == list(range(10))


def test_a_forked_child_goes_on_with_an_epoch_of_its_own(in_a_fork):
    out = in_a_fork("""
        import os
        import torch
        from interop import LazyMemmapStorage, ReplayBuffer, SamplerWithoutReplacement

        for prefetch in (None, 2):
            buffer = ReplayBuffer(
                storage=LazyMemmapStorage(64), sampler=SamplerWithoutReplacement(), batch_size=3, prefetch=prefetch
            )
            buffer.extend(torch.arange(11))
            first = buffer.sample().tolist()
            child = os.fork()
            rest = [each for batch in buffer for each in batch.tolist()]
            again = [each for batch in buffer for each in batch.tolist()]
            right = sorted(first + rest) == sorted(again) == list(range(11))
            if child == 0:
                os._exit(0 if right else 1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), right)
    """)
    assert out == "0 True\n" * 2
