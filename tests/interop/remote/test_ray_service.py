"""`service_backend="ray"` of a constructor, in a real Ray actor. Beside torchrl's, where that is installed."""

import importlib
import importlib.util
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import interop
from interop import LazyTensorStorage, RayReplayBuffer, ReplayBuffer, TensorDictPrioritizedReplayBuffer

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning", "ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning"),
]
SMALL = {"remote_config": {"num_cpus": 0.1, "memory": 0}}
ROWS = TensorDict({"step": torch.arange(8)}, [8])


class Own(ReplayBuffer):
    """A class of a user's, with a positional argument, and without the arguments of services."""

    def __init__(self, capacity: int, batch_size: int = 4) -> None:
        super().__init__(storage=LazyTensorStorage(capacity), batch_size=batch_size)


def test_a_buffer_in_an_actor(cluster: None) -> None:
    rb: Any = TensorDictPrioritizedReplayBuffer(
        alpha=0.7,
        beta=0.5,
        storage=partial(LazyTensorStorage, 10),
        batch_size=4,
        service_backend="ray",
        service_backend_options={**SMALL, "timeout": 120},
        transport="auto",
        transport_options={"copy": True},
    )
    try:
        assert type(rb) is RayReplayBuffer and rb.service_backend == rb.transport_kind == "ray" and rb.is_alive
        assert torch.equal(rb.extend(ROWS), torch.arange(8))
        client = pickle.loads(pickle.dumps(rb.client()))
        assert int(client.add(ROWS[3])) == 8
        rb.update_priority(torch.arange(9), torch.tensor([0.0] * 5 + [1.0] + [0.0] * 3))
        batch = rb.sample()
        assert batch["step"].tolist() == [5] * 4 and batch["index"].tolist() == [5] * 4
        batch["step"].zero_()  # copied: writable
        with pytest.raises(RuntimeError, match="client cannot shut"):
            client.shutdown()
    finally:
        rb.shutdown()
    assert not rb.is_alive
    with pytest.raises(RuntimeError, match="shut down"):
        rb.start()


@pytest.mark.slow
def test_options_of_shards_and_classes_of_users(cluster: None) -> None:
    rb: Any = Own(20, batch_size=5, service_backend="ray", service_backend_options={**SMALL, "num_shards": 2})
    try:
        for shard in (0, 1):
            rb.extend(ROWS, shard=shard)
        assert len(rb) == 16 and len(rb.sample()) == 5 and rb.stats()["shards"] == 2
    finally:
        rb.shutdown()


@pytest.mark.slow
def test_as_torchrl(cluster: None) -> None:
    if importlib.util.find_spec("torchrl") is None:
        pytest.skip("torchrl is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = importlib.import_module("torchrl.data")
    found = []
    for library in (interop, other):
        rb = library.ReplayBuffer(
            storage=partial(library.LazyTensorStorage, 10),
            batch_size=4,
            service_backend="ray",
            service_backend_options=SMALL,
            transport="ray",
        )
        try:
            client = rb.client()
            index = rb.extend(ROWS), client.extend(ROWS)
            batch = client.sample()
            facts = type(rb).__name__, rb.service_backend, rb.transport_kind, rb.is_alive, len(rb), rb.write_count
            shapes = [(key, each.dtype, each.shape) for key, each in batch.items()]
            found.append((facts, [each.tolist() for each in index], shapes, rb[:]["step"].tolist(), rb.start() is rb))
        finally:
            rb.shutdown()
        rb.shutdown()
        assert not rb.is_alive
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
def test_what_torchrl_refuses_is_refused() -> None:
    other = pytest.importorskip("torchrl.data")
    for given in (
        {"service_backend": "process"},
        {"transport": "ray"},
        {"transport_options": {"backend": "gloo"}},
        {"service_backend_options": {"remote_config": {}}},
        {"service_backend": "ray", "transport": "direct"},
        {"service_backend": "ray", "service_backend_options": {"num_cpus": 1}},
    ):
        for library in (interop, other):
            with pytest.raises((ValueError, TypeError)):
                library.ReplayBuffer(storage=partial(library.LazyTensorStorage, 10), **given)
