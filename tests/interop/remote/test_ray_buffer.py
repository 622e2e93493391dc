"""`RayReplayBuffer` in real Ray actors: its answers, its law, its checkpoints, and what it does when a shard is killed."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    RayReplayBuffer,
    RemoteTimeoutError,
    SamplerWithoutReplacement,
    ShardLostError,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning", "ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
CAPACITY, SHARDS = 20, 3
SMALL = {"num_cpus": 0.1, "memory": 0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(include_dashboard=False, log_to_driver=False, num_cpus=4, object_store_memory=300 << 20)
    yield
    ray.shutdown()


def sampler(alpha: float = 0.7) -> PrioritizedSampler:
    return PrioritizedSampler(CAPACITY, alpha, 0.5)


def built(shards: int, **options: Any) -> RayReplayBuffer:
    return RayReplayBuffer(
        replay_buffer_cls=TensorDictReplayBuffer,
        storage=partial(LazyTensorStorage, CAPACITY),
        sampler=sampler,
        writer=partial(TensorDictRoundRobinWriter, track_generations=True),
        batch_size=8,
        num_shards=shards,
        remote_config=SMALL,
        timeout=120,
        **options,
    )


@pytest.fixture(scope="module")
def three(cluster: None) -> Iterator[RayReplayBuffer]:
    buffer = built(SHARDS)
    yield buffer
    buffer.close()


@pytest.fixture(scope="module")
def durable(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayReplayBuffer]:
    buffer = built(1, recovery_dir=tmp_path_factory.mktemp("recovery") / "of" / "one")
    yield buffer
    buffer.close()


def rows(begin: int, end: int) -> TensorDict:
    numbers = torch.arange(begin, end)
    return TensorDict({"x": numbers, "wide": numbers[:, None].expand(-1, 4000).float()}, [end - begin])


def filled(buffer: RayReplayBuffer, sampler: Any = None) -> torch.Tensor:
    """Empty the buffer, set a sampler, and write rows to all shards, over the end of the ring of the first. The indices."""
    buffer.empty()
    buffer.set_sampler(sampler or PrioritizedSampler(CAPACITY, 0.7, 0.5))
    sizes = (CAPACITY + 5, 8, 3)
    return torch.cat([buffer.extend(rows(100 * n, 100 * n + size), shard=n) for n, size in enumerate(sizes)])


# ---------------------------------------------------------------------- one shard answers as a local buffer does

CALLS: list[tuple[str, Callable[[Any], Any]]] = [
    ("add", lambda rb: rb.add(rows(0, 1)[0])),
    ("extend", lambda rb: rb.extend(rows(1, 15))),
    ("extend", lambda rb: rb.extend(rows(15, 30), update_priority=False)),
    ("len", len),
    ("write_count", lambda rb: rb.write_count),
    ("batch_size", lambda rb: rb.batch_size),
    ("dim_extend", lambda rb: rb.dim_extend),
    ("set_rng", lambda rb: rb.set_rng(torch.Generator().manual_seed(5))),
    ("sample", lambda rb: rb.sample()),
    ("sample", lambda rb: rb.sample(8, return_info=True)),
    ("update_priority", lambda rb: rb.update_priority(torch.arange(8), torch.arange(8.0) + 1)),
    ("update_priority", lambda rb: rb.update_priority(3, 7.0)),
    ("mark_update", lambda rb: rb.mark_update(torch.tensor([3]))),
    (
        "update_tensordict_priority",
        lambda rb: rb.update_tensordict_priority(rb[:5].set("td_error", torch.rand(5) * 0 + 2)),
    ),
    ("sample", lambda rb: rb.sample(return_info=True)),
    ("getitem", lambda rb: [rb[3], rb[2:7], rb[torch.tensor([1, 9])], rb["x"], rb[:]]),
    ("setitem", lambda rb: rb.__setitem__(torch.tensor([1, 4]), rows(50, 52).set("index", torch.tensor([1, 4])))),
    (
        "update_if_present",
        lambda rb: vars(
            rb.update_if_present(index=torch.tensor([1]), generation=torch.tensor([1]), patch={"x": torch.tensor([9])})
        ),
    ),
    ("append_transform", lambda rb: rb.append_transform(methodcaller("copy")) is rb),
    ("insert_transform", lambda rb: rb.insert_transform(0, methodcaller("copy")) is rb),
    ("next", lambda rb: rb.next()),
    ("iterate", lambda rb: [batch for batch, _ in zip(rb, range(3), strict=False)]),
    ("state_dict", lambda rb: sorted(rb.state_dict())),
    ("load_state_dict", lambda rb: rb.load_state_dict(rb.state_dict())),
    ("getitem", lambda rb: rb[:]),
    ("share", lambda rb: None if rb.share(False) is rb else 1),
    ("bad index", lambda rb: rb[99]),
    ("bad write", lambda rb: rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))),
    ("bad priority", lambda rb: rb.update_priority(torch.arange(2), torch.tensor([1.0, -1.0]))),
    ("empty", lambda rb: rb.empty()),
    ("empty draw", lambda rb: rb.sample()),
    ("set_writer", lambda rb: [rb.set_writer(TensorDictRoundRobinWriter())].clear()),
    ("set_storage", lambda rb: [rb.set_storage(LazyTensorStorage(CAPACITY))].clear()),
    ("set_sampler", lambda rb: [rb.set_sampler(SamplerWithoutReplacement())].clear()),
    ("extend", lambda rb: rb.extend(rows(0, 12))),
    ("an epoch", lambda rb: [sorted(batch["x"].tolist()) and len(batch) for batch in rb]),
]


def outcome(call: Callable[[Any], Any], buffer: Any) -> Any:
    try:
        return call(buffer)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        return type(error).__name__, str(error)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, TensorDict):
        return sorted(a.keys(True, True)) == sorted(b.keys(True, True)) and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b) and a == b


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_shard_answers_as_a_local_buffer(durable: RayReplayBuffer) -> None:
    local = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=sampler(),
        writer=TensorDictRoundRobinWriter(track_generations=True),
        batch_size=8,
    )
    for name, call in CALLS:
        expected, found = outcome(call, local), outcome(call, durable)
        if isinstance(expected, TensorDictReplayBuffer | RayReplayBuffer):
            continue
        assert same(expected, found), (name, expected, found)
    assert durable.stats()["size"] == len(local)
    durable.set_sampler(sampler())


# ---------------------------------------------------------------------- three shards answer as one buffer


def test_indices_lead_home(three: RayReplayBuffer) -> None:
    index = filled(three)
    assert (
        len(three) == CAPACITY + 8 + 3 and three.write_count == len(index) and three.stats()["capacity"] == 3 * CAPACITY
    )
    assert index.tolist() == [*range(CAPACITY), *range(5), *range(20, 28), *range(40, 43)]
    mixed = torch.tensor([41, 2, 27, 19, 40])
    assert three[mixed]["x"].tolist() == [201, 22, 107, 19, 200] and int(three[41]["x"]) == 201
    assert three[:]["x"].tolist() == [20, 21, 22, 23, 24, *range(5, 20), *range(100, 108), *range(200, 203)]
    assert three[18:22]["x"].tolist() == [18, 19, 100, 101] and three["x"].equal(three[:]["x"])
    mask = torch.zeros(len(three), dtype=torch.bool)
    mask[-1] = True
    assert three[mask]["x"].tolist() == [202]
    three[mixed] = three[mixed].set("x", torch.arange(5))
    three.update_if_present(index=mixed[:2], generation=torch.tensor([0, 9]), patch={"x": torch.tensor([7, 8])})
    assert three[mixed]["x"].tolist() == [7, 1, 2, 3, 4]
    with pytest.raises(IndexError, match="3 shards have 60 slots"):
        three.update_priority(torch.tensor([60]), 1.0)
    with pytest.raises(ValueError, match=r"shard 2 has items|all shards hold items of one layout"):
        three.empty()
        three.set_storage(partial(LazyTensorStorage, CAPACITY))
        three.extend(rows(0, 2), shard=2)
        three.extend(TensorDict({"y": torch.zeros(2)}, [2]), shard=0)


def test_priorities_over_shards_follow_the_law_of_one_buffer(three: RayReplayBuffer) -> None:
    index = filled(three)
    batch = three.sample(16)
    three.update_tensordict_priority(batch.set("td_error", torch.rand(16) + 0.1))
    stored = index[5:]
    priorities = torch.rand(len(stored)) + 0.1
    three.update_priority(stored, priorities)
    new = three.extend(rows(300, 302), shard=1)  # with the largest priority of that shard so far
    known = dict(zip(stored.tolist(), priorities.tolist(), strict=True))
    three.update_priority(new, 2.0)
    known |= dict.fromkeys(new.tolist(), 2.0)
    slots = sorted(known)
    law = np.array([(known[slot] + 1e-8) ** 0.7 for slot in slots])
    law /= law.sum()
    counts = np.zeros(3 * CAPACITY)
    batches = [three.sample(500, return_info=True) for _ in range(8)]
    for _, info in batches:
        counts += np.bincount(info["index"].numpy(), minlength=len(counts))
    assert stats.chisquare(counts[slots], law * counts.sum()).pvalue > 1e-4 and counts.sum() == counts[slots].sum()
    batch, info = batches[0]
    weight = dict(zip(slots, (law / law.min()) ** -0.5, strict=True))
    expected = torch.tensor([weight[slot] for slot in info["index"].tolist()])
    torch.testing.assert_close(info["priority_weight"].double(), expected, rtol=1e-4, atol=0)
    assert batch["index"].equal(info["index"]) and batch["x"].equal(three[info["index"]]["x"])


def test_epochs_slices_and_prefetch_over_shards(three: RayReplayBuffer) -> None:
    filled(three, SamplerWithoutReplacement())
    drawn = torch.cat([batch["x"] for batch in three])
    assert sorted(drawn.tolist()) == sorted(three["x"].tolist())
    three.empty()
    three.set_sampler(SliceSampler(slice_len=4, traj_key="episode", strict_length=True))
    client = three.client()
    homes = [client.extend(rows(n, n + 6).set("episode", torch.full((6,), n)))[0] for n in (0, 10)]
    assert [int(home) // CAPACITY for home in homes] == [0, 0]  # a stream of trajectories stays whole
    three.extend(rows(50, 56).set("episode", torch.full((6,), 50)), shard=2)
    slices = torch.cat([three.sample()["x"].reshape(2, 4) for _ in range(12)])
    assert (slices.diff(dim=1) == 1).all() and {0, 10, 50} == {int(row[0]) // 10 * 10 for row in slices}
    three.set_sampler(RandomSampler())
    ahead = three.client(prefetch=2)
    assert all(len(ahead.sample()) == 8 for _ in range(4)) and ahead.stats()["prefetch_queue_size"] == 2
    ahead.empty()
    assert ahead.stats()["prefetch_queue_size"] == 0
    with pytest.raises(RuntimeError, match="empty"):
        ahead.sample()


def test_latest_totals_keep_the_weights_exact(three: RayReplayBuffer) -> None:
    filled(three)
    client = three.client(totals="latest")
    client.sample(4)
    three.update_priority(torch.arange(CAPACITY), 50.0)  # which the client does not know yet
    _, info = client.sample(400, return_info=True)
    weight = {int(slot): float(each) for slot, each in zip(info["index"], info["priority_weight"], strict=True)}
    same = {slot: each for slot, each in weight.items() if slot < CAPACITY}
    assert len(set(np.round(list(same.values()), 5))) == 1
    three.empty()
    three.extend(rows(0, 3), shard=2)
    assert len(client.sample(5)) == 5  # totals that are no longer true are asked again
    three.extend(rows(10, 20), shard=0)  # which was empty when it was asked
    assert int(torch.cat([client.sample(5)["x"] for _ in range(10)]).max()) >= 10


def test_clients_in_tasks_write_and_batches_lie_in_the_object_store(three: RayReplayBuffer) -> None:
    three.empty()
    three.set_sampler(RandomSampler())

    @ray.remote(num_cpus=0.1)
    def write(client: RayReplayBuffer, begin: int) -> tuple[list[int], str]:
        try:
            client.shutdown()
        except RuntimeError as error:
            return [
                int(each) // CAPACITY for n in range(3) for each in client.extend(rows(begin + n, begin + n + 1))
            ], str(error)
        return [], "it was shut down"

    found = ray.get([write.remote(client, 10 * n) for n, client in enumerate(three.clients(2))], timeout=120)
    assert [each[0] for each in found] == [[0, 1, 2], [1, 2, 0]] and "cannot shut" in found[0][1]
    assert sorted(three["x"].tolist()) == [0, 1, 2, 10, 11, 12]
    three.empty()
    three.extend(rows(0, 10), shard=1)
    shared = three.sample(256)["wide"]  # 4 MB, of one shard
    assert not is_writable(shared)
    assert is_writable(three.client(copy=True).sample(256)["wide"])


def is_writable(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is private to this process, by the map of the kernel."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split()[1].endswith("p")
    raise AssertionError("no such memory")


# ---------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_of_one_moment_and_goes_into_other_numbers(
    three: RayReplayBuffer, durable: RayReplayBuffer, tmp_path: Path
) -> None:
    three.empty()
    three.set_sampler(PrioritizedSampler(CAPACITY, 0.7, 0.5))
    going = threading.Event()

    def write(client: RayReplayBuffer) -> None:
        n = 0
        while not going.is_set() and n < 5 * SHARDS:
            client.extend(rows(n, n + 1))  # to each shard in order, each write after the one before
            n += 1

    for shard in range(SHARDS):  # what the writer writes to
        three.extend(rows(500 + shard, 501 + shard), shard=shard)
    three.update_priority(torch.tensor([0, 20, 40]), torch.tensor([3.0, 4.0, 5.0]))
    writer = threading.Thread(target=write, args=(three.client(),))
    writer.start()
    time.sleep(0.1)
    three.dumps(tmp_path / "saved")
    going.set()
    writer.join()
    three.dumps(tmp_path / "saved2")
    three.loads(tmp_path / "saved")
    found = sorted(three["x"].tolist())
    written = [each for each in found if each < 500]
    assert written == list(range(len(written)))  # no write is there without those before
    assert len(list((tmp_path / "saved").glob("shards-*"))) == 1
    three.extend(rows(900, 901))
    three.loads(tmp_path / "saved")
    assert sorted(three["x"].tolist()) == found
    durable.empty()
    durable.loads(tmp_path / "saved")
    assert sorted(durable["x"].tolist()) == found
    index = {int(x): n for n, x in enumerate(durable["x"])}
    three.dumps(tmp_path / "saved")
    _, info = durable.sample(600, return_info=True)
    weight = dict(zip(info["index"].tolist(), info["priority_weight"].tolist(), strict=True))
    assert weight[index[500]] / weight[index[502]] == pytest.approx((5 / 3) ** 0.35, rel=1e-3)


# ---------------------------------------------------------------------- shards that die


def until_it_works(buffer: RayReplayBuffer, call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Repeat a call until no shard is lost any more; what it returned, and what the errors said."""
    told, until = [], time.monotonic() + 100
    while time.monotonic() < until:
        try:
            return call(), told
        except ShardLostError as error:
            told.append(str(error))
            time.sleep(0.2)
    raise AssertionError(told)


def test_a_killed_shard_goes_on_from_its_checkpoint(three: RayReplayBuffer, tmp_path: Path) -> None:
    other = three.client()
    filled(three)
    three.dumps(tmp_path / "saved")
    before = three["x"]
    three.extend(rows(700, 702), shard=1)  # is in no checkpoint
    begun = time.monotonic()
    os.kill(three.process_ids[1], signal.SIGKILL)
    with pytest.raises(ShardLostError, match=f"shard 1 was lost.*restarts from the checkpoint {tmp_path}") as raised:
        three.sample()
    assert raised.value.shard == 1 and time.monotonic() - begun < 60
    found, _ = until_it_works(three, lambda: three["x"])
    assert found.equal(before)
    with pytest.raises(ShardLostError, match="goes on from the checkpoint"):
        other.extend(rows(0, 1), shard=1)  # a client with no call in flight hears of it once, before it writes
    assert len(other.extend(rows(0, 1), shard=1)) == 1 and len(three) == len(before) + 1


def test_durable_writes_are_never_lost(durable: RayReplayBuffer, tmp_path: Path) -> None:
    durable.empty()
    durable.set_storage(partial(LazyTensorStorage, CAPACITY))
    durable.extend(rows(0, 3), ack="durable")
    durable.dumps(tmp_path / "saved")
    durable.extend(rows(3, 5), ack="durable")
    durable.add(rows(5, 6)[0], ack="durable")
    durable.extend(rows(80, 82))  # only received
    with pytest.raises(KeyError):
        durable.extend(TensorDict({"other": torch.zeros(2)}, [2]), ack="durable")
    os.kill(durable.process_ids[0], signal.SIGKILL)
    found, told = until_it_works(durable, lambda: durable["x"])
    assert found.tolist() == [0, 1, 2, 3, 4, 5] and "shard 0 was lost" in told[0]


def test_a_time_limit_ends_every_call(three: RayReplayBuffer) -> None:
    client = three.client(timeout=1.0)
    three.empty()
    three.extend(rows(0, 3))
    pid = three.process_ids[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(RemoteTimeoutError, match="shard 0 did not answer share"):
            client.sample()
        assert time.monotonic() - begun < 10
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(three.sample()) == 8 and three.is_alive


# ---------------------------------------------------------------------- bad input that needs a cluster


def test_a_cluster_without_room_is_refused_in_time(cluster: None) -> None:
    with pytest.raises(RemoteTimeoutError, match=r"'num_cpus': 50.*reserve less"):
        RayReplayBuffer(storage=partial(LazyTensorStorage, 4), remote_config={"num_cpus": 50}, timeout=2)
    with pytest.raises(ValueError, match="max_size"):
        RayReplayBuffer(storage=partial(LazyTensorStorage, -4), remote_config=SMALL, timeout=120)
