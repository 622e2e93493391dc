"""Kills the processes of shards while a learner draws and writers write (R1).

Each write is acknowledged as durable or only as received; checkpoints are made in between. A shard is killed by SIGKILL at
a random time. Then every call must end in time, by an answer or by a `ShardLostError` that names the shard; rows that a
checkpoint held or that were acknowledged as durable must all be there, and no row torn or twice.
"""

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import ray
import torch
from tensordict import TensorDict

from interop import RayReplayBuffer, RemoteError, ShardLostError, TensorDictReplayBuffer
from tests.faults.counts import Counts
from tests.interop.remote import shard_process

SHARDS, CAPACITY, ROWS, LIMIT = 3, 100_000, 16, 120.0  # LIMIT: seconds


def batch(begin: int) -> TensorDict:
    numbers = torch.arange(begin, begin + ROWS)
    return TensorDict({"x": numbers, "wide": numbers[:, None].expand(-1, 64).clone()}, [ROWS])


class Load:
    """A writer and a learner in threads. What was acknowledged, and how calls ended."""

    def __init__(self, buffer: RayReplayBuffer) -> None:
        self.buffer, self.counts = buffer, Counter[str]()
        self.durable: list[int] = []  # first rows of batches
        self._over, self._next = threading.Event(), 0
        self._threads = [threading.Thread(target=each) for each in (self._write, self._draw)]

    def __enter__(self) -> "Load":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for each in self._threads:
            each.join()

    def _write(self) -> None:
        client = self.buffer.client()
        while not self._over.is_set():
            begin, self._next = self._next, self._next + ROWS
            ack = "durable" if begin // ROWS % 2 else "received"
            if self._called(partial(client.extend, batch(begin), ack=ack)) and ack == "durable":
                self.durable.append(begin)

    def _draw(self) -> None:
        client = self.buffer.client()
        while not self._over.is_set():
            self._called(lambda: self.counts.update(torn=int(torn(client.sample()))))

    def _called(self, call) -> bool:
        begun = time.monotonic()
        try:
            call()
        except ShardLostError as error:
            self.counts["lost"] += 1
            self.counts["unnamed"] += error.shard is None or f"shard {error.shard}" not in str(error)
            time.sleep(0.2)
        except RemoteError as error:
            self.counts["other"] += 1
            sys.stderr.write(f"{error}\n")
        else:
            return True
        finally:
            self.counts["late"] += time.monotonic() - begun > LIMIT + 5
        return False


def torn(rows: TensorDict) -> bool:
    return not bool((rows["wide"] == rows["x"][:, None]).all())


def settled(buffer: RayReplayBuffer) -> TensorDict:
    """All rows, as soon as every shard answers again."""
    until = time.monotonic() + 2 * LIMIT
    while True:
        try:
            return buffer[:]
        except ShardLostError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def kills(size: int, seed: int = 0) -> Counts:
    """So many kills."""
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=4, object_store_memory=300 << 20)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _run(size, random.Random(seed), Path(folder))
    finally:
        ray.shutdown()


def _run(size: int, rng: random.Random, folder: Path) -> Counts:
    buffer = RayReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=partial(shard_process.storage, CAPACITY, folder),
        batch_size=64,
        num_shards=SHARDS,
        remote_config={"num_cpus": 0.1, "memory": 0},
        recovery_dir=folder / "recovery",
        timeout=LIMIT,
    )
    counts = Counts(cases=size)
    for shard in range(SHARDS):
        buffer.extend(batch(-ROWS * (shard + 1)), shard=shard, ack="durable")
    with Load(buffer) as load:
        for kill in range(size):
            time.sleep(rng.uniform(0.1, 1.0))
            settled(buffer)
            if kill % 3 == 2:
                buffer.dumps(folder / "saved")
            shard_process.kill(folder, rng.randrange(SHARDS))
            counts.fail("torn rows are there", times=torn(settled(buffer)))
        time.sleep(1)
    found = settled(buffer)
    buffer.close()
    held = Counter(found["x"].tolist())
    expected = {begin + n for begin in load.durable for n in range(ROWS)}
    counts.fail("durable rows are missing", times=len(expected - held.keys()))
    counts.fail("rows are there twice", times=sum(number > 1 for number in held.values()))
    batches = ({begin + n for n in range(ROWS)} for begin in range(0, max(held) + 1, ROWS))
    counts.fail("a batch is there in part", times=sum(len(each & held.keys()) not in (0, ROWS) for each in batches))
    for name in ("torn", "unnamed", "other", "late"):
        counts.fail(f"calls were {name}", times=load.counts[name])
    counts.outcomes.update({"ShardLostError": load.counts["lost"], "durable batches": len(load.durable)})
    return counts
