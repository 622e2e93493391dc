"""The rate limiter of a buffer in Ray actors: one count for all clients and shards, over checkpoints."""

import contextlib
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from fbuf import RateLimiter as Rule
from interop import LazyTensorStorage, RateLimiter, RayReplayBuffer, RemoteError, TensorDictReplayBuffer
from interop.buffers.rate_counts import RateCounts
from interop.remote.coordinator import Coordinator

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning", "ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning"),
]


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(count)}, [count])


def test_the_coordinator_counts_as_the_rule_says() -> None:
    """Without Ray: the items of each shard, and what fits into it."""
    made = Coordinator(2, Rule(2, 3, (0, 20)))
    with pytest.raises(LookupError, match="has restarted without the counters"):
        made.admit("sample", 1, 0)
    made.set_rates([0, 0], None, [4, 4])
    assert made.admit("sample", 1, 0) == RateCounts(0, 0, 0)
    assert made.admit("extend", 6, 0) is None
    assert made.rates() == RateCounts(6, 0, 4) and made.admit("sample", 12, 0) is None
    assert made.admit("sample", 1, 0) == RateCounts(6, 12, 4)
    assert made.admit("extend", 11, 1) == RateCounts(6, 12, 4) and made.admit("extend", 10, 1) is None
    assert made.rates() == RateCounts(16, 12, 8)
    made.correct("extend", -10, 1)
    made.set_rates([6, 2], None, [4, 4])
    assert made.rates() == RateCounts(8, 10, 6)  # in balance: 8 * 2 - 2 * 3


def built(limiter: RateLimiter | None, **given: Any) -> RayReplayBuffer:
    return RayReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=partial(LazyTensorStorage, 50),
        batch_size=8,
        num_shards=2,
        remote_config={"num_cpus": 0.1, "memory": 0},
        timeout=120,
        limiter=limiter,
        **given,
    )


@pytest.mark.slow  # starts Ray, and two shards twice
def test_clients_wait_for_each_other(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prefetch and limiter exclude"):
        built(RateLimiter(), prefetch=2)
    rb = built(RateLimiter(4, 16, 60, timeout=60))
    done = threading.Event()
    try:

        def act(client: RayReplayBuffer) -> None:
            assert client.limiter is not None
            client.limiter.timeout = 0.5
            while not done.is_set():
                try:
                    client.extend(rows(3))
                except TimeoutError:
                    continue

        actors = [threading.Thread(target=act, args=(client,)) for client in rb.clients(2)]
        for thread in actors:
            thread.start()
        limiter = rb.limiter
        assert limiter is not None
        for _ in range(40):
            assert len(rb.sample()) == 8
            assert limiter.rule.min_diff <= limiter.counts().diff(limiter.rule) <= limiter.rule.max_diff
        done.set()
        for thread in actors:
            thread.join()
        assert limiter.sampled == 320 and limiter.inserted == rb.write_count == rb.stats()["limiter/inserted"]
        ray.kill(limiter._shards._coordinator, no_restart=False)
        limiter.timeout = 60
        until = time.monotonic() + 60
        goes_on = False
        while not goes_on:
            assert time.monotonic() < until
            with contextlib.suppress(RemoteError):  # of calls that are lost with the coordinator, or until it is there
                rb.sample()
                goes_on = limiter.sampled == (limiter.inserted - 16) * 4 + 8  # in balance, and a batch
            time.sleep(0.2)
        assert limiter.inserted == rb.write_count
        limiter.timeout = 0
        with pytest.raises(TimeoutError, match=r"extend.. of 3 items has waited .* for sample.. of another client"):
            while True:
                rb.extend(rows(3))
        with pytest.raises(ValueError, match="need 121"):
            rb.extend(rows(30))
        inserted = limiter.inserted
        sampled = limiter.sampled
        rb.dumps(tmp_path / "rb")
        limiter.timeout = 60
        rb.sample()
        rb.loads(tmp_path / "rb")
        assert (limiter.inserted, limiter.sampled) == (inserted, sampled)
        other = rb.client()
        assert other.limiter is not None and other.limiter.sampled == sampled
        rb.empty()
        assert (limiter.inserted, limiter.sampled) == (0, 0) and not limiter.can_sample()
    finally:
        done.set()
        rb.shutdown()
    with pytest.raises(ValueError, match="the shards have room for 100"):
        built(RateLimiter(min_size=101))
