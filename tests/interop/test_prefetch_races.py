"""Batches drawn ahead while what they are drawn from changes."""

import sys
import threading
import time

import pytest
import torch

from interop import LazyTensorStorage, ListStorage, RandomSampler, ReplayBuffer, Sampler, TensorDictReplayBuffer
from interop.buffers.ahead import Ahead
from interop.buffers.prefetch import Prefetch
from tests.interop.rows import flat_td, plain_tensor
from tests.interop.test_threads_and_processes import in_a_fresh_interpreter, together


class Last(RandomSampler):
    def sample(self, storage, batch_size):
        return torch.full((batch_size,), len(storage) - 1), {}


class Gate:
    """A transform: batches drawn ahead stop here until it opens."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, data):
        if threading.current_thread().name.startswith("replay-prefetch") and not self.open.is_set():
            self.reached.set()
            assert self.open.wait(10)
        return data


def other_storage():
    storage = LazyTensorStorage(8)
    storage.set(slice(0, 2), plain_tensor([5, 5]))
    return storage


def start_over(buffer):
    buffer.empty()
    buffer.extend(plain_tensor([5]))


CHANGES = {
    "sampler": (lambda buffer: buffer.set_sampler(Last()), {3.0}),
    "storage": (lambda buffer: buffer.set_storage(other_storage()), {5.0}),
    "content": (start_over, {5.0}),
    "transform": (lambda buffer: buffer.append_transform(lambda data: data * 0), {0.0}),
}


def sampled_across(change, buffer, gate):
    """What a thread gets that waits for a batch, drawn ahead and held up in a transform, while a change is made."""
    buffer.sample()
    assert gate.reached.wait(10)
    batches = []
    waiting = threading.Thread(target=lambda: batches.append(buffer.sample()))
    waiting.start()
    time.sleep(0.05)
    change(buffer)
    gate.open.set()
    waiting.join(20)
    [batch] = batches
    return batch


@pytest.mark.parametrize("change", CHANGES)
def test_a_batch_that_a_thread_waits_for_is_drawn_anew_after_a_change(change):
    gate = Gate()
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, prefetch=1, transform=gate)
    buffer.extend(plain_tensor([1, 2, 3]))
    make, wanted = CHANGES[change]
    batches = [sampled_across(make, buffer, gate), buffer.sample()]
    assert [set(batch[:, 0].tolist()) for batch in batches] == [wanted, wanted]


def test_another_generator_governs_every_batch_from_then_on():
    gate = Gate()
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=8, prefetch=1, transform=gate)
    buffer.extend(plain_tensor(list(range(64))))
    batch = sampled_across(lambda buffer: buffer.set_rng(torch.Generator().manual_seed(1)), buffer, gate)
    plain = ReplayBuffer(storage=buffer.storage, batch_size=8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(batch, plain.sample()) and torch.equal(buffer.sample(), plain.sample())


def test_a_batch_that_is_scheduled_during_a_change_is_dropped():
    queue = Prefetch(1)
    droppers = []

    def schedule(epoch):
        droppers.append(threading.Thread(target=queue.drop))
        droppers[0].start()
        time.sleep(0.05)
        return Ahead(1, epoch)

    assert queue.take(lambda: "now", schedule, lambda: True, lambda ahead: "stale") == "now"
    droppers[0].join(10)
    assert len(queue) == 0


def test_what_starts_after_a_change_does_not_draw():
    """It would take a batch from the sampler that is there by then, for nothing."""
    drawn = []

    class Noting(RandomSampler):
        def sample(self, storage, batch_size):
            drawn.append(threading.current_thread().name)
            return super().sample(storage, batch_size)

    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2, prefetch=2)
    buffer.extend(plain_tensor([1, 2]))
    with buffer.storage._access.turn():
        buffer.sample()
        buffer.set_sampler(Noting())
    assert buffer.sample().shape == (2, 3)
    for job in list(buffer._prefetch._queue):
        job.future.result(10)
    assert len(drawn) == 3


def test_changes_while_others_take_batches():
    class Cheap(Sampler):
        def sample(self, storage, batch_size):
            return torch.zeros(batch_size, dtype=torch.int64), {}

    buffer = ReplayBuffer(
        storage=ListStorage(4), sampler=Cheap(), batch_size=1, prefetch=64, collate_fn=lambda items: items
    )
    buffer.extend([1])
    end = time.monotonic() + 1.5

    def take():
        while time.monotonic() < end:
            assert buffer.sample() == [1]

    def change():
        while time.monotonic() < end:
            buffer.set_rng(None)
            time.sleep(1e-4)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert together(take, take, change) == []
    finally:
        sys.setswitchinterval(interval)


def test_transforms_run_side_by_side():
    both = threading.Barrier(2)

    def meet(data):
        if threading.current_thread().name.startswith("replay-prefetch"):
            both.wait(10)
        return data

    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2, prefetch=2, transform=meet)
    buffer.extend(plain_tensor([1, 2]))
    buffer.sample()
    futures = [job.future for job in buffer._prefetch._queue]
    assert [future.exception(20) for future in futures] == [None, None]
    both.abort()


def test_prefetch_is_not_shared_later_on():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2, prefetch=2)
    with pytest.raises(ValueError, match="prefetch"):
        buffer.share()
    assert buffer.share(False) is buffer


@pytest.mark.slow
def test_a_forked_child_draws_ahead_on_its_own():
    out = in_a_fresh_interpreter("""
        import multiprocessing
        import torch
        from interop import LazyMemmapStorage, ReplayBuffer

        def worker():
            for _ in range(4):
                assert buffer.sample().shape == (4,) and buffer.next().shape == (4,)

        buffer = ReplayBuffer(storage=LazyMemmapStorage(64), batch_size=4, prefetch=2)
        buffer.extend(torch.arange(8.0))
        buffer.sample()
        process = multiprocessing.get_context("fork").Process(target=worker)
        process.start()
        process.join(30)
        print(process.exitcode)
        process.kill()
    """)
    assert out == "0\n"


def test_a_forked_child_waits_for_a_turn_of_its_parent_not_for_a_thread_that_it_has_not(in_a_fork):
    out = in_a_fork("""
        import multiprocessing
        import threading
        import torch
        from interop import LazyMemmapStorage, ReplayBuffer

        def hold():
            with buffer.storage._access.turn():
                held.set()
                done.wait()

        buffer, held, done = ReplayBuffer(storage=LazyMemmapStorage(64)), threading.Event(), threading.Event()
        buffer.extend(torch.arange(8.0))
        threading.Thread(target=hold).start()
        held.wait()
        process = multiprocessing.get_context("fork").Process(target=lambda: buffer.extend(torch.arange(2.0)))
        process.start()
        process.join(0.5)
        print(process.exitcode)
        done.set()
        process.join(30)
        print(process.exitcode, len(buffer))
        process.kill()
    """)
    assert out == "None\n0 10\n"


def test_samples_drawn_ahead_have_an_index_of_their_own():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2, prefetch=2)
    buffer.extend(flat_td([0, 1]))
    for _ in range(3):
        batch, info = buffer.sample(return_info=True)
        before = info["index"].clone()
        batch["index"].fill_(-1)
        assert torch.equal(info["index"], before)
