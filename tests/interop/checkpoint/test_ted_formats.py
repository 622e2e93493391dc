"""TED data saved flat, by trajectory and in H5 files comes back bit for bit; what would not is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass
from torch import Tensor

from interop import (
    CheckpointCorrupt,
    CheckpointMismatch,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    ReplayBuffer,
    TensorStorage,
    TensorStorageCheckpointer,
)
from tests.interop.checkpoint.ted_buffers import CAPACITY, buffer_of, check_same, extended, rewritten, state, steps
from tests.interop.ted.model import copied, differences

KINDS = [FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]
each_kind = pytest.mark.parametrize("kind", KINDS)


def check_reloaded(buffer: Any, other: Any, path: Path) -> None:
    """What the one saves the other loads."""
    buffer.dumps(path)
    other.loads(path)
    check_same(other, buffer)


@each_kind
@pytest.mark.parametrize("lanes", [(), (2,), (2, 1)])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_round_trip(tmp_path: Path, kind: Any, lanes: tuple[int, ...], count: int) -> None:
    """Into storages of tensors and files, and over other rows; what was loaded goes on as before."""
    stream = steps(count + 3, lanes, seed=count).data.permute(*reversed(range(1 + len(lanes))))
    buffer = buffer_of(kind(), lanes)
    buffer.extend(stream[..., :count])
    for storage, full in ((LazyTensorStorage, False), (LazyMemmapStorage, False), (LazyTensorStorage, True)):
        other = buffer_of(kind(), lanes, storage)
        if full:
            other.extend(steps(7, lanes, seed=99).data.permute(*reversed(range(1 + len(lanes)))))
        check_reloaded(buffer, other, tmp_path / "saved")
    for each in (buffer, other):
        each.extend(stream[..., count:])
    check_reloaded(other, buffer, tmp_path / "again")  # where the ring begins is known


@tensorclass
class Row:
    obs: Tensor
    done: Tensor
    next: TensorDict


@each_kind
def test_items_that_are_a_tensorclass(tmp_path: Path, kind: Any) -> None:
    rows = steps(8).data
    buffer, other = buffer_of(kind()), buffer_of(kind())
    buffer.extend(Row(obs=rows["obs"], done=rows["done"], next=rows["next"].select("obs", "done"), batch_size=[8]))
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert type(other[:]) is Row
    assert not differences(other[:].to_tensordict(), buffer[:].to_tensordict())


@each_kind
def test_a_buffer_that_was_emptied(tmp_path: Path, kind: Any) -> None:
    buffer, other = extended(buffer_of(kind()), steps(8)), extended(buffer_of(kind()), steps(3))
    buffer.empty()
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert len(other) == 0
    for each in (buffer, other):
        extended(each, steps(4, seed=1))
    check_same(other, buffer)
    check_reloaded(buffer, other, tmp_path / "saved")  # rows behind are those of the time before; they do not count


@each_kind
def test_flags_on_one_side_and_other_keys(tmp_path: Path, kind: Any) -> None:
    """The keys are those that were saved."""
    rows = steps(8).data
    del rows["terminated"], rows["next", "truncated"]
    rows["next", "gain"], rows["truncated"] = rows["next"].pop("reward"), torch.rand(8, 1) < 0.5
    buffer = buffer_of(kind(done_keys=("done", "truncated", "terminated"), reward_keys=["gain"]))
    buffer.extend(rows)
    check_reloaded(buffer, buffer_of(kind()), tmp_path / "saved")


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
    check_reloaded(buffer, other, tmp_path / "saved")
    assert seen[1]["x"].tolist() == [1, 1, 1]
    one, another = extended(buffer_of(kind()), steps(4)), buffer_of(kind())
    one.dumps(tmp_path / "rows")
    another.storage.register_load_hook(lambda data, out=None: data.set("action", data["action"] + 1))
    another.loads(tmp_path / "rows")
    assert torch.equal(another["action"], one["action"] + 1)


# ---------------------------------------------------------------------- refusals


@each_kind
def test_data_that_would_not_come_back_is_refused(tmp_path: Path, kind: Any) -> None:
    buffer, other = extended(buffer_of(kind()), steps(4)), buffer_of(kind())
    buffer.dumps(tmp_path / "saved")
    good = copied(buffer[:])
    buffer["done"][2] = True
    with pytest.raises(ValueError, match="row 2 would come back otherwise: 'done' is set"):
        buffer.dumps(tmp_path / "saved")
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    lossy = extended(buffer_of(kind(verify=False)), steps(4))
    lossy["done"][2] = True
    lossy.dumps(tmp_path / "lossy")
    for name in ("saved", "lossy"):
        other.loads(tmp_path / name)
        assert not differences(other[:], good)
    storage = LazyTensorStorage(8)
    extended(ReplayBuffer(storage=storage), steps(6))
    with pytest.raises(ValueError, match=r"row 5 would come back otherwise.*use a TensorStorageCheckpointer"):
        extended(ReplayBuffer(storage=storage, checkpointer=kind()), steps(2, seed=1)).dumps(tmp_path / "two writers")


@each_kind
def test_what_cannot_be_saved(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(RuntimeError, match="Cannot save a non-initialized storage"):
        buffer_of(kind()).dumps(tmp_path / "saved")
    lists = ReplayBuffer(storage=ListStorage(3), checkpointer=kind())
    lists.extend([1, 2])
    for buffer in (ReplayBuffer(storage=TensorStorage(torch.zeros(3)), checkpointer=kind()), lists):
        with pytest.raises(ValueError, match="saves tensordicts"):
            buffer.dumps(tmp_path / "saved")
    with pytest.raises(TypeError, match="unexpected keyword"):
        kind(down_keys=("done",))


@each_kind
def test_frames_are_saved_once_already(tmp_path: Path, kind: Any) -> None:
    frames = ReplayBuffer(storage=LazyFrameStorage(CAPACITY, obs_key="obs", stack=3, stack_dim=-1), checkpointer=kind())
    flags = torch.zeros(2, 1, dtype=torch.bool)
    obs = torch.tensor([[1.0, 1, 1], [1, 1, 2], [1, 2, 3]])
    frames.extend(TensorDict({"obs": obs[:-1], "done": flags, "next": {"obs": obs[1:], "done": flags}}, [2]))
    with pytest.raises(ValueError, match="got a LazyFrameStorage"):
        frames.dumps(tmp_path / "saved")
    extended(buffer_of(kind()), steps(8)).storage.dumps(tmp_path / "saved")
    before = copied(frames[:])
    with pytest.raises(CheckpointMismatch, match="cannot be loaded into a LazyFrameStorage"):
        frames.storage.loads(tmp_path / "saved")
    assert not differences(frames[:], before)


# ---------------------------------------------------------------------- descriptions that do not fit


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-5, 2**62), st.floats(allow_nan=False), st.text(max_size=3)),
    *(st.just([]), st.just({})),
)


@given(st.data())
def test_descriptions_with_anything_in_them(tmp_path_factory: pytest.TempPathFactory, draws: st.DataObject) -> None:
    """Any entry replaced by anything: it is loaded as it was, or an error of checkpoints."""
    path = tmp_path_factory.mktemp("saved")
    kind = draws.draw(st.sampled_from(KINDS))
    checkpointer = kind()
    source = extended(buffer_of(checkpointer, (2,)), steps(8, (2,)))

    def change(tree: Any) -> None:
        while True:
            keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))]
            key = draws.draw(st.sampled_from(keys))
            if not isinstance(tree[key], dict | list) or not tree[key] or draws.draw(st.integers(0, 3)) == 0:
                tree[key] = draws.draw(VALUES)
                return
            tree = tree[key]

    rewritten(path, checkpointer, source.storage, change)
    target = extended(buffer_of(kind(), (2,)), steps(7, (2,), seed=8))
    before = state(target)
    try:
        target.storage.loads(path)
    except (CheckpointCorrupt, CheckpointMismatch):
        assert state(target) == before
    else:
        assert len(target) <= target.storage.max_size
