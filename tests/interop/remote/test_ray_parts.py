"""What `RayReplayBuffer` is made of, without Ray: values on the way, durable writes, rows dealt out, bad arguments."""

import itertools
import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from fbuf.checkpoint import CheckpointCorrupt
from interop import LazyMemmapStorage, ListStorage, RayReplayBuffer, ReplayBuffer
from interop.remote.checkpoints import chosen
from interop.remote.errors import RemoteError
from interop.remote.gathering import rows_at, together
from interop.remote.wire import Wire
from interop.remote.write_log import WriteLog


def sent(value: Any, copy: bool = False) -> tuple[Any, int]:
    """A value as another process has it, whose arrays are read-only as those in the object store, and the pickled bytes."""
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(Wire.of(value), protocol=5, buffer_callback=buffers.append)
    return pickle.loads(content, buffers=[bytes(each.raw()) for each in buffers]).value(copy), len(content)


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)], ids=str)
def test_tensors_arrive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    found, _ = sent(tensor)
    assert found.dtype == dtype and found.shape == shape
    assert pickle.dumps(found.contiguous().view(torch.uint8 if shape else dtype).tolist()) == pickle.dumps(
        tensor.view(torch.uint8 if shape else dtype).tolist()
    )


def test_only_the_description_is_pickled(tmp_path: Path) -> None:
    wide = torch.arange(40_000.0).reshape(4, 10_000)
    td = TensorDict({"a": wide, "n": {"t": wide.t()[:4]}, "text": NonTensorData("x", batch_size=[4])}, [4])
    found, size = sent({"td": td, "list": [1, "two", np.arange(3), (wide.conj(), None)]})
    assert size < 3000
    assert found["td"]["a"].equal(wide) and found["td"]["n", "t"].equal(wide.t()[:4]) and found["td"]["text"] == "x"
    assert found["list"][:2] == [1, "two"] and found["list"][3][0].equal(wide)
    mapped, size = sent(TensorDict({"a": wide}, [4]).memmap(tmp_path))  # not the name of its file
    assert size > 300 and mapped["a"].equal(wide)
    (graph, _), shared = sent(torch.ones(2, requires_grad=True)), Wire.of(wide)
    assert graph.requires_grad
    assert shared.value().data_ptr() == wide.data_ptr() != shared.value(copy=True).data_ptr()


CALL = ("extend", (TensorDict({"a": torch.arange(6.0), "b": torch.ones(6, dtype=torch.bfloat16)}, [6]),), {})


def replayed(log: WriteLog) -> list[Any]:
    found: list[Any] = []
    log.replay(lambda *call: found.append(call))
    return found


def test_durable_writes_come_back_in_order(tmp_path: Path) -> None:
    log = WriteLog(tmp_path / "a" / "b")
    for n in range(4):
        log.append(("add", (torch.tensor(n),), {"k": n}))
    log.append(CALL)
    assert [each[2].get("k") for each in replayed(log)] == [0, 1, 2, 3, None]
    assert (replayed(log)[-1][1][0] == CALL[1][0]).all()
    log.committed("/checkpoint", 2)  # which holds the first two
    log.release()
    log = WriteLog(tmp_path / "a" / "b")
    assert (log.checkpoint, log.cut) == ("/checkpoint", 2) and [each[2].get("k") for each in replayed(log)] == [
        2,
        3,
        None,
    ]
    with pytest.raises(TypeError, match="cannot be saved"):
        log.append(("add", (object(),), {}))
    log.append(("add", (torch.tensor(9),), {}))
    assert len(replayed(log)) == 4  # numbers go on after what was refused


def test_what_was_never_acknowledged_is_dropped_and_damage_is_not(tmp_path: Path) -> None:
    log = WriteLog(tmp_path)
    for n in range(3):
        log.append(("add", (torch.arange(100 * n, 100 * n + 100),), {}))
    (tmp_path / f"{4:012d}").mkdir()  # killed before the commit
    assert len(replayed(log)) == 3 and log.last == 3

    def refuse(name: str, args: Any, kwargs: Any) -> None:
        if args[0][0] == 200:  # the buffer refused it, and the process was killed then
            raise ValueError

    log.replay(refuse)
    assert len(replayed(log)) == 2
    damaged = next((tmp_path / f"{1:012d}").glob("data-*")) / "small"
    damaged.chmod(0o644)
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(CheckpointCorrupt):
        replayed(log)
    failed: list[Exception] = []

    def another() -> None:
        try:
            WriteLog(tmp_path, wait=0.3)
        except RemoteError as error:
            failed.append(error)

    thread = threading.Thread(target=another)
    thread.start()
    thread.join()
    assert "in use by another buffer" in str(failed[0])


@pytest.mark.parametrize("sizes", [[4, 6, 5], [1, 9], [10], [0, 3, 7]])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_are_dealt_out_once_and_in_order(sizes: list[int], count: int) -> None:
    for slices in (False, True):
        parts = chosen(sizes, count, slices)
        assert sorted(torch.cat(parts).tolist()) == list(range(sum(sizes)))
        assert max(map(len, parts)) - min(map(len, parts)) <= (len(sizes) if slices else 1)
        begins = np.cumsum([0, *sizes])
        for part in parts:
            for begin, end in itertools.pairwise(begins):
                mine = part[(part >= begin) & (part < end)]
                assert (mine.diff() > 0).all() and (not slices or (mine.diff() == 1).all())


def test_rows_of_shards_come_in_the_order_asked_for() -> None:
    batch = {"k": (torch.arange(10, 14),), "same": 1}
    parts = [rows_at(batch, torch.tensor(at), 4)["k"][0] for at in ([3, 0], [1, 2])]
    assert together(parts).tolist() == [13, 10, 11, 12] and rows_at(list("abcd"), torch.tensor([2, 0]), 4) == ["c", "a"]
    assert together([["a", "b"], ["c"]]) == ["a", "b", "c"]
    with pytest.raises(RuntimeError, match="4 rows were given for 3 indices"):
        rows_at(batch, torch.tensor([0]), 3)


def held(rows: int) -> ListStorage:
    storage = ListStorage(4)
    ReplayBuffer(storage=storage).extend(list(range(rows)))
    return storage


ONE = {"storage": partial(ListStorage, 4)}
BAD = [
    ({"transport": "carrier"}, ValueError, "transport must be one of 'auto', 'ray', got 'carrier'"),
    ({"ack": "durable"}, ValueError, "needs recovery_dir"),
    ({"timeout": 0}, ValueError, "timeout must be more than 0"),
    ({"sampler": threading.Lock()}, TypeError, "sampler: a lock that cannot be pickled"),
    ({"storage": ListStorage(4), "num_shards": 2}, TypeError, "one ListStorage for 2 shards: pass a constructor"),
    ({"storage": held(3)}, ValueError, "holds 3 items"),
    (
        {"storage": partial(LazyMemmapStorage, 4, scratch_dir="/x"), "num_shards": 2},
        ValueError,
        "2 shards would share scratch_dir='/x'",
    ),
]


@pytest.mark.parametrize("arguments, error, says", BAD, ids=lambda each: str(each)[:30])
def test_bad_arguments_are_refused_before_anything_starts(
    arguments: Any, error: type, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    for name in ("init", "remote"):
        monkeypatch.setattr(ray, name, lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(error, match=says):
        RayReplayBuffer(**{**ONE, **arguments})


def test_a_recovery_folder_of_more_shards_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        WriteLog.of_shard(tmp_path, number, 2).release()
    with pytest.raises(ValueError, match="has the rows of 2 shards, num_shards is 1"):
        WriteLog.of_shard(tmp_path, 0, 1)
    WriteLog.of_shard(tmp_path, 2, 3).release()
