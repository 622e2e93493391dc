"""Classes of buffers as actor classes of a real Ray cluster."""

import sys

import pytest
import torch
from tensordict import TensorDict

from interop import HERReplayBuffer, ReplayBuffer, TensorDictPrioritizedReplayBuffer
from interop.storages import LazyTensorStorage

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning", "ignore:.*:FutureWarning"
)


def test_an_actor_writes_draws_and_updates(cluster):
    actor_class = TensorDictPrioritizedReplayBuffer.as_remote()
    assert actor_class.is_remote is True and "TensorDictPrioritizedReplayBuffer" in repr(actor_class)
    assert not hasattr(TensorDictPrioritizedReplayBuffer, "is_remote")  # the class itself stays local
    buffer = actor_class.remote(alpha=1.0, beta=1.0, eps=0.0, storage=lambda: LazyTensorStorage(16), batch_size=8)
    ids = torch.arange(12)
    rows = TensorDict({"id": ids, "next": {"obs": ids[:, None] * torch.ones(3)}, "td_error": torch.zeros(12)}, [12])
    assert ray.get(buffer.extend.remote(rows)).tolist() == ids.tolist()
    drawn = rows[5:7].set("index", torch.tensor([5, 6])).set("td_error", torch.tensor([1.0, 3.0]))
    ray.get(buffer.update_tensordict_priority.remote(drawn))
    batch, info = ray.get(buffer.sample.remote(return_info=True))
    assert batch.shape == (8,) and set(batch["id"].tolist()) <= {5, 6}
    assert (batch["next", "obs"] == batch["id"][:, None]).all()
    assert (info["index"] == batch["id"]).all() and "priority_weight" in batch
    assert ray.get(buffer.__len__.remote()) == 12 and ray.get(buffer.stats.remote())["write_count"] == 12
    with pytest.raises(ValueError, match="takes a TensorDict, got int"):
        ray.get(buffer.extend.remote(3))
    ray.kill(buffer)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictPrioritizedReplayBuffer, HERReplayBuffer])
def test_the_resources_of_an_actor(kind, monkeypatch):
    given = []
    monkeypatch.setattr(
        ray, "remote", lambda **options: given.append(options) or (lambda cls: type("Actors", (), {})())
    )
    for cuda, gpus in ((False, {}), (True, {"num_gpus": 0.2})):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=cuda: found)
        assert kind.as_remote().is_remote
        assert given.pop() == {"num_cpus": 1, "memory": 2 * 1024**3, **gpus}
    kind.as_remote({"num_cpus": 2})
    assert given.pop() == {"num_cpus": 2}


def test_bad_options_are_refused():
    with pytest.raises(TypeError, match=r"must be a dict of options of ray\.remote or None, got int"):
        ReplayBuffer.as_remote(3)
    with pytest.raises(ValueError, match="cpus"):
        ReplayBuffer.as_remote({"cpus": 2})


def test_a_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"ray is not installed: pip install 'fbuf\[ray\]'"):
        ReplayBuffer.as_remote()
