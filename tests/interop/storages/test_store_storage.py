"""A storage in a server of the Redis protocol, beside one in memory: a real server, or none of these tests."""

import copy
import gc
import shutil
import socket
import subprocess
import time

import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    SliceSampler,
    StoreStorage,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

redis = pytest.importorskip("redis")
SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = pytest.mark.skipif(SERVER is None, reason="no redis-server")


@pytest.fixture(scope="module")
def port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        number = free.getsockname()[1]
    server = subprocess.Popen(
        [SERVER, "--port", str(number), "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL
    )
    client = redis.Redis(port=number)
    for _ in range(100):
        try:
            client.ping()
            break
        except redis.exceptions.ConnectionError:
            time.sleep(0.05)
    yield number
    server.terminate()
    server.wait()


def rows(first: int, count: int) -> TensorDict:
    numbers = torch.arange(first, first + count)
    data = {
        "obs": numbers[:, None] + torch.rand(3),
        "next": {"done": numbers[:, None] % 5 == 4, "r": numbers.bfloat16()},
    }
    return TensorDict({**data, "text": [str(each) * (each % 4) for each in numbers.tolist()]}, [count])


def test_the_same_history_in_memory(port: int, tmp_path) -> None:
    client = redis.Redis(port=port)
    client.flushall()
    rb, other = (TensorDictReplayBuffer(storage=each) for each in (StoreStorage(10, port=port), LazyTensorStorage(10)))
    for first in (0, 6, 12):
        data = rows(first, 6)
        assert torch.equal(rb.extend(data), other.extend(data))
    rb[2] = other[2] = rows(50, 1)[0].set("index", torch.tensor(2))
    index = torch.tensor([3, 3, 9, 0])
    for place in (slice(None), index, 4):
        left, right = rb[place], other[place]
        assert all((left[key] == right[key]).all() for key in ("obs", ("next", "done"), ("next", "r"), "index"))
        assert left["text"] == right["text"]
    assert client.dbsize() == 10
    twin = copy.deepcopy(rb)
    rb.dumps(tmp_path / "rb")
    rb.empty()
    assert (len(rb), client.dbsize()) == (0, 10)
    rb.loads(tmp_path / "rb")
    assert torch.equal(rb[:]["obs"], twin[:]["obs"])
    del rb, twin
    gc.collect()
    assert client.dbsize() == 0


def test_slices_and_priorities(port: int) -> None:
    rb = TensorDictReplayBuffer(storage=StoreStorage(30, port=port), sampler=SliceSampler(slice_len=3), batch_size=30)
    rb.extend(rows(0, 40))
    assert (rb.sample()["obs"][:, 0].floor().reshape(10, 3).diff(dim=1) == 1).all()
    rb = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=StoreStorage(30, port=port), batch_size=30)
    rb.extend(rows(0, 30))
    rb.update_priority(torch.arange(30), torch.arange(30) % 2 + 0.0)
    assert (rb.sample()["index"] % 2 == 1).all()


def test_a_server_that_is_not_there_or_has_lost_items(port: int) -> None:
    rb = TensorDictReplayBuffer(storage=StoreStorage(10, port=1), batch_size=2)
    with pytest.raises(ConnectionError, match="localhost:1"):
        rb.extend(rows(0, 2))
    rb = TensorDictReplayBuffer(storage=StoreStorage(10, port=port), batch_size=2)
    rb.extend(rows(0, 2))
    redis.Redis(port=port).flushall()
    with pytest.raises(RuntimeError, match="noeviction"):
        rb[0]
