"""TED data saved flat, by trajectory and in H5 files comes back bit for bit; what would not is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import Tensor

from interop import (
    CheckpointMismatch,
    Flat2TED,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    TED2Flat,
    TensorDictReplayBuffer,
    TensorStorage,
    TensorStorageCheckpointer,
)
from tests.interop.checkpoint.ted_buffers import CAPACITY, buffer_of, check_same, extended, state, steps
from tests.interop.ted.model import copied, differences

KINDS = [FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("lanes", [(), (2,), (2, 1)])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_round_trip(tmp_path: Path, kind: Any, lanes: tuple[int, ...], count: int) -> None:
    written = steps(count, lanes, seed=count)
    data = written.data.permute(*reversed(range(1 + len(lanes)))) if len(lanes) > 1 else None
    buffer = buffer_of(kind(), lanes)
    buffer.extend(data) if data is not None else extended(buffer, written)
    buffer.dumps(tmp_path / "saved")
    for storage, full in ((LazyTensorStorage, False), (LazyMemmapStorage, False), (LazyTensorStorage, True)):
        other = buffer_of(kind(), lanes, storage)
        if full:
            more = steps(7, lanes, seed=99)
            other.extend(more.data.permute(*reversed(range(1 + len(lanes))))) if data is not None else extended(
                other, more
            )
        other.loads(tmp_path / "saved")
        check_same(other, buffer)


@each_kind
def test_what_is_loaded_goes_on_as_before(tmp_path: Path, kind: Any) -> None:
    stream = steps(11, (2,)).data.transpose(0, 1)
    buffer, other = buffer_of(kind(), (2,)), buffer_of(kind(), (2,))
    buffer.extend(stream[:, :8])
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    for each in (buffer, other):
        each.extend(stream[:, 8:])
    check_same(other, buffer)
    other.dumps(tmp_path / "again")  # where the ring begins is known
    buffer.loads(tmp_path / "again")
    check_same(other, buffer)


@each_kind
@pytest.mark.parametrize("make", [ReplayBuffer, TensorDictReplayBuffer])
def test_saved_after_every_batch_of_a_collector(tmp_path: Path, kind: Any, make: Any) -> None:
    stream = steps(20, (3,), seed=3).data.transpose(0, 1)
    buffer, other = (make(storage=LazyMemmapStorage(19, ndim=2)) for _ in range(2))
    buffer.storage.checkpointer, other.storage.checkpointer = kind(), kind()
    for start in range(0, 20, 4):
        buffer.extend(stream[:, start : start + 4])
        assert buffer.storage.max_size == 21
        buffer.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
        assert not differences(other[:], buffer[:])


@each_kind
def test_items_that_are_a_tensorclass(tmp_path: Path, kind: Any) -> None:
    rows = steps(8).data
    made = Row(obs=rows["obs"], done=rows["done"], next=rows["next"].select("obs", "done"), batch_size=[8])
    buffer, other = buffer_of(kind()), buffer_of(kind())
    buffer.extend(made)
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert type(other[:]) is Row
    assert not differences(other[:].to_tensordict(), buffer[:].to_tensordict())


@tensorclass
class Row:
    obs: Tensor
    done: Tensor
    next: TensorDict


@each_kind
def test_a_buffer_that_was_emptied(tmp_path: Path, kind: Any) -> None:
    buffer = extended(buffer_of(kind()), steps(8))
    buffer.empty()
    buffer.dumps(tmp_path / "saved")
    other = extended(buffer_of(kind()), steps(3))
    other.loads(tmp_path / "saved")
    assert len(other) == 0
    for each in (buffer, other):
        extended(each, steps(4, seed=1))
    check_same(other, buffer)
    buffer.dumps(tmp_path / "saved")  # rows behind are those of the time before; they do not count
    other.loads(tmp_path / "saved")
    check_same(other, buffer)


@each_kind
def test_flags_on_one_side_alone(tmp_path: Path, kind: Any) -> None:
    rows = steps(8).data
    del rows["terminated"], rows["next", "truncated"], rows["next", "reward"]
    rows["reward"], rows["truncated"] = torch.rand(8, 1), torch.rand(8, 1) < 0.5
    buffer, other = buffer_of(kind()), buffer_of(kind())
    buffer.extend(rows)
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    check_same(other, buffer)


@each_kind
def test_keys_are_those_that_were_saved(tmp_path: Path, kind: Any) -> None:
    rows = steps(8).data
    rows["next", "gain"] = rows["next"].pop("reward")
    buffer = buffer_of(kind(done_keys=("done", "truncated", "terminated"), reward_keys=["gain"]))
    buffer.extend(rows)
    buffer.dumps(tmp_path / "saved")
    other = buffer_of(kind())
    other.loads(tmp_path / "saved")
    check_same(other, buffer)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_observations_are_saved_once(tmp_path: Path, kind: Any) -> None:
    def size_by(checkpointer: Any) -> int:
        rows = torch.arange(1001)[:, None].expand(-1, 500).to(torch.float64)
        flags = torch.zeros(1000, 1, dtype=torch.bool)
        data = TensorDict({"obs": rows[:-1], "done": flags, "next": {"obs": rows[1:], "done": flags}}, [1000])
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000), checkpointer=checkpointer)
        buffer.extend(data)
        path = tmp_path / type(checkpointer).__name__
        buffer.dumps(path)
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())

    assert size_by(kind()) < 0.51 * size_by(TensorStorageCheckpointer())


# ---------------------------------------------------------------------- hooks of the user's


@pytest.mark.parametrize("kind", KINDS[:2])
def test_hooks_of_the_users(tmp_path: Path, kind: Any) -> None:
    def checkpointer() -> Any:
        made = kind()
        made.register_save_hook(lambda data, path=None: (seen.append(data), TensorDict({"x": torch.ones(3)}))[1])
        made._load_hooks[:] = []
        made.register_load_hook(lambda data, out=None: (seen.append(data), rows)[1])
        return made

    rows, seen = steps(4).data, []
    buffer, other = extended(buffer_of(checkpointer()), steps(4)), buffer_of(checkpointer())
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert seen[1]["x"].tolist() == [1, 1, 1]
    check_same(other, buffer)


def test_the_hooks_by_themselves(tmp_path: Path) -> None:
    buffer, other = (ReplayBuffer(storage=LazyTensorStorage(10, ndim=2)) for _ in range(2))
    extended(buffer, steps(8, (2,))).register_save_hook(TED2Flat())
    other.register_load_hook(Flat2TED())
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    check_same(other, buffer)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_load_hook_of_the_users_is_given_the_rows(tmp_path: Path, kind: Any) -> None:
    buffer, other = extended(buffer_of(kind()), steps(4)), buffer_of(kind())
    buffer.dumps(tmp_path / "saved")
    other.storage.register_load_hook(lambda data, out=None: data.set("action", data["action"] + 1))
    other.loads(tmp_path / "saved")
    assert torch.equal(other["action"], buffer["action"] + 1)


# ---------------------------------------------------------------------- refusals


def test_h5_takes_no_hooks() -> None:
    for register in (H5StorageCheckpointer().register_save_hook, H5StorageCheckpointer().register_load_hook):
        with pytest.raises(ValueError, match="use a TensorStorageCheckpointer"):
            register(lambda data, **options: data)


@each_kind
def test_rows_of_two_writers(tmp_path: Path, kind: Any) -> None:
    storage = LazyTensorStorage(8)
    extended(ReplayBuffer(storage=storage), steps(6))
    buffer = extended(ReplayBuffer(storage=storage, checkpointer=kind()), steps(2, seed=1))
    with pytest.raises(ValueError, match=r"row 5 would come back otherwise.*use a TensorStorageCheckpointer"):
        buffer.dumps(tmp_path / "saved")


@each_kind
def test_data_that_would_not_come_back_is_refused(tmp_path: Path, kind: Any) -> None:
    buffer = extended(buffer_of(kind()), steps(4))
    buffer.dumps(tmp_path / "saved")
    good = copied(buffer[:])
    buffer["done"][2] = True
    with pytest.raises(ValueError, match="row 2 would come back otherwise: 'done' is set"):
        buffer.dumps(tmp_path / "saved")
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    other = buffer_of(kind())
    other.loads(tmp_path / "saved")
    assert not differences(other[:], good)
    lossy = buffer_of(kind(verify=False))
    extended(lossy, steps(4))
    lossy["done"][2] = True
    lossy.dumps(tmp_path / "lossy")
    other.loads(tmp_path / "lossy")
    assert not differences(other[:], good)


@each_kind
def test_what_cannot_be_saved(tmp_path: Path, kind: Any) -> None:
    empty = buffer_of(kind())
    with pytest.raises(RuntimeError, match="Cannot save a non-initialized storage"):
        empty.dumps(tmp_path / "saved")
    tensors = ReplayBuffer(storage=TensorStorage(torch.zeros(3)), checkpointer=kind())
    with pytest.raises(ValueError, match="saves tensordicts"):
        tensors.dumps(tmp_path / "saved")
    lists = ReplayBuffer(storage=ListStorage(3), checkpointer=kind())
    lists.extend([1, 2])
    with pytest.raises(ValueError, match="saves tensordicts"):
        lists.dumps(tmp_path / "saved")
    with pytest.raises(TypeError, match="unexpected keyword"):
        kind(down_keys=("done",))


@each_kind
def test_frames_are_saved_once_already(tmp_path: Path, kind: Any) -> None:
    frames = ReplayBuffer(storage=LazyFrameStorage(CAPACITY, obs_key="obs", stack=3, stack_dim=-1), checkpointer=kind())
    flags = torch.zeros(2, 1, dtype=torch.bool)
    obs = torch.tensor([[1.0, 1, 1], [1, 1, 2], [1, 2, 3]])
    frames.extend(TensorDict({"obs": obs[:-1], "done": flags, "next": {"obs": obs[1:], "done": flags}}, [2]))
    with pytest.raises(ValueError, match="LazyFrameStorage has each frame once"):
        frames.dumps(tmp_path / "saved")
    extended(buffer_of(kind()), steps(8)).storage.dumps(tmp_path / "saved")
    before = copied(frames[:])
    with pytest.raises(CheckpointMismatch, match="cannot be loaded into a LazyFrameStorage"):
        frames.storage.loads(tmp_path / "saved")
    assert not differences(frames[:], before)


@each_kind
def test_targets_that_do_not_fit(tmp_path: Path, kind: Any) -> None:
    buffer = extended(buffer_of(kind(), (2,)), steps(8, (2,)))
    buffer.storage.dumps(tmp_path / "saved")
    buffer.dumps(tmp_path / "buffer")
    targets = [
        (ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), checkpointer=kind()), "capacity of 5 rows"),
        (ReplayBuffer(storage=LazyTensorStorage(10), checkpointer=kind()), "ndim=2"),
        (extended(buffer_of(kind(), (1,)), steps(3, (1,))), "lanes"),
        (extended(buffer_of(kind(), (2,)), steps(3, (2,), observations={"obs": ((3,), torch.float64)})), "'obs' is"),
    ]
    for target, message in targets:
        before = state(target)
        with pytest.raises(CheckpointMismatch, match=message):
            target.storage.loads(tmp_path / "saved")
        assert state(target) == before
        with pytest.raises(CheckpointMismatch):
            target.loads(tmp_path / "buffer")
        assert state(target) == before
    plain = buffer_of(TensorStorageCheckpointer(), (2,))
    with pytest.raises(CheckpointMismatch, match=kind.__name__):
        plain.storage.loads(tmp_path / "saved")


@each_kind
def test_rules_of_loading(tmp_path: Path, kind: Any) -> None:
    observations = {"obs": ((3,), torch.float32), "more": ((), torch.int32)}
    buffer = extended(buffer_of(kind()), steps(8, observations=observations))
    buffer.storage.dumps(tmp_path / "saved")
    fewer = {"obs": ((3,), torch.float64)}
    other = extended(buffer_of(kind()), steps(3, observations=fewer))
    with pytest.raises(CheckpointMismatch, match="'more' is only in the checkpoint"):
        other.storage.loads(tmp_path / "saved")
    other.storage.loads(tmp_path / "saved", strict=False, cast=True)
    assert torch.equal(other["obs"], buffer["obs"].double())
    assert torch.equal(other["next", "obs"], buffer["next", "obs"].double())
