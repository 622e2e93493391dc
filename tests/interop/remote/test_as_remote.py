"""Classes of buffers as actor classes: options, and what is refused. `test_ray_buffer` runs one."""

import sys

import pytest
import torch

from interop import HERReplayBuffer, ReplayBuffer, TensorDictPrioritizedReplayBuffer

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning", "ignore:.*:FutureWarning"
)


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


def test_a_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"ray is not installed: pip install 'fbuf\[ray\]'"):
        ReplayBuffer.as_remote()
