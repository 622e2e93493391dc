"""What is saved of tensor storages, and what comes of it elsewhere."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from fbuf import CheckpointCorrupt, CheckpointMismatch
from interop import (
    LazyFrameStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    StorageEnsemble,
    TensorStorage,
)
from interop.checkpoint.checkpointer import StorageCheckpointerBase
from interop.storages.checkpointers import TensorStorageCheckpointer

KINDS = (LazyTensorStorage, LazyMemmapStorage)


@tensorclass
class Step:
    obs: torch.Tensor
    reward: torch.Tensor


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def _nested(count: int, start: int = 0) -> TensorDict:
    ids = torch.arange(start, start + count)
    inner = TensorDict({"half": ids.to(torch.bfloat16)[:, None], "flag": ids % 2 == 0}, [count])
    return TensorDict({"id": ids, "x": ids[:, None].float() / 7, "in": inner}, [count])


DATA: dict[str, Any] = {
    "tensordict": _nested,
    "tensor": lambda count, start=0: torch.arange(start, start + count)[:, None] * torch.ones(3),
    "tensorclass": lambda count, start=0: Step(
        obs=torch.arange(start, start + count).double(), reward=torch.ones(count, 1), batch_size=[count]
    ),
    "pytree": lambda count, start=0: {"a.b": torch.arange(start, start + count), "c": (torch.ones(count, 2),)},
    "named tuple": lambda count, start=0: Pair(torch.arange(start, start + count), torch.zeros(count, 0)),
}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return type(one) is type(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool((one == other).all())


def _filled(kind: Any, data: Any, rows: int, capacity: int = 10) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=kind(capacity), batch_size=4)
    for start in range(0, rows, 3):
        buffer.extend(data(min(3, rows - start), start))
    return buffer


@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
@pytest.mark.parametrize("rows", [2, 10, 25])
@pytest.mark.parametrize("kind", KINDS)
def test_content_comes_back(kind: Any, rows: int, data: Any, tmp_path: Path) -> None:
    saved = _filled(kind, data, rows).storage
    saved.dumps(tmp_path / "c")
    for other in KINDS:
        for target in (other(10), _filled(other, data, 4).storage):
            target.loads(tmp_path / "c")
            assert _equal(target[:], saved[:])
            assert len(target) == min(rows, 10)
            assert target.ring.cursor == saved.ring.cursor == rows % 10
    state = saved.state_dict()
    _filled(kind, data, 9)
    torch.save(state, tmp_path / "state.pt")
    target = kind(10)
    target.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert _equal(target[:], saved[:])


def test_a_state_dict_is_a_snapshot_and_so_is_what_is_loaded() -> None:
    buffer = _filled(LazyTensorStorage, _nested, 5)
    state = buffer.storage.state_dict()
    before = state["_storage"]["id"].clone()
    buffer.extend(_nested(8, 100))
    assert torch.equal(state["_storage"]["id"], before)
    target = LazyTensorStorage(10)
    target.load_state_dict(state)
    state["_storage"]["id"].zero_()
    assert torch.equal(target[:]["id"], before)


@pytest.mark.parametrize("kind", KINDS)
def test_lanes(kind: Any, tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=kind(20, ndim=2), batch_size=4)
    buffer.extend(_nested(15).reshape(3, 5))
    buffer.extend(_nested(12, 50).reshape(3, 4))
    buffer.storage.dumps(tmp_path / "c")
    target = kind(20, ndim=2)
    target.loads(tmp_path / "c")
    assert (target[:] == buffer.storage[:]).all()
    assert target.shape == buffer.storage.shape
    assert target.max_size == buffer.storage.max_size == 21
    for wrong in (kind(20), kind(30, ndim=2)):
        with pytest.raises(CheckpointMismatch):
            wrong.loads(tmp_path / "c")
        assert not wrong.initialized


def test_memory_given_by_the_user_is_filled_in_place(tmp_path: Path) -> None:
    _filled(LazyTensorStorage, _nested, 10).storage.dumps(tmp_path / "c")
    given = _nested(10, 500)
    storage = TensorStorage(given)
    storage.loads(tmp_path / "c")
    assert given["id"].tolist() == [*range(10)]
    assert storage[:]["id"].tolist() == [*range(10)]


def _refused(storage: Any, path: Path, match: str, **options: Any) -> None:
    before = storage.state_dict()
    with pytest.raises(CheckpointMismatch, match=match):
        storage.loads(path, **options)
    after = storage.state_dict()
    assert repr(before) == repr(after)


def test_differences_are_listed_and_nothing_changes(tmp_path: Path) -> None:
    _filled(LazyTensorStorage, _nested, 5).storage.dumps(tmp_path / "c")

    def other(count: int, start: int = 0) -> TensorDict:
        return _nested(count, start).exclude("x").set("y", torch.ones(count)).set("id", torch.ones(count, 2))

    _refused(_filled(LazyTensorStorage, other, 4).storage, tmp_path / "c", "'id' has shape.*'x' is only.*'y' is only")
    _refused(_filled(LazyTensorStorage, _nested, 4, 11).storage, tmp_path / "c", "capacity of 10")
    _refused(_filled(LazyTensorStorage, DATA["tensor"], 4).storage, tmp_path / "c", "only in the")


def test_other_keys_and_dtypes_where_that_is_asked_for(tmp_path: Path) -> None:

    _filled(LazyTensorStorage, _nested, 5).storage.dumps(tmp_path / "c")

    def other(count: int, start: int = 0) -> TensorDict:
        return _nested(count, start + 70).exclude("x").set("y", torch.ones(count))

    target = _filled(LazyTensorStorage, other, 9).storage
    _refused(target, tmp_path / "c", "'x' is only in the checkpoint.*'y' is only in the storage")
    target.loads(tmp_path / "c", strict=False)
    assert target[:]["id"].tolist() == [0, 1, 2, 3, 4]
    assert target[:]["y"].tolist() == [0.0] * 5
    assert "x" not in target[:].keys()  # noqa: SIM118

    def wider(count: int, start: int = 0) -> TensorDict:
        return _nested(count, start + 70).apply(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf)

    target = _filled(LazyTensorStorage, wider, 9).storage
    _refused(target, tmp_path / "c", "cast=True")
    target.loads(tmp_path / "c", cast=True)
    assert target[:]["x"].dtype == torch.float64
    assert torch.equal(target[:]["x"], _nested(5)["x"].double())


def test_a_storage_without_memory_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="non-initialized"):
        LazyTensorStorage(10).dumps(tmp_path / "c")
    assert not (tmp_path / "c").exists()


class Mine(StorageCheckpointerBase):
    """A checkpointer of a user."""

    def dumps(self, storage: Any, path: Any) -> None:
        path.mkdir()
        np.save(path / "my rows.npy", storage[:].numpy())

    def loads(self, storage: Any, path: Any) -> None:
        storage.set(slice(0, 5), torch.from_numpy(np.load(path / "my rows.npy")))


def test_checkpointers_of_the_users_own(tmp_path: Path) -> None:
    def buffer() -> ReplayBuffer:
        return ReplayBuffer(storage=LazyTensorStorage(10), checkpointer=Mine(), batch_size=2)

    saved, target = buffer(), buffer()
    saved.extend(torch.arange(5))
    saved.dumps(tmp_path / "c")
    target.loads(tmp_path / "c")
    assert target[:].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointMismatch, match="Mine"):
        ReplayBuffer(storage=LazyTensorStorage(10)).loads(tmp_path / "c")
    (file,) = (tmp_path / "c").rglob("my rows.npy")
    os.chmod(file, 0o644)
    file.write_bytes(b"no")
    with pytest.raises(CheckpointCorrupt, match="my rows"):
        buffer().loads(tmp_path / "c")


def test_hooks_change_what_is_saved_and_loaded(tmp_path: Path) -> None:
    class Save:
        shift = is_full = None

        def __call__(self, data: Any, path: Any = None) -> Any:
            return TensorDict({"twice": data["x"] * 2, "where": torch.tensor([self.shift, self.is_full])}, [])

    def back(data: Any, out: Any = None) -> Any:
        return TensorDict({"x": data["twice"] / 2}, [data["twice"].shape[0]])

    def storage(load: bool = True) -> LazyTensorStorage:
        made = LazyTensorStorage(10)
        made.checkpointer = TensorStorageCheckpointer
        if load:
            made.register_load_hook(back)
        return made

    saved = storage(load=False)
    hook = Save()
    saved.register_save_hook(hook)
    buffer = ReplayBuffer(storage=saved)
    buffer.extend(TensorDict({"x": torch.arange(7.0)}, [7]))
    buffer.extend(TensorDict({"x": torch.arange(7.0, 14)}, [7]))
    saved.dumps(tmp_path / "c")
    assert (hook.shift, hook.is_full) == (4, True)
    target = storage()
    target.loads(tmp_path / "c")
    assert (target[:] == saved[:]).all()
    with pytest.raises(CheckpointMismatch, match="load hooks"):
        storage(load=False).loads(tmp_path / "c")


def test_ensembles_of_storages(tmp_path: Path) -> None:
    def members() -> list[Any]:
        return [LazyTensorStorage(10), LazyMemmapStorage(8)]

    saved = members()
    for place, each in enumerate(saved):
        ReplayBuffer(storage=each).extend(_nested(3 + place, 10 * place))
    StorageEnsemble(*saved).dumps(tmp_path / "c")
    target = members()
    StorageEnsemble(*target).loads(tmp_path / "c")
    for one, other in zip(saved, target, strict=True):
        assert (one[:] == other[:]).all()
    with pytest.raises(CheckpointMismatch, match="2 storages"):
        StorageEnsemble(*members(), LazyTensorStorage(3)).loads(tmp_path / "c")
    with pytest.raises(CheckpointMismatch, match="capacity"):
        StorageEnsemble(*reversed(members())).loads(tmp_path / "c")


def test_frame_storages(tmp_path: Path) -> None:
    pixels = torch.arange(60 * 4, dtype=torch.uint8).reshape(60, 1, 2, 2)

    def data(start: int, count: int) -> TensorDict:
        at = torch.arange(start, start + count)
        done = (at % 5 == 4)[:, None]
        after = torch.where(done[:, :, None, None], pixels[at] + 1, pixels[at + 1])
        return TensorDict({"pixels": pixels[at], "next": {"pixels": after, "done": done}}, [count])

    def made() -> LazyFrameStorage:
        return LazyFrameStorage(16, stack=1)

    buffer, at = ReplayBuffer(storage=made()), 0
    for count in (3, 4, 9, 2, 11, 5):
        buffer.extend(data(at, count))
        at += count
        buffer.storage.dumps(tmp_path / "c")
        used = made()
        ReplayBuffer(storage=used).extend(data(0, 7))
        fresh, copied = made(), made()
        for target in (fresh, used):
            target.loads(tmp_path / "c")
        copied.load_state_dict(buffer.storage.state_dict())
        for target in (fresh, used, copied):
            assert (target[:] == buffer.storage[:]).all()
            follower = ReplayBuffer(storage=target)
            follower.writer.cursor = target.ring.cursor
            follower.extend(data(at, 6))
            assert (target[:]["pixels"] != 255).any()
    with pytest.raises(CheckpointMismatch, match="zeros"):
        LazyFrameStorage(16, stack=1, padding="zero", check=False).loads(tmp_path / "c")


def test_the_state_of_something_else_is_a_mismatch() -> None:
    buffer = _filled(LazyTensorStorage, _nested, 5)
    lists = ReplayBuffer(storage=ListStorage(10), batch_size=4)
    lists.extend([1, 2])
    for target, state in (
        (buffer.storage, lists.storage.state_dict()),
        (buffer.storage, buffer.writer.state_dict()),
        (lists.storage, buffer.storage.state_dict()),
        (buffer, buffer.storage.state_dict()),
        (buffer, lists.state_dict()),
    ):
        before = repr(target.state_dict())
        with pytest.raises(CheckpointMismatch):
            target.load_state_dict(state)
        assert repr(target.state_dict()) == before
