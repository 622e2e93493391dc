"""Ensembles in several threads and processes, drawn ahead of time, copied and pickled."""

import contextlib
import copy
import gc
import itertools
import multiprocessing
import pickle
import threading
import time
from functools import partial

import pytest
import torch

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    Sampler,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from interop.shared.storage_lock import all_locked, locked
from tests.faults.interrupts import Interrupt, Tracer
from tests.interop.rows import check_same, flat_td
from tests.interop.test_threads import together


def member(first=0, count=8, storage=LazyTensorStorage, **kwargs):
    buffer = TensorDictReplayBuffer(storage=storage(8), **kwargs)
    buffer.extend(flat_td(range(first, first + count)))
    return buffer


# ---------------------------------------------------------------------- locks


@pytest.mark.parametrize("looks", [False, True])
def test_no_lock_is_held_after_an_interrupt(looks):
    """Also without the garbage collector: no exception is in a cycle with a frame that holds a lock."""
    buffers = [member() for _ in range(3)]
    held: list[bool] = []

    def look() -> None:
        for each in buffers:
            is_free = each.storage.lock.threads.acquire(blocking=False)
            if is_free:
                each.storage.lock.threads.release()
            held.append(not is_free)

    gc.disable()
    try:
        for at in itertools.count():
            with contextlib.suppress(Interrupt), Tracer(at, looks) as tracer, all_locked(buffers):
                pass
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            assert not any(held), tracer.where
            if tracer.count <= at:
                break
    finally:
        gc.enable()
    assert at > 30


def test_a_member_that_is_busy_is_waited_for():
    ensemble = ReplayBufferEnsemble(member(), member(), sample_from_all=True)
    drawn = []
    with locked(ensemble[1]):
        thread = threading.Thread(target=lambda: drawn.append(ensemble.sample(4)), daemon=True)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        ensemble[0].extend(flat_td([1]))  # which it does not hold any more
    thread.join(20)
    assert len(drawn) == 1


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_ensembles_of_the_same_members_in_any_order_while_others_write(storage):
    """No deadlock, and no row is torn or of another member than it says."""
    samplers = [None, PrioritizedSampler(8, 1, 1), SamplerWithoutReplacement()]
    members = [member(100 * place, storage=storage, sampler=sampler) for place, sampler in enumerate(samplers)]
    ensembles = [
        ReplayBufferEnsemble(*members, transform=lambda data: data),
        ReplayBufferEnsemble(*members[::-1], sample_from_all=True),
        ReplayBufferEnsemble(*members, batch_size=6, prefetch=2),
    ]
    ends = time.monotonic() + 0.5

    def write(place):
        step = 0
        while time.monotonic() < ends:
            step += 1
            members[place].extend(flat_td([100 * place + step % 90] * 3))
            members[place][0] = flat_td([100 * place + step % 90])[0]

    def read(ensemble, backwards):
        while time.monotonic() < ends:
            sample = ensemble.sample(6)
            for row in sample.unbind(0):  # parts may have unlike lengths
                ids = row["obs"][:, 0]
                assert bool((row["obs"] == ids[:, None]).all()) and bool((row["done"][:, 0] == (ids % 2).bool()).all())
                places = 2 - row["index", "buffer_ids"] if backwards else row["index", "buffer_ids"]
                assert torch.equal(ids // 100, places.float())
            if sample.batch_size[-1] == 2:
                ensemble.update_tensordict_priority(sample.set("td_error", torch.rand(3, 2) + 0.1))

    assert (
        together(
            *(partial(write, place) for place in range(3)),
            partial(read, ensembles[0], backwards=False),
            partial(read, ensembles[1], backwards=True),
            partial(read, ensembles[2], backwards=False),
        )
        == []
    )


# ---------------------------------------------------------------------- refusals leave random numbers as they were


class Refusing(Sampler):
    """Draws random numbers, then refuses."""

    def sample(self, storage, batch_size):
        torch.rand(3, generator=self._rng)
        raise RuntimeError("not now")


@pytest.mark.parametrize("own", [False, True])
def test_a_draw_that_a_member_refuses_is_as_if_it_had_not_been(own):
    generators = [torch.Generator().manual_seed(i) if own else None for i in range(3)]
    members = [
        member(generator=generators[0]),
        member(sampler=SamplerWithoutReplacement(), generator=generators[1]),
        member(sampler=Refusing(), generator=generators[2]),
    ]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    states = [(each or torch.default_generator).get_state() for each in generators]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not now"):
            ensemble.sample(9)
    for each, state in zip(generators, states, strict=True):
        assert torch.equal((each or torch.default_generator).get_state(), state)
    drawn = [ensemble[1].sample(4)["obs"][:, 0] for _ in range(2)]
    assert torch.equal(torch.cat(drawn).sort().values, torch.arange(8.0))  # nothing of the epoch is lost


# ---------------------------------------------------------------------- ahead of time


def test_batches_drawn_ahead_are_those_that_would_be_drawn():
    def batches(prefetch):
        ensemble = ReplayBufferEnsemble(
            member(),
            member(sampler=PrioritizedSampler(8, 1, 1)),
            batch_size=8,
            prefetch=prefetch,
            generator=torch.Generator().manual_seed(3),
            num_buffer_sampled=4,
        )
        return [ensemble.sample() for _ in range(6)]

    first = batches(3)
    for one, other in zip(first, batches(3), strict=True):
        check_same(one, other)
    assert all(batch.shape == (4, 2) for batch in first)


@pytest.mark.parametrize(
    "change",
    [
        lambda ensemble: (ensemble[0].empty(), ensemble[0].extend(flat_td([50]))),
        lambda ensemble: (
            TensorDictReplayBuffer(storage=ensemble[0].storage).empty() or ensemble[0].extend(flat_td([50]))
        ),
        lambda ensemble: ensemble[0].set_storage(member(50, 1).storage),
        lambda ensemble: ensemble[0].append_transform(lambda data: data.set("obs", data["obs"] * 0 + 50)),
        lambda ensemble: ensemble.append_transform(lambda data: data.set("obs", data["obs"] * 0 + 50)),
    ],
)
def test_what_was_drawn_ahead_is_dropped_when_a_member_changes(change):
    ensemble = ReplayBufferEnsemble(member(), batch_size=2, prefetch=3)
    assert (ensemble.sample()["obs"] < 50).all()
    twin = copy.deepcopy(ensemble)
    change(ensemble)
    assert all((ensemble.sample()["obs"] == 50).all() for _ in range(5))
    assert all((twin.sample()["obs"] < 50).all() for _ in range(5))
    change(twin)  # a copy hears of its own members
    assert all((twin.sample()["obs"] == 50).all() for _ in range(5))


# ---------------------------------------------------------------------- copies


def copies(ensemble):
    return [copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_copy_has_members_of_its_own_and_goes_on_alike(storage):
    ensemble = ReplayBufferEnsemble(
        member(storage=storage),
        member(100, storage=storage, sampler=PrioritizedSampler(8, 1, 1)),
        p=[1, 3],
        batch_size=6,
        generator=torch.Generator().manual_seed(4),
        transform=torch.nn.Identity(),
        collate_fns=[None, torch.stack] if storage is ListStorage else None,
    )
    twins = copies(ensemble)
    drawn = [ensemble.sample() for _ in range(3)]
    for twin in twins:
        for wanted in drawn:
            check_same(twin.sample(), wanted)
        assert twin[0] is not ensemble[0] and twin.storage[0] is twin[0].storage and twin.sampler[1] is twin[1].sampler
        assert twin.writer[0] is twin[0].writer and twin.storage.transforms[0] is twin[0].transform
        assert twin.sampler._rng is twin[0].sampler._rng is twin[1]._rng is not ensemble[0]._rng
        assert twin.sampler.p.tolist() == [0.25, 0.75] and repr(twin.transform) == repr(ensemble.transform)
        twin[0].extend(flat_td([77]))
        assert twin.storage[0][0]["obs"][0] == 77 and ensemble.storage[0][0]["obs"][0] == 0


def _sample_in_a_worker(ensemble, answers):
    torch.manual_seed(0)
    sample = ensemble.sample(64)
    ensemble[1].extend(flat_td([77]))
    answers.put((sample["obs"][..., 0].unique().tolist(), sample["index", "buffer_ids"].unique().tolist()))


@pytest.mark.slow
def test_a_worker_samples_and_writes_to_members():
    members = [member(first, 4, storage=LazyMemmapStorage) for first in (0, 50)]
    ensemble = ReplayBufferEnsemble(*members, shared=True, sample_from_all=True)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    worker = context.Process(target=_sample_in_a_worker, args=(ensemble, answers))
    worker.start()
    seen, places = answers.get()
    worker.join(60)
    assert worker.exitcode == 0 and places == [0, 1] and seen == [0, 1, 2, 3, 50, 51, 52, 53]
    assert len(ensemble[1]) == 5 and ensemble[:, -1]["obs"][:, 0].tolist() == [3, 77]
