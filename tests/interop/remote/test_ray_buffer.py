"""`RayReplayBuffer` in real Ray actors: its answers, its law, its checkpoints, and what it does when a shard is killed.

A process that imports the library takes 4 seconds of CPU. So two buffers serve all checks, which are functions that one
test calls: a run that distributes tests over processes starts one cluster.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

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
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from tests.interop.remote import shard_process

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning", "ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::UserWarning"),
]
CAPACITY, SHARDS = 20, 3
SMALL = {"num_cpus": 0.1, "memory": 0}
prioritized = partial(PrioritizedSampler, CAPACITY, 0.7, 0.5)


class Buffers(NamedTuple):
    """One of three shards, one of one shard with a recovery folder, and the folders with the ids of their processes."""

    three: RayReplayBuffer
    one: RayReplayBuffer
    processes_of_three: Path
    processes_of_one: Path


@pytest.fixture(scope="module")
def buffers(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buffers]:
    folders = [tmp_path_factory.mktemp(name) for name in ("three", "one", "recovery")]

    def built(folder: Path, shards: int, recovery_dir: Path | None) -> RayReplayBuffer:
        return RayReplayBuffer(
            replay_buffer_cls=TensorDictReplayBuffer,
            storage=partial(shard_process.storage, CAPACITY, folder),
            sampler=prioritized,
            writer=partial(TensorDictRoundRobinWriter, track_generations=True),
            batch_size=8,
            num_shards=shards,
            remote_config=SMALL,
            timeout=120,
            recovery_dir=recovery_dir,
        )

    with ThreadPoolExecutor() as pool:
        made = list(pool.map(built, folders[:2], (SHARDS, 1), (None, folders[2] / "of" / "one")))
    yield Buffers(*made, *folders[:2])
    client = made[0].client()
    for each in made:
        each.close()
    with pytest.raises(ShardLostError, match="does not restart"):
        client.sample()


def rows(begin: int, end: int) -> TensorDict:
    numbers = torch.arange(begin, end)
    return TensorDict({"x": numbers, "wide": numbers[:, None].expand(-1, 4000).float()}, [end - begin])


def filled(buffer: RayReplayBuffer, sampler: Any = prioritized) -> torch.Tensor:
    """Empty the buffer, set a sampler, and write rows to all shards, over the end of the ring of the first. The indices."""
    buffer.empty()
    buffer.set_sampler(sampler)
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


def one_shard_answers_as_a_local_buffer(buffer: RayReplayBuffer) -> None:
    local = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=prioritized(),
        writer=TensorDictRoundRobinWriter(track_generations=True),
        batch_size=8,
    )
    for name, call in CALLS:
        expected, found = outcome(call, local), outcome(call, buffer)
        if isinstance(expected, TensorDictReplayBuffer | RayReplayBuffer):
            continue
        assert same(expected, found), (name, expected, found)
    assert buffer.stats()["size"] == len(local)
    buffer.set_sampler(prioritized())


# ---------------------------------------------------------------------- three shards answer as one buffer


def indices_lead_home(three: RayReplayBuffer) -> None:
    index = filled(three)
    assert len(three) == CAPACITY + 8 + 3 and three.write_count == len(index)
    assert three.stats()["capacity"] == 3 * CAPACITY
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
    nothing = torch.tensor([], dtype=torch.int64)
    assert len(three[nothing]) == len(three[5:5]) == 0 and int(three[-1]["x"]) == int(three[42]["x"])
    for call in (lambda: three.update_priority(torch.tensor([60]), 1.0), lambda: three[60]):
        with pytest.raises(IndexError, match="3 shards have 60 slots"):
            call()
    for count in (4, 6):  # neither cut off nor half written
        for call in (
            lambda n: three.update_priority(mixed, torch.ones(n)),
            lambda n: three.__setitem__(mixed, rows(0, n)),
        ):
            with pytest.raises(RuntimeError, match=f"{count} rows were given for 5 indices.*nothing was written"):
                call(count)
    assert three[mixed]["x"].tolist() == [7, 1, 2, 3, 4]
    three.empty()
    three.set_storage(partial(LazyTensorStorage, CAPACITY))
    with pytest.raises(RuntimeError, match="non-initialized storage"):
        three[:]
    three.extend(rows(0, 2), shard=2)
    with pytest.raises(ValueError, match=r"shard 2 has items.*all shards hold items of one layout"):
        three.extend(TensorDict({"y": torch.zeros(2)}, [2]), shard=0)


def priorities_follow_the_law_of_one_buffer(three: RayReplayBuffer) -> None:
    index = filled(three)
    batch = three.sample(16)
    with pytest.raises(KeyError, match=r"no entry 'td_error'.*did you mean 'td_eror'\?"):
        three.update_tensordict_priority(batch.exclude("td_error").set("td_eror", torch.rand(16)))
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
    batches = [three.sample(500, return_info=True) for _ in range(8)]
    counts = sum(np.bincount(info["index"].numpy(), minlength=3 * CAPACITY) for _, info in batches)
    assert stats.chisquare(counts[slots], law * counts.sum()).pvalue > 1e-4 and counts.sum() == counts[slots].sum()
    batch, info = batches[0]
    weight = dict(zip(slots, (law / law.min()) ** -0.5, strict=True))
    expected = torch.tensor([weight[slot] for slot in info["index"].tolist()])
    torch.testing.assert_close(info["priority_weight"].double(), expected, rtol=1e-4, atol=0)
    assert batch["index"].equal(info["index"]) and batch["x"].equal(three[info["index"]]["x"])
    drawn = []
    for _ in range(2):  # the same numbers give the same batch
        three.set_rng(torch.Generator().manual_seed(3))
        drawn.append(three.sample(9)["index"])
    assert drawn[0].equal(drawn[1]) and not drawn[0].equal(three.sample(9)["index"])
    three.set_rng(None)


def epochs_give_each_row_once(three: RayReplayBuffer) -> None:
    filled(three, SamplerWithoutReplacement)
    drawn = torch.cat([batch["x"] for batch in three])
    assert sorted(drawn.tolist()) == sorted(three["x"].tolist())
    learners = [three.client(), three.client()]  # share an epoch
    with ThreadPoolExecutor() as pool:
        halves = list(pool.map(lambda each: [each.sample(4)["x"] for _ in range(3)], learners))
    both = torch.cat([batch for half in halves for batch in half])
    assert len(both) == len(both.unique()) == 24


def slices_and_batches_ahead(three: RayReplayBuffer) -> None:
    three.empty()
    three.set_sampler(SliceSampler(slice_len=4, traj_key="episode", strict_length=True))
    client = three.client()
    homes = [client.extend(rows(n, n + 6).set("episode", torch.full((6,), n)))[0] for n in (0, 10)]
    assert len({int(home) // CAPACITY for home in homes}) == 1  # a stream of trajectories stays whole
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


def latest_totals_keep_the_weights_exact(three: RayReplayBuffer) -> None:
    filled(three)
    client = three.client(totals="latest")
    client.sample(4)
    three.update_priority(torch.arange(CAPACITY), 50.0)  # which the client does not know yet
    _, info = client.sample(500, return_info=True)
    of_first = info["index"] < CAPACITY
    assert len(np.unique(np.round(info["priority_weight"][of_first].numpy(), 5))) == 1
    three.empty()
    three.extend(rows(0, 3), shard=2)
    assert len(client.sample(5)) == 5  # totals that are no longer true are asked again
    three.extend(rows(10, 20), shard=0)  # which was empty when it was asked
    assert int(torch.cat([client.sample(5)["x"] for _ in range(10)]).max()) >= 10


def clients_write_from_tasks(three: RayReplayBuffer) -> None:
    three.empty()
    three.set_sampler(RandomSampler())

    def write(clients: list[RayReplayBuffer], data: list[list[TensorDict]]) -> tuple[list[list[int]], str]:
        pairs = zip(clients, data, strict=True)
        found = [[int(client.extend(each)[0]) // 20 for each in batches] for client, batches in pairs]
        try:
            clients[0].shutdown()
        except RuntimeError as error:
            return found, str(error)
        return found, "it was shut down"

    data = [[rows(n, n + 1) for n in range(begin, begin + 3)] for begin in (0, 10)]
    found, error = ray.get(ray.remote(num_cpus=0.1)(write).remote(three.clients(2), data), timeout=120)
    assert [sorted(each) for each in found] == [[0, 1, 2]] * 2 and found[0] != found[1] and "cannot shut" in error
    assert sorted(three["x"].tolist()) == [0, 1, 2, 10, 11, 12]


def batches_lie_in_the_object_store(three: RayReplayBuffer) -> None:
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


def a_cluster_without_room_is_refused_in_time() -> None:
    with pytest.raises(RemoteTimeoutError, match=r"'num_cpus': 50.*reserve less"):
        RayReplayBuffer(storage=partial(LazyTensorStorage, 4), remote_config={"num_cpus": 50}, timeout=1)


# ---------------------------------------------------------------------- checkpoints


def a_checkpoint_is_of_one_moment(three: RayReplayBuffer, path: Path) -> list[int]:
    """Saves while rows are written, and loads that. The rows that were saved."""
    three.empty()
    three.set_sampler(prioritized())
    for shard in range(SHARDS):
        three.extend(rows(500 + shard, 501 + shard), shard=shard)
    three.update_priority(torch.tensor([0, 20, 40]), torch.tensor([3.0, 4.0, 5.0]))
    going = threading.Event()

    def write(client: RayReplayBuffer) -> None:
        n = 0
        while not going.is_set() and n < 5 * SHARDS:
            client.extend(rows(n, n + 1))  # to each shard in order, each write after the one before
            n += 1

    writer = threading.Thread(target=write, args=(three.client(),))
    writer.start()
    time.sleep(0.1)
    three.dumps(path)
    going.set()
    writer.join()
    three.extend(rows(900, 901))
    three.loads(path)
    found = sorted(three["x"].tolist())
    written = [each for each in found if each < 500]
    assert written == list(range(len(written)))  # no write is there without those before
    assert found[len(written) :] == [500, 501, 502]
    three.dumps(path)
    assert len(list(path.glob("shards-*"))) == 1
    return found


def a_checkpoint_goes_into_another_number_of_shards(one: RayReplayBuffer, path: Path, saved: list[int]) -> None:
    one.empty()
    one.loads(path)
    assert sorted(one["x"].tolist()) == saved
    index = {int(x): n for n, x in enumerate(one["x"])}
    _, info = one.sample(500, return_info=True)
    weight = dict(zip(info["index"].tolist(), info["priority_weight"].tolist(), strict=True))
    assert weight[index[500]] / weight[index[502]] == pytest.approx((5 / 3) ** 0.35, rel=1e-3)


# ---------------------------------------------------------------------- shards that die


def until_it_works(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Repeat a call until no shard is lost any more. Returns its result, and the messages of the errors."""
    messages, until = [], time.monotonic() + 100
    while time.monotonic() < until:
        try:
            return call(), messages
        except ShardLostError as error:
            messages.append(str(error))
            time.sleep(0.2)
    raise AssertionError(messages)


def a_time_limit_ends_every_call(three: RayReplayBuffer, processes: Path, path: Path) -> None:
    filled(three)
    client = three.client(timeout=1.0)
    shard_process.kill(processes, 0, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(RemoteTimeoutError, match="shard 0 did not answer share"):
            client.sample()
        with pytest.raises(RemoteTimeoutError, match="shard 0 did not answer facts"):
            client.loads(path)  # which may take any time while the shard is alive
        assert time.monotonic() - begun < 20
    finally:
        shard_process.kill(processes, 0, signal.SIGCONT)
    assert len(three.sample()) == 8 and three.is_alive


def killed_shards_without_and_with_durable_writes(buffers: Buffers, path: Path) -> None:
    """A shard of three dies without a checkpoint, and at the same time the one with one and durable writes after it."""
    three, one = buffers.three, buffers.one
    filled(three)
    one.empty()
    one.set_storage(partial(LazyTensorStorage, CAPACITY))
    one.extend(rows(0, 3), ack="durable")
    one.dumps(path)
    one.extend(rows(3, 5), ack="durable")
    one.add(rows(5, 6)[0], ack="durable")
    one.extend(rows(80, 82))  # only received
    with pytest.raises(KeyError):
        one.extend(TensorDict({"other": torch.zeros(2)}, [2]), ack="durable")
    ahead = three.client(prefetch=2)
    ahead.sample(30)
    shard_process.kill(buffers.processes_of_three, 1)
    shard_process.kill(buffers.processes_of_one, 0)
    with pytest.raises(ShardLostError, match=r"shard 1 was lost.*restarts from nothing") as raised:
        three.sample(30)
    assert raised.value.shard == 1
    found, messages = until_it_works(lambda: three["x"])
    assert any("shard 1 was lost with its rows" in each for each in messages)
    assert found.tolist() == [20, 21, 22, 23, 24, *range(5, 20), *range(200, 203)]
    drawn, _ = until_it_works(lambda: torch.cat([ahead.sample(30)["index"] for _ in range(6)]))
    assert len(drawn) == 180 and not ((drawn >= 20) & (drawn < 40)).any()
    found, messages = until_it_works(lambda: one["x"])
    assert found.tolist() == [0, 1, 2, 3, 4, 5] and "shard 0 was lost" in messages[0]


def a_killed_shard_goes_on_from_its_checkpoint(three: RayReplayBuffer, processes: Path, path: Path) -> None:
    filled(three)
    other = three.client()
    three.dumps(path)
    before = three["x"]
    three.extend(rows(700, 702), shard=1)  # is in no checkpoint
    begun = time.monotonic()
    shard_process.kill(processes, 1)
    with pytest.raises(ShardLostError, match=f"shard 1 was lost.*restarts from the checkpoint {path}"):
        three.sample()
    assert time.monotonic() - begun < 60
    found, _ = until_it_works(lambda: three["x"])
    assert found.equal(before)
    with pytest.raises(ShardLostError, match="goes on from the checkpoint"):
        other.extend(rows(0, 1), shard=1)  # a client with no call in flight hears of it once, before it writes
    assert len(other.extend(rows(0, 1), shard=1)) == 1 and len(three) == len(before) + 1


# ---------------------------------------------------------------------- actors of other classes


def an_actor_writes_draws_and_updates() -> None:
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


# ---------------------------------------------------------------------- the test


def test_shards_answer_as_one_buffer_and_what_was_saved_outlives_them(buffers: Buffers, tmp_path: Path) -> None:
    """In one test: another process would start a cluster of its own."""
    a_cluster_without_room_is_refused_in_time()
    one_shard_answers_as_a_local_buffer(buffers.one)
    indices_lead_home(buffers.three)
    priorities_follow_the_law_of_one_buffer(buffers.three)
    epochs_give_each_row_once(buffers.three)
    slices_and_batches_ahead(buffers.three)
    latest_totals_keep_the_weights_exact(buffers.three)
    clients_write_from_tasks(buffers.three)
    batches_lie_in_the_object_store(buffers.three)
    an_actor_writes_draws_and_updates()
    saved = a_checkpoint_is_of_one_moment(buffers.three, tmp_path / "three")
    a_checkpoint_goes_into_another_number_of_shards(buffers.one, tmp_path / "three", saved)
    a_time_limit_ends_every_call(buffers.three, buffers.processes_of_three, tmp_path / "three")
    killed_shards_without_and_with_durable_writes(buffers, tmp_path / "one")
    a_killed_shard_goes_on_from_its_checkpoint(buffers.three, buffers.processes_of_three, tmp_path / "three")
