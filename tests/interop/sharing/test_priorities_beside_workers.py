"""Prioritized buffers with `sync=False`: workers write, and the process that made the buffer draws and updates."""

import multiprocessing
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)

KINDS = (PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer)
CAPACITY = 24


def rows(ids):
    ids = torch.as_tensor(ids)
    obs, error = ids[:, None] * torch.ones(3), torch.full(ids.shape, 1e6)
    return TensorDict({"id": ids, "obs": obs, "td_error": error}, ids.shape)


def make(kind=TensorDictPrioritizedReplayBuffer, storage=None, **more):
    storage = LazyTensorStorage(CAPACITY, shared_init=True) if storage is None else storage
    return kind(alpha=1.0, beta=1.0, eps=0.0, storage=storage, sync=False, **more)


def serve(buffers, pipe):
    """Call methods of the buffers, and answer what they return or raise."""
    torch.set_num_threads(1)
    for name, call, given in iter(pipe.recv, None):
        try:
            found = getattr(buffers[name], call)(*given)
            pipe.send(found.tolist() if isinstance(found, torch.Tensor) else found)
        except Exception as error:
            pipe.send(repr(error))


def started(method, buffers, count):
    """Workers, and what calls a method in one of them."""
    context = multiprocessing.get_context(method)
    pipes = [context.Pipe() for _ in range(count)]
    workers = [context.Process(target=serve, args=(buffers, there), daemon=True) for _, there in pipes]
    for worker in workers:
        worker.start()

    def call(number, *given):
        pipe = pipes[number][0]
        pipe.send(given)
        assert pipe.poll(100)
        return pipe.recv()

    return workers, call


class Model:
    """Rows around a ring, written, drawn and updated by one process; new ones have the highest priority."""

    def __init__(self):
        self.ids, self.priorities = np.full(CAPACITY, -1), np.zeros(CAPACITY)
        self.written, self.highest = 0, 1.0

    def write(self, ids):
        slots = (self.written + np.arange(len(ids))) % CAPACITY
        self.ids[slots], self.priorities[slots] = ids, self.highest  # of more rows than slots the last stay
        self.written += len(ids)
        return slots.tolist()

    def update(self, slots, values):
        self.priorities[slots] = values
        self.highest = max(self.highest, values.max())

    def filled(self):
        size = min(self.written, CAPACITY)
        return self.ids[:size], self.priorities[:size]


def check_interleavings(method, steps, count, starts_with_worker):
    """After any interleaving of calls in several processes, rows and priorities are those of one."""
    numbers, ids = np.random.default_rng(steps), iter(range(10**6))
    buffers, models = {kind.__name__: make(kind) for kind in KINDS}, {kind.__name__: Model() for kind in KINDS}
    if not starts_with_worker:  # and JAX starts before them
        for name, buffer in buffers.items():
            batch = [next(ids)]
            assert buffer.extend(rows(batch)).tolist() == models[name].write(batch)
            buffer.sample(8)
    workers, call = started(method, buffers, count)
    for step in range(steps):
        name = list(buffers)[step % 2]
        buffer, model = buffers[name], models[name]
        what = (
            "worker"
            if step < 2
            else numbers.choice(["worker", "learner", "update", "draw"], p=[0.45, 0.15, 0.25, 0.15])
        )
        if what in ("worker", "learner"):
            batch = [next(ids) for _ in range(int(numbers.choice([1, 2, 5, 11, CAPACITY + 7])))]
            write = ("add", rows(batch)[0]) if len(batch) == 1 else ("extend", rows(batch))
            if what == "worker":
                found = call(int(numbers.integers(count)), name, write[0], write[1:])
            else:
                found = getattr(buffer, write[0])(write[1])
            assert np.ravel(found).tolist() == model.write(batch)
        elif what == "update":
            slots = numbers.permutation(len(model.filled()[0]))[:4]
            values = numbers.choice([0.5, 1.0, 2.0, 4.0, float(step + 1)], size=len(slots))
            buffer.update_priority(torch.from_numpy(slots), torch.from_numpy(values).float())
            model.update(slots, values)
        else:
            batch, info = buffer.sample(8, return_info=True)
            held, priorities = model.filled()
            slots = info["index"].numpy()
            assert (batch["id"].numpy() == held[slots]).all()
            np.testing.assert_allclose(info["priority_weight"], priorities.min() / priorities[slots], rtol=1e-5)
    for name, buffer in buffers.items():
        held, priorities = models[name].filled()
        assert buffer.write_count == models[name].written and buffer[:]["id"].tolist() == held.tolist()
        assert buffer.sampler.priorities.tolist() == priorities.tolist()
    check_refusals(call)
    for worker in workers:
        worker.kill()
        worker.join()


def check_refusals(call):
    named = rows([0]).set("index", torch.tensor([0]))
    for name, *given in (
        ("sample", 2),
        ("update_priority", 0, 1.0),
        ("update_tensordict_priority", named),
        ("dumps", "/nowhere"),
        ("state_dict",),
    ):
        told = call(0, KINDS[1].__name__, name, given)
        assert told.startswith("RuntimeError") and "in the process that made the buffer" in told, (name, told)


@pytest.mark.slow
def test_any_interleaving_with_a_started_worker_is_that_of_one_process():
    check_interleavings("spawn", 60, 1, starts_with_worker=True)


@pytest.mark.parametrize("starts_with_worker", [False, True])
def test_any_interleaving_with_forked_workers_is_that_of_one_process(in_a_fork, starts_with_worker):
    in_a_fork(
        """
        from tests.interop.sharing.test_priorities_beside_workers import check_interleavings
        check_interleavings("fork", 120, 2, first)
    """,
        first=starts_with_worker,
    )


def write_many(buffer, number, batches):
    torch.set_num_threads(1)
    for batch in range(batches):
        buffer.extend(rows(torch.arange(7) + 7 * (batch + batches * number)))
        time.sleep(0.0005)


def check_a_race():
    """Each row has the priority of its last update or, if it was written after that, the default one."""
    buffer = make(PrioritizedReplayBuffer, LazyMemmapStorage(CAPACITY))
    buffer.extend(rows(torch.arange(CAPACITY)))
    buffer.sample(8)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write_many, args=(buffer, number, 150)) for number in range(2)]
    for worker in workers:
        worker.start()
    updates = np.zeros((CAPACITY, 3))  # of each slot the last value, and the rows written before and after that update
    step, written = 0, CAPACITY + 2 * 150 * 7
    while buffer.write_count < written - 14:
        batch, info = buffer.sample(8, return_info=True)
        assert (batch["obs"] == batch["id"][:, None]).all()
        slots, step = info["index"].unique(), step + 1
        before, value = buffer.write_count, float(np.float32(1 / (2 + step)))
        buffer.update_priority(slots, value)
        updates[slots] = value, before, buffer.write_count
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert buffer.write_count == written and step > 10
    last = written - 1 - (written - 1 - np.arange(CAPACITY)) % CAPACITY  # the number of the write that each slot has
    value, before, after = updates.T
    found = buffer.prioritized_sampler.priorities.numpy()
    assert (last >= after).any() and (found[last >= after] == 1).all()
    assert (found[last < before] == value[last < before]).all() and ((found == 1) | (found == value)).all()


def test_rows_written_beside_updates_have_a_priority_of_their_own(in_a_fork):
    in_a_fork("""
        from tests.interop.sharing.test_priorities_beside_workers import check_a_race
        check_a_race()
    """)


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_of_several_item_dims_is_refused(kind):
    with pytest.raises(ValueError, match="sync=False needs a storage with ndim=1, got one with ndim=2"):
        make(kind, LazyTensorStorage(8, ndim=2))
    with pytest.raises(ValueError, match="ndim=2"):
        make(kind).set_storage(LazyTensorStorage(8, ndim=2))


def test_data_have_no_priorities_and_delayed_components_no_workers():
    buffer = make()
    with pytest.raises(RuntimeError, match="update_priority=True needs sync=True"):
        buffer.extend(rows(range(4)), update_priority=True)
    assert len(buffer) == 0
    buffer.extend(rows(range(4)), update_priority=False)
    buffer.extend(rows(range(4)))
    buffer.add(rows([4])[0])
    assert buffer.sampler.priorities.tolist() == [1.0] * 9
    buffer.update_tensordict_priority(buffer.sample(8))
    assert set(buffer.sampler.priorities.tolist()) == {1.0, 1e6}
    with pytest.raises(ValueError, match="delayed_init=True exclude"):
        make(PrioritizedReplayBuffer, delayed_init=True)
