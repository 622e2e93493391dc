"""H5 files: their content, files by themselves, disks that fail, and files made to lead elsewhere or to take all memory."""

import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from interop import (
    CheckpointCorrupt,
    CheckpointMismatch,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBufferEnsemble,
    StorageEnsemble,
)
from tests.interop.checkpoint.ted_buffers import alone, buffer_of, check_same, everything, extended, state, steps
from tests.interop.ted.model import differences, laid_out


def h5_file(folder: Path) -> Path:
    """The H5 file of a checkpoint."""
    (found,) = folder.rglob("*.h5")
    return found


@pytest.mark.parametrize(("count", "lanes"), [(3, ()), (5, ()), (8, (2,)), (4, (2,))])
def test_groups_are_the_trajectories(tmp_path: Path, count: int, lanes: tuple[int, ...]) -> None:
    buffer, path = alone(tmp_path, lanes, count)
    found = everything(path)
    groups = sorted({name.split("/")[0] for name in found if "/" in name})
    assert found["_storage_shape"].tolist() == [5, *lanes]
    assert found["_len"] == len(buffer)
    assert found["shift"] == count % 5
    assert found["is_full"].dtype == bool and found["is_full"] == (count >= 5)
    if count <= 5:
        _, trajectories = laid_out(steps(count, lanes))
        assert [len(found[f"{group}/done"]) for group in groups] == [length for length, ended in trajectories if ended]
    assert set(found) - {"_storage_shape", "_len", "shift", "is_full", "_description"} == {
        f"{group}/{name}"
        for group in groups
        for name in ("obs", "deep/more", "action", "collector/traj_ids", "done", "terminated", "truncated", "reward")
    }


@pytest.mark.parametrize(
    "options",
    [{"compression": "gzip", "chunks": True}, (("compression", "lzf"), ("shuffle", True), ("fletcher32", True))],
)
def test_compressed(tmp_path: Path, options: Any) -> None:
    buffer = extended(buffer_of(H5StorageCheckpointer(h5_kwargs=options), (2,)), steps(8, (2,)))
    other = buffer_of(H5StorageCheckpointer(), (2,))
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    check_same(other, buffer)
    with h5py.File(h5_file(tmp_path)) as opened:
        assert opened["traj_0/obs"].compression in ("gzip", "lzf")
        assert opened["shift"].compression is None


def test_arguments_and_other_names(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="positional"):
        H5StorageCheckpointer("a.h5")  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword"):
        H5StorageCheckpointer(compression="gzip")
    for name in ("", "../a.h5", "a/b.h5", "/a.h5"):
        with pytest.raises(ValueError, match="must be the name of a file"):
            H5StorageCheckpointer(checkpoint_file=name)
    rows = steps(8).data
    for part in (rows, rows["next"]):
        part["over"] = part.pop("done")
    keys = {"done_key": ("next", "over"), "done_keys": ["over", "terminated", "truncated"]}
    names = {"checkpoint_file": "mine.h5", "shift_key": ("meta", "at"), "is_full_key": "full"}
    buffer, other = buffer_of(H5StorageCheckpointer(**names, **keys)), buffer_of(H5StorageCheckpointer())
    buffer.extend(rows)
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    check_same(other, buffer)
    assert h5_file(tmp_path).name == "mine.h5"
    assert {"meta/at", "full"} <= set(everything(h5_file(tmp_path)))
    rows["a/b"] = torch.zeros(8)
    slashed = buffer_of(H5StorageCheckpointer(**keys))
    slashed.extend(rows)
    with pytest.raises(ValueError, match="'a/b' cannot be a name in an H5 file"):
        slashed.dumps(tmp_path / "slashed")


def test_every_storage_of_an_ensemble_has_a_file(tmp_path: Path) -> None:
    def ensemble() -> Any:
        members = [buffer_of(H5StorageCheckpointer()) for _ in range(3)]
        return members, ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=6)

    members, buffer = ensemble()
    others, other = ensemble()
    for number, member in enumerate(members):
        extended(member, steps(8, seed=number))
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert isinstance(other.storage, StorageEnsemble)
    for one, another in zip(members, others, strict=True):
        assert not differences(one[:], another[:])
    assert len(list(tmp_path.rglob("*checkpoint.h5"))) == 3


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, path = alone(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    for call in (buffer.storage.dumps, buffer.storage.loads):
        with pytest.raises(ImportError, match="pip install h5py"):
            call(path)


# ---------------------------------------------------------------------- a file by itself


@pytest.mark.parametrize(("count", "lanes"), [(3, ()), (8, (2,)), (10, ())])
def test_a_file_by_itself(tmp_path: Path, count: int, lanes: tuple[int, ...]) -> None:
    buffer, path = alone(tmp_path, lanes, count)
    for storage in (LazyTensorStorage, LazyMemmapStorage):
        other = buffer_of(H5StorageCheckpointer(), lanes, storage)
        other.storage.loads(path)
        assert not differences(other[:], buffer[:])
        other.storage.loads(str(path))
        assert not differences(other[:], buffer[:])
    buffer.storage.dumps(path)
    assert {each.name for each in tmp_path.iterdir()} == {"rows.h5"}


def test_files_that_are_not_written_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="non-initialized"):
        buffer_of(H5StorageCheckpointer()).storage.dumps(tmp_path / "rows.h5")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        buffer_of(H5StorageCheckpointer()).storage.loads(tmp_path / "rows.h5")


def test_files_that_were_cut(tmp_path: Path) -> None:
    _, path = alone(tmp_path)
    whole = path.read_bytes()
    target = extended(buffer_of(H5StorageCheckpointer()), steps(3))
    before = state(target)
    for size in [0, 8, 96, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointCorrupt, match=r"rows\.h5"):
            target.storage.loads(path)
        assert state(target) == before


# ---------------------------------------------------------------------- files made to harm


def replaced(name: str, **options: Any) -> Any:
    """What puts another dataset in the place of one."""

    def do(opened: Any) -> None:
        del opened[name]
        opened.create_dataset(name, **options)

    return do


def secret(folder: Path, shape: tuple[int, ...]) -> None:
    """Files with numbers that must not be seen, which would fit."""
    with h5py.File(folder / "secret.h5", "w") as opened:
        opened["rows"] = np.full(shape, 7, np.float32)
    (folder / "secret.bin").write_bytes(bytes([7]) * 48)


def virtual(opened: Any, folder: Path) -> None:
    shape = opened["traj_0/obs"].shape
    layout = h5py.VirtualLayout(shape=shape, dtype=np.float32)
    layout[:] = h5py.VirtualSource(str(folder / "secret.h5"), "rows", shape=shape)
    del opened["traj_0/obs"]
    opened.create_virtual_dataset("traj_0/obs", layout)


def linked(name: str, link: Any) -> Any:
    def do(opened: Any, folder: Path) -> None:
        if name in opened:
            del opened[name]
        opened[name] = link(opened, folder)

    return do


HOSTILE = {
    "an external link": linked(
        "traj_0/obs", lambda opened, folder: h5py.ExternalLink(str(folder / "secret.h5"), "rows")
    ),
    "a soft link": linked("traj_0/obs", lambda opened, folder: h5py.SoftLink("/traj_0/next")),
    "a virtual dataset": virtual,
    "data in another file": lambda opened, folder: replaced(
        "traj_0/obs", shape=opened["traj_0/obs"].shape, dtype=np.float32, external=[(str(folder / "secret.bin"), 0, 48)]
    )(opened),
    "objects": lambda opened, folder: replaced("traj_0/obs", data=["a", "b"])(opened),
    "nothing at all": lambda opened, folder: replaced("traj_0/obs", data=h5py.Empty("f4"))(opened),
    "rows that are not there": lambda opened, folder: replaced(
        "traj_0/obs", shape=opened["traj_0/obs"].shape, dtype=np.float32
    )(opened),
    "a row of any size": lambda opened, folder: huge(opened),
    "another dtype": lambda opened, folder: replaced("traj_0/obs", data=np.zeros((4, 3), np.float64))(opened),
    "no done": lambda opened, folder: opened.__delitem__("traj_0/done"),
    "a group less": lambda opened, folder: opened.__delitem__("traj_1"),
    "no description": lambda opened, folder: opened.__delitem__("_description"),
    "a description of nothing": lambda opened, folder: replaced("_description", data=np.zeros(9, np.uint8))(opened),
}


def huge(opened: Any) -> None:
    """One chunk of four thousand million is there."""
    del opened["traj_0/obs"]
    opened.create_dataset("traj_0/obs", shape=(4, 2**40), dtype=np.float32, chunks=(1, 1024), compression="gzip")
    opened["traj_0/obs"][0, :1024] = 1


SAID = {
    "a virtual dataset": "has its data in other files",
    "data in another file": "has its data in other files",
    "objects": "no array of numbers",
    "rows that are not there": "bytes, of which",
    "a row of any size": "bytes, of which",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_files_that_are_not_what_they_should_be(tmp_path: Path, what: str) -> None:
    _, path = alone(tmp_path)
    secret(tmp_path, everything(path)["traj_0/obs"].shape)
    with h5py.File(path, "r+") as opened:
        HOSTILE[what](opened, tmp_path)
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}
    full, _ = alone(tmp_path / "..", count=4)
    for target in (buffer_of(H5StorageCheckpointer()), full):
        held = state(target)
        with pytest.raises((CheckpointCorrupt, CheckpointMismatch)) as caught:
            target.storage.loads(path)
        assert "rows.h5" in str(caught.value)
        assert SAID.get(what, "") in str(caught.value)
        assert state(target) == held
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before
