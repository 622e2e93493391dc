"""`service_backend` of constructors without Ray: the buffer itself as its service, and what is refused."""

import copy
import inspect
import pickle

import pytest
import torch
from tensordict import TensorDict

from interop import (
    HERReplayBuffer,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    RateLimitedReplayBuffer,
    RayReplayBuffer,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

KINDS = {
    ReplayBuffer: {},
    TensorDictReplayBuffer: {},
    PrioritizedReplayBuffer: {"alpha": 0.7, "beta": 0.5},
    TensorDictPrioritizedReplayBuffer: {"alpha": 0.7, "beta": 0.5},
    RateLimitedReplayBuffer: {"samples_per_insert": 1000},
    HERReplayBuffer: {"reward_fn": lambda batch: batch["reward"]},
}
ROWS = TensorDict({"step": torch.arange(8)}, [8])


class PassesOn(ReplayBuffer):
    def __init__(self):
        super().__init__(storage=LazyTensorStorage(8), service_backend="ray")


@pytest.mark.parametrize("kind", KINDS)
def test_a_direct_buffer_is_the_buffer_itself(kind):
    for given in ({}, {"service_backend": None}, {"service_backend": "direct", "transport": "direct"}):
        rb = kind(
            **KINDS[kind], storage=LazyTensorStorage(8), **given, service_backend_options={}, transport_options={}
        )
        assert type(rb) is kind and rb.client() is rb and rb.service_backend == "direct" and rb.is_alive
        rb.extend(ROWS)
        assert len(rb) == 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"service_backend": "process"}, "'process'"),
        ({"service_backend": "Ray"}, "'Ray'"),
        ({"transport": "ray"}, "transport='ray'"),
        ({"transport": "distributed"}, "transport='distributed'"),
        ({"transport_options": {"copy": True}}, "transport_options"),
        ({"service_backend_options": {"remote_config": {}}}, "service_backend_options"),
    ],
)
def test_what_a_direct_buffer_does_not_take(kind, given, named):
    with pytest.raises(ValueError, match=named):
        kind(**KINDS[kind], storage=LazyTensorStorage(8), **given)


@pytest.mark.parametrize("prefetch", [None, 2])
def test_after_shutdown_rows_are_read_but_not_drawn(prefetch, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, prefetch=prefetch)
    rb.extend(ROWS)
    rb.sample()
    rb.shutdown()
    rb.shutdown(timeout=1.0)
    assert not rb.is_alive and (rb.prefetch_queue is None or not len(rb.prefetch_queue))
    for draw in (rb.sample, rb.next, lambda: rb.sample(4, return_info=True), lambda: next(iter(rb))):
        with pytest.raises(RuntimeError, match="shut down"):
            draw()
    rb.extend(ROWS)
    assert torch.equal(rb[:]["step"], torch.arange(16) % 8)
    rb.dumps(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    other.loads(tmp_path)
    assert other.is_alive and len(other.sample()) == 4


def test_shutdown_makes_no_components():
    rb = ReplayBuffer(storage=lambda: pytest.fail("made"), delayed_init=True, batch_size=4, prefetch=2)
    rb.shutdown()
    assert not rb.initialized and not rb.is_alive


def test_an_ensemble_is_a_service_of_this_process():
    rb = ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(8)))
    assert rb.client() is rb and rb.is_alive
    rb.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        rb.sample(2)
    with pytest.raises(TypeError, match="ReplayBufferEnsemble has no service_backend='ray'"):
        ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(8)), service_backend="ray")


def test_buffers_are_copied_and_pickled_with_their_backend():
    rb = ReplayBuffer(storage=LazyTensorStorage(8), service_backend="direct")
    rb.extend(ROWS)
    for twin in (copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert twin.is_alive and torch.equal(twin[:]["step"], rb[:]["step"])


def test_what_ray_does_not_take(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr("interop.remote.cluster.started", lambda *args: pytest.fail("shards were started"))
    ray = {"service_backend": "ray"}
    for given, error, named in (
        ({"storages": None}, TypeError, "did you mean 'storage'"),
        ({"service_backend_options": {"num_cpus": 1}}, TypeError, "no 'num_cpus'.*remote_config"),
        ({"service_backend_options": {"num_shard": 1}}, TypeError, "did you mean 'num_shards'"),
        ({"service_backend_options": [("num_shards", 1)]}, TypeError, "must be a dict"),
        ({"num_shards": 2}, TypeError, "service_backend_options"),
        ({"replay_buffer_cls": ReplayBuffer}, TypeError, "RayReplayBuffer"),
        ({"transport": "direct"}, ValueError, "'direct'"),
        ({"transport": "distributed"}, ValueError, "Gloo"),
        ({"transport_options": {"backend": "gloo"}}, ValueError, "'backend'"),
        ({"storage": LazyTensorStorage(8), "service_backend_options": {"num_shards": 2}}, TypeError, "constructor"),
    ):
        with pytest.raises(error, match=named):
            ReplayBuffer(**ray, **given)
    with pytest.raises(ValueError, match="must be an argument of PassesOn"):
        PassesOn()
    with pytest.raises(ValueError, match="construct the class"):
        RayReplayBuffer(service_backend="direct")
    with pytest.raises(TypeError, match="as arguments"):
        RayReplayBuffer(service_backend="ray", service_backend_options={"num_shards": 2})


def test_the_signatures_name_the_arguments():
    for kind in KINDS:
        parameters = inspect.signature(kind).parameters
        assert {"service_backend", "service_backend_options", "transport", "transport_options"} <= set(parameters)
