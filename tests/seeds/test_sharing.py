"""A buffer that another process extends, as it is seen from here."""

import pytest
import torch
from tensordict import TensorDict
from torch import multiprocessing as mp

from interop import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer

# Python and JAX warn of threads that a fork does not take along. The worker starts none.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*")
each_start = pytest.mark.parametrize("method", ["fork", "spawn"])


def worker(rb):
    # Updates the replay buffer with new data
    td = TensorDict({"a": torch.ones(10)}, [10])
    rb.extend(td)


def worker_with_several(buffers, results):
    for rb in buffers:
        worker(rb)
        results.put(sorted(set(rb.sample(1000)["a"].tolist())))


def run(method, target, *args):
    """The exit code of a process."""
    proc = mp.get_context(method).Process(target=target, args=args)
    proc.start()
    proc.join(120)
    return proc.exitcode


def filled(storage):
    rb = TensorDictReplayBuffer(storage=storage)
    td = TensorDict({"a": torch.zeros(10)}, [10])
    rb.extend(td)
    return rb


def check_both_wrote(rb):
    # the replay buffer now has a length of 20, since the worker updated it
    assert len(rb) == 20
    assert (rb["_data", "a"][:10] == 0).all()  # data from main process
    assert (rb["_data", "a"][10:20] == 1).all()  # data from remote process
    assert rb["a"].shape == (20,)
    assert rb["index"].tolist() == list(range(20))
    assert rb.write_count == 20


def check_goes_on(rb):
    assert set(rb.sample(1000)["a"].tolist()) == {0, 1}
    rb.extend(TensorDict({"a": torch.full((2,), 2.0)}, [2]))  # where the worker stopped, around the end
    assert rb["a"].tolist() == [2, *[0] * 9, *[1] * 10, 2]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])  # with several, below
def test_a_worker_extends_the_buffer(method):
    rb = filled(LazyMemmapStorage(21))
    assert run(method, worker, rb) == 0
    check_both_wrote(rb)
    check_goes_on(rb)


@each_start
def test_a_worker_extends_and_samples_several_buffers(method, tmp_path):
    buffers = [filled(LazyMemmapStorage(21)), filled(LazyMemmapStorage(21, scratch_dir=tmp_path / "rows"))]
    if method == "spawn":
        buffers.append(filled(LazyTensorStorage(21)))
    for rb in buffers:
        assert set(rb.sample(1000)["a"].tolist()) == {0}
    results = mp.get_context(method).SimpleQueue()
    assert run(method, worker_with_several, buffers, results) == 0
    for rb in buffers:
        assert results.get() == [0, 1]
        check_both_wrote(rb)
        check_goes_on(rb)
    assert (tmp_path / "rows" / "a.memmap").exists()  # a worker that ends removes nothing


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_forked_worker_loses_no_rows_in_silence(storage):
    rb = filled(storage(21))
    if run("fork", worker, rb) == 0:
        check_both_wrote(rb)
    else:  # the worker was refused
        assert len(rb) == rb.write_count == 10
    before = rb.write_count
    rb.extend(TensorDict({"a": torch.full((2,), 2.0)}, [2]))
    assert rb.write_count == before + 2 and len(rb) == min(rb.write_count, 21)


def test_two_workers_take_turns_in_a_shared_buffer():
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(40), shared=True)
    rb.extend(TensorDict({"a": torch.zeros(10)}, [10]))
    workers = [mp.get_context("fork").Process(target=worker, args=(rb,)) for _ in range(2)]
    for proc in workers:
        proc.start()
    for proc in workers:
        proc.join(120)
        assert proc.exitcode == 0
    assert len(rb) == rb.write_count == 30
    assert rb["a"].tolist() == [0] * 10 + [1] * 20
