"""Batches drawn ahead of time."""

import copy
import pickle
import threading

import pytest
import torch

from interop import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.rows import check_same, flat_td, plain_tensor


class Counting(RandomSampler):
    """Notes the size of each draw; raises at the draws named in `broken`."""

    def __init__(self, broken=()):
        self.sizes = []
        self.broken = broken

    def sample(self, storage, batch_size):
        self.sizes.append(batch_size)
        if len(self.sizes) in self.broken:
            raise ArithmeticError(f"draw {len(self.sizes)}")
        return super().sample(storage, batch_size)


def ahead(prefetch=1, sampler=None, storage=None, **kwargs):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(8) if storage is None else storage,
        sampler=sampler,
        prefetch=prefetch,
        batch_size=4,
        **kwargs,
    )
    buffer.extend(plain_tensor([1, 2, 3]))
    return buffer


def settled(buffer):
    """Wait for what is being drawn."""
    for job in buffer._prefetch._queue:
        job.future.exception()


@pytest.mark.parametrize("depth", [1, 3])
def test_the_queue_is_filled_after_the_first_sample(depth):
    sampler = Counting()
    buffer = ahead(depth, sampler)
    assert sampler.sizes == []
    buffer.sample()
    settled(buffer)
    assert len(sampler.sizes) == 1 + depth
    for drawn in range(2, 6):
        buffer.sample()
        settled(buffer)
        assert len(sampler.sizes) == depth + drawn


def test_batches_may_be_older_than_the_last_write():
    buffer = ahead()
    buffer.sample()
    settled(buffer)
    buffer.write_all(plain_tensor([7, 7, 7]))
    assert set(buffer.sample()[:, 0].tolist()) <= {1.0, 2.0, 3.0}
    settled(buffer)
    assert set(buffer.sample()[:, 0].tolist()) == {7.0}


def test_a_batch_size_is_needed_and_sharing_excluded():
    with pytest.raises(ValueError, match="batch_size"):
        ReplayBuffer(prefetch=1)
    with pytest.raises(ValueError, match="shared"):
        ReplayBuffer(prefetch=1, batch_size=2, shared=True)
    assert len(ReplayBuffer(prefetch=0)) == 0
    for depth in (-1, 1.5, "2"):
        with pytest.raises((TypeError, ValueError), match="prefetch"):
            ReplayBuffer(prefetch=depth, batch_size=2)
    with pytest.raises(ValueError):
        PrioritizedReplayBuffer(alpha=1.0, beta=1.0, prefetch=2)


def test_another_batch_size_counts_for_what_is_scheduled_next():
    buffer = ahead()
    buffer.sample()
    with pytest.warns(UserWarning, match="batch_size"):
        assert buffer.sample(2).shape == (4, 3)
    assert buffer.sample().shape == (2, 3)
    assert buffer.sample().shape == (4, 3)


@pytest.mark.parametrize("make", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("depth", [1, 3])
def test_equal_generators_give_equal_batches(make, depth):
    for _ in range(5):
        drawn = []
        for _ in range(2):
            buffer = ahead(depth, storage=make(8), generator=torch.Generator().manual_seed(5))
            drawn.append([buffer.sample(return_info=True)[1]["index"] for _ in range(8)])
        check_same(drawn[0], drawn[1])


def test_batches_ahead_are_those_without_prefetch():
    one, two = (ahead(depth, generator=torch.Generator().manual_seed(5)) for depth in (0, 2))
    check_same([one.sample() for _ in range(5)], [two.sample() for _ in range(5)])


@pytest.mark.parametrize("broken", [1, 2, 4])
def test_an_error_is_raised_once_and_no_batch_is_lost(broken):
    buffer = ahead(1, Counting(broken=(broken,)))
    raised = 0
    for _ in range(6):
        try:
            assert buffer.sample().shape == (4, 3)
        except ArithmeticError as error:
            raised += 1
            assert str(error) == f"draw {broken}"
    assert raised == 1


def test_an_error_of_an_empty_buffer_is_gone_once_it_is_filled():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), prefetch=2, batch_size=4)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    buffer.extend(plain_tensor([1, 2]))
    for _ in range(4):
        assert buffer.sample().shape == (4, 3)


def test_emptying_drops_what_was_drawn_ahead():
    buffer = ahead(3)
    buffer.sample()
    buffer.empty()
    buffer.extend(plain_tensor([9]))
    for _ in range(6):
        assert set(buffer.sample()[:, 0].tolist()) == {9.0}


def test_emptying_drops_an_error_that_waits():
    buffer = ahead(1, Counting(broken=(2,)))
    buffer.sample()
    buffer.empty()
    buffer.extend(plain_tensor([9]))
    assert buffer.sample().shape == (4, 3)


def test_another_component_drops_what_was_drawn_ahead():
    class First(RandomSampler):
        def sample(self, storage, batch_size):
            return torch.zeros(batch_size, dtype=torch.int64), {}

    buffer = ahead(2)
    buffer.sample()
    buffer.set_sampler(First())
    assert set(buffer.sample()[:, 0].tolist()) == {1.0}
    other = LazyTensorStorage(8)
    other.set(slice(0, 2), plain_tensor([5, 5]))
    buffer.set_storage(other)
    assert set(buffer.sample()[:, 0].tolist()) == {5.0}


def test_another_transform_drops_what_was_drawn_ahead():
    buffer = ahead(2)
    buffer.sample()
    settled(buffer)
    buffer.append_transform(lambda data: data * 0)
    assert set(buffer.sample()[:, 0].tolist()) == {0.0}


def test_another_generator_drops_what_was_drawn_ahead():
    buffer = ahead(2)
    buffer.sample()
    buffer.set_rng(torch.Generator().manual_seed(1))
    first = [buffer.sample() for _ in range(3)]
    buffer.set_rng(torch.Generator().manual_seed(1))
    check_same([buffer.sample() for _ in range(3)], first)


def test_tensordict_samples_carry_the_index():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), prefetch=2, batch_size=4)
    buffer.extend(flat_td([3, 4, 5]))
    for _ in range(5):
        batch = buffer.sample()
        check_same(batch.exclude("index"), flat_td(batch["index"] + 3))


def test_batches_ahead_are_apart_from_each_other():
    buffer = ahead(3)
    batches = [buffer.sample() for _ in range(6)]
    kept = [batch.clone() for batch in batches]
    batches[0].fill_(50)
    check_same(batches[1:], kept[1:])


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_prefetches_on_its_own(copier):
    buffer = ahead(2, generator=torch.Generator().manual_seed(1))
    buffer.sample()
    twin = copier(buffer)
    twin.empty()
    twin.extend(plain_tensor([9]))
    assert set(twin.sample()[:, 0].tolist()) == {9.0}
    for _ in range(3):
        assert set(buffer.sample()[:, 0].tolist()) <= {1.0, 2.0, 3.0}


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_goes_on_with_the_batches_that_wait(copier):
    buffer = ahead(2, generator=torch.Generator().manual_seed(1))
    buffer.sample()
    twin = copier(buffer)
    check_same([twin.sample() for _ in range(5)], [buffer.sample() for _ in range(5)])


def test_batches_are_drawn_by_other_threads():
    threads = []
    buffer = ahead(1, transform=lambda data: threads.append(threading.current_thread()) or data)
    buffer.sample()
    buffer.sample()
    settled(buffer)
    assert threads[0] is threading.main_thread() and threading.main_thread() not in threads[1:]


def test_dropping_what_is_being_drawn_does_not_hang(in_a_fork):
    """The threads that draw need the lock that the call holds."""
    out = in_a_fork("""
        import faulthandler
        faulthandler.dump_traceback_later(30, exit=True)
        import threading
        import torch
        from interop import LazyTensorStorage, RandomSampler, ReplayBuffer

        def filled():
            storage = LazyTensorStorage(4096)
            storage.set(slice(0, 4096), torch.zeros(4096, 16))
            return storage

        buffer = ReplayBuffer(storage=filled(), prefetch=4, batch_size=2048)
        done, wrong = threading.Event(), []

        def read():
            while not done.is_set():
                try:
                    buffer.sample()
                except Exception as error:
                    if "empty" not in str(error):
                        wrong.append(error)
                        return

        reader = threading.Thread(target=read)
        for turn in range(200):
            if turn == 100:
                reader.start()
            try:
                buffer.sample()
            except RuntimeError as error:
                assert "empty" in str(error), error
            if turn % 4 == 0:
                buffer.empty()
                buffer.extend(torch.zeros(4096, 16))
            elif turn % 4 == 1:
                buffer.set_rng(None)
            elif turn % 4 == 2:
                buffer.set_sampler(RandomSampler())
            else:
                buffer.set_storage(filled())
        done.set()
        reader.join()
        faulthandler.cancel_dump_traceback_later()
        assert not wrong, wrong
        print("done")
    """)
    assert out == "done\n"
