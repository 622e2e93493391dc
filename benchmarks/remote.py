"""A replay buffer in Ray actors: what does a batch cost beside a bare `ray.get`, and what do several shards cost?

    python benchmarks/remote.py [--quick] [--json FILE]

Batches of 256 rows of 7168 float32, 7 MiB. "ray.get" is one tensor of that size that an actor returns, with nothing drawn
and nothing stored. Then 1 and 4 shards, each with 4 writers in processes of their own that write 64 such rows at a time and
one reader, for some seconds: rows drawn and written in a second. torchrl's RayReplayBuffer stands beside where it can be
imported.
"""

import sys
import time
import warnings
from functools import partial
from typing import Any

import measure
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, RayReplayBuffer, ReplayBuffer

ray = measure.rival("ray")
ROWS, WIDTH, BATCH, CAPACITY = 64, 7168, 256, 2048
CONFIG = {"num_cpus": 0.1, "memory": 0}


class Source:
    """An actor that returns one tensor, again and again."""

    def __init__(self) -> None:
        self.tensor = torch.randn(BATCH, WIDTH)

    def get(self) -> torch.Tensor:
        return self.tensor


def rows(count: int = ROWS) -> TensorDict:
    return TensorDict({"x": torch.randn(count, WIDTH)}, [count])


def buffer(shards: int, capacity: int = CAPACITY) -> RayReplayBuffer:
    made = RayReplayBuffer(
        replay_buffer_cls=ReplayBuffer,
        storage=partial(LazyTensorStorage, capacity // shards),
        batch_size=BATCH,
        num_shards=shards,
        remote_config=CONFIG,
        timeout=300,
    )
    for shard in range(shards):
        made.extend(rows(capacity // shards), shard=shard)
    return made


def torchrl_buffer() -> Any:
    """torchrl's, or None where it cannot be imported."""
    data = measure.rival("torchrl.data")
    if data is None or not hasattr(data, "RayReplayBuffer"):
        return None
    made = data.RayReplayBuffer(
        storage=partial(data.LazyTensorStorage, CAPACITY),
        batch_size=BATCH,
        remote_config={"num_cpus": 0.1},
    )
    made.extend(rows(CAPACITY))
    return made


def written(client: RayReplayBuffer, seconds: float) -> float:
    """Rows that one writer writes in a second."""
    batch, until, count = rows(), time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        client.extend(batch)
        count += ROWS
    return count / seconds


def streams(shards: int, seconds: float) -> tuple[float, float]:
    """Rows drawn, and rows written, in a second by one reader and four writers at once."""
    made = buffer(shards)
    task = ray.remote(num_cpus=0.1)(written)
    ray.get([task.remote(each, 0.1) for each in made.clients(4)])  # imports
    writers = [task.remote(each, seconds) for each in made.clients(4)]
    until, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        made.sample()
        count += BATCH
    total = sum(ray.get(writers))
    made.close()
    return count / seconds, total


def main() -> int:
    options = measure.arguments("A replay buffer in Ray actors").parse_args()
    warnings.simplefilter("ignore")
    if ray is None:
        print("ray is not installed: pip install 'fbuf[ray]'")
        return 0
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=4, object_store_memory=1 << 30)
    source = ray.remote(num_cpus=0.1)(Source).remote()
    ours, rival = buffer(1), torchrl_buffer()
    contenders = {measure.OURS: ours.sample, "ray.get": lambda: ray.get(source.get.remote())}
    if rival is not None:
        contenders["torchrl"] = rival.sample
    title = f"sample {BATCH} rows of 28 KB, one shard"
    timings = [measure.compare(title, contenders, quick=options.quick)]
    batch = rows()
    extends = {measure.OURS: lambda: ours.extend(batch)}
    if rival is not None:
        extends["torchrl"] = lambda: rival.extend(batch)
    timings.append(measure.compare(f"extend {ROWS} rows", extends, quick=options.quick))
    ours.close()
    values = {}
    for shards in (1, 4):
        drawn, put = streams(shards, 2.0 if options.quick else 15.0)
        values |= {f"rows drawn a second, {shards} shards": drawn, f"rows written a second, {shards} shards": put}
    measure.report("a replay buffer in Ray actors", timings, values, options.json)
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
