"""H5 files: what is in them, who else can write them, and what is not followed."""

import resource
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from fbuf.checkpoint import load
from interop import (
    CheckpointCorrupt,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    StorageEnsemble,
)
from tests.interop.checkpoint.ted_buffers import alone, buffer_of, check_same, everything, extended, state, steps
from tests.interop.ted.model import differences, laid_out, paths


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
        spare = 5 - count
        rows = []
        for length, _ in trajectories:
            rows.append(length)
            if spare and sum(rows) % 5 == count:
                rows.append(spare)
        assert [len(found[f"{group}/done"]) for group in groups] == rows
    assert set(found) - {"_storage_shape", "_len", "shift", "is_full"} == {
        f"{group}/{name}"
        for group in groups
        for name in ("obs", "deep/more", "action", "collector/traj_ids", "done", "terminated", "truncated", "reward")
    }


def test_rows_that_were_never_written_take_no_room(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10**6), checkpointer=H5StorageCheckpointer())
    extended(buffer, steps(10))
    buffer.dumps(tmp_path / "saved")
    assert h5_file(tmp_path).stat().st_size < 10**5
    other = ReplayBuffer(storage=LazyTensorStorage(10**6), checkpointer=H5StorageCheckpointer())
    other.loads(tmp_path / "saved")
    check_same(other, buffer)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "gzip", "compression_opts": 9},
        (("compression", "lzf"), ("shuffle", True), ("fletcher32", True)),
        {"compression": "gzip", "chunks": True},
    ],
)
@pytest.mark.parametrize("count", [3, 8])
def test_compressed(tmp_path: Path, options: Any, count: int) -> None:
    buffer = extended(buffer_of(H5StorageCheckpointer(h5_kwargs=options), (2,)), steps(count, (2,)))
    other = buffer_of(H5StorageCheckpointer(), (2,))
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    check_same(other, buffer)
    with h5py.File(h5_file(tmp_path)) as opened:
        assert opened["traj_0/obs"].compression in ("gzip", "lzf")
        assert opened["shift"].compression is None


def test_options_that_h5py_does_not_know(tmp_path: Path) -> None:
    buffer, path = alone(tmp_path)
    buffer.storage.checkpointer = H5StorageCheckpointer(h5_kwargs={"compression": "no such"})
    before = path.read_bytes()
    for target in (path, tmp_path / "saved"):
        with pytest.raises(ValueError, match="no such"):
            buffer.storage.dumps(target)
    assert path.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"rows.h5"}


def test_arguments() -> None:
    with pytest.raises(TypeError, match="positional"):
        H5StorageCheckpointer("a.h5")  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword"):
        H5StorageCheckpointer(compression="gzip")
    for name in ("", "../a.h5", "a/b.h5", "/a.h5"):
        with pytest.raises(ValueError, match="must be the name of a file"):
            H5StorageCheckpointer(checkpoint_file=name)


def test_other_names(tmp_path: Path) -> None:
    options = {"checkpoint_file": "rows.h5", "shift_key": ("meta", "at"), "is_full_key": "full"}
    rows = steps(8).data
    for part in (rows, rows["next"]):
        part["over"] = part.pop("done")
    checkpointer = H5StorageCheckpointer(
        **options, done_key=("next", "over"), done_keys=["over", "terminated", "truncated"]
    )
    buffer, other = buffer_of(checkpointer), buffer_of(H5StorageCheckpointer())
    buffer.extend(rows)
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    check_same(other, buffer)
    found = everything(h5_file(tmp_path))
    assert {"meta/at", "full"} <= set(found)
    rows["a/b"] = torch.zeros(8)
    slashed = buffer_of(H5StorageCheckpointer(done_key=("next", "over"), done_keys=["over", "terminated", "truncated"]))
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


@pytest.mark.parametrize(("count", "lanes"), [(3, ()), (5, (2,)), (8, (2,)), (10, ())])
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


def test_what_a_file_by_itself_cannot_tell(tmp_path: Path) -> None:
    buffer = extended(buffer_of(H5StorageCheckpointer()), steps(8))
    with pytest.raises(ValueError, match=r"no dtype bfloat16\. Give a path"):
        buffer.storage.dumps(tmp_path / "rows.h5")
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.storage.dumps(tmp_path / "rows.h5")
    with pytest.raises(RuntimeError, match="non-initialized"):
        buffer_of(H5StorageCheckpointer()).storage.dumps(tmp_path / "rows.h5")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        buffer.storage.loads(tmp_path / "rows.h5")


def test_files_that_were_cut(tmp_path: Path) -> None:
    _, path = alone(tmp_path)
    whole = path.read_bytes()
    target = extended(buffer_of(H5StorageCheckpointer()), steps(3))
    before = state(target)
    for size in [0, 1, 7, 8, 40, 95, 96, 200, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointCorrupt, match=r"rows\.h5"):
            target.storage.loads(path)
        assert state(target) == before


def test_files_of_a_checkpoint_that_were_damaged(tmp_path: Path) -> None:
    buffer = extended(buffer_of(H5StorageCheckpointer()), steps(8))
    buffer.dumps(tmp_path / "saved")
    path = h5_file(tmp_path)
    whole = path.read_bytes()
    for place in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CheckpointCorrupt, match=r"checkpoint\.h5"):
            buffer_of(H5StorageCheckpointer()).loads(tmp_path / "saved")
    path.write_bytes(whole)
    other = buffer_of(H5StorageCheckpointer())
    other.loads(tmp_path / "saved")
    check_same(other, buffer)


# ---------------------------------------------------------------------- disks that fail


def test_a_disk_that_is_full_at_any_byte(tmp_path: Path) -> None:
    """No write may fail unseen, whenever HDF5 does it. Files may not grow beyond a size: the system says so as of a disk."""
    rows = steps(8, observations={"obs": ((300,), torch.float32)})
    buffer = extended(buffer_of(H5StorageCheckpointer()), rows)
    buffer.dumps(tmp_path / "saved")
    buffer.storage.dumps(tmp_path / "rows.h5")
    size = h5_file(tmp_path / "saved").stat().st_size
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in [1, 100, 2000, *range(size // 12, size, size // 12), size - 1]:
        for target, save in ((tmp_path / "saved", buffer.dumps), (tmp_path / "rows.h5", buffer.storage.dumps)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            try:
                with pytest.raises(OSError, match="File too large"):
                    save(target)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before
    assert set(paths(buffer[:]))


def test_the_file_is_named_in_the_checkpoint(tmp_path: Path) -> None:
    buffer = extended(buffer_of(H5StorageCheckpointer(checkpoint_file="mine.h5")), steps(8))
    buffer.storage.dumps(tmp_path / "saved")
    assert load(tmp_path / "saved", lambda source: source.tree["content"]["file"]) == "mine.h5"
    assert h5_file(tmp_path).name == "mine.h5"
