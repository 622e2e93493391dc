"""`verify` finds every damaged byte, names the file, raises nothing for damage, and needs little memory."""

import contextlib
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
import interop
from fbuf.checkpoint import CheckpointCorrupt, Reading
from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    Report,
    TensorDictReplayBuffer,
    seal,
    verify,
)
from interop.datasets.errors import DatasetError
from interop.looking import verification
from interop.shared.folder_description import STATE, SUMS
from tests.interop.looking.places import a_checkpoint, a_folder, a_list, an_ensemble, sparse, steps

MADE = {"checkpoint": a_checkpoint, "list": a_list, "ensemble": an_ensemble, "rows": a_folder}


def files_of(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file() and each.stat().st_size)


def flip(path: Path, at: int) -> None:
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.mark.parametrize("name", MADE)
def test_one_bit_of_any_file_is_found(name: str, tmp_path: Path) -> None:
    path = MADE[name](tmp_path / "it")
    report = verify(path)
    assert report.ok and not report.damaged and not report.notes and report.bytes > 0
    unchecked = ("storage.lock", "meta.json")  # who owns the folder; and what only other programs read
    for each in files_of(path):
        if each.name in unchecked:
            continue
        size = 8 * 16 if each.name == STATE else each.stat().st_size  # the counters; the undo record is no data
        for at in (8 * 8 if each.name == STATE else 0, size // 2, size - 1) if each.name != STATE else (8 * 8 + 8,):
            flip(each, at)
            found = verify(path)
            assert not found.ok, (each, at)
            assert each.name in str(found.damaged[0]) or name == "ensemble"
            flip(each, at)
    assert verify(path).ok


def test_damage_names_the_keys_that_the_file_holds(tmp_path: Path) -> None:
    """Of a checkpoint, of files of many rows, of a pytree, and of a folder of rows."""
    many = TensorDictReplayBuffer(storage=LazyTensorStorage(30))
    many.extend(TensorDict({"x": torch.zeros(30, 2), "next": {"image": torch.zeros(30, 25_000)}}, [30]))
    many.dumps(tmp_path / "many")
    fbuf.save_state(tmp_path / "state", {"rows": np.zeros((400, 1000)), "count": np.zeros(3)})
    a_checkpoint(tmp_path / "checkpoint")
    a_folder(tmp_path / "folder")
    found: dict[str, list[str]] = {}
    for each in files_of(tmp_path):
        if each.suffix not in (".json", ".lock", ".state", ".sums"):
            middle = each.stat().st_size // 2
            flip(each, middle)
            at = tmp_path / each.relative_to(tmp_path).parts[0]
            for damage in verify(at).damaged:
                found.setdefault(at.name, []).append(damage.holds)
                assert str(damage).endswith(f"It holds {damage.holds}" if damage.holds else damage.what)
            flip(each, middle)
    parts = [re.fullmatch(r"rows (\d+) to (\d+) of x, next.image, index", each) for each in found["many"]]
    rows = [row for part in parts if part for row in range(int(part[1]), int(part[2]) + 1)]
    assert rows == list(range(30)) and len(found["many"]) > 2
    assert found["state"][-1] == "['count']" and found["state"][0].endswith(" of ['rows']")
    assert any("sampler.state._priorities" in each for each in found["checkpoint"])
    assert "rows 0 to 19 of next.reward" in found["folder"] and "rows 0 to 19 of action" in found["folder"]


@pytest.mark.parametrize("name", MADE)
def test_missing_shorter_and_replaced_files_are_named(name: str, tmp_path: Path) -> None:
    path = MADE[name](tmp_path / "it")
    others = (STATE, "MANIFEST.json")  # without which it is no checkpoint
    largest = max((each for each in files_of(path) if each.name not in others), key=lambda each: each.stat().st_size)
    content = largest.read_bytes()
    largest.chmod(0o644)
    largest.write_bytes(content[:-1])
    assert largest.name in str(verify(path).damaged[0])
    largest.unlink()
    assert largest.name in str(verify(path).damaged[0])
    other = tmp_path / "other"
    other.write_bytes(content)
    largest.symlink_to(other)
    assert not verify(path).ok
    assert str(path) in str(verify(path))


def test_a_folder_reports_all_of_its_members(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name, make in MADE.items():
        make(tmp_path / "run" / name)
    calls: list[tuple[int, int]] = []
    report = verify(tmp_path / "run", lambda done, total: calls.append((done, total)))
    assert report.ok and report.kind == "folder"
    assert calls and all(0 < done <= total for done, total in calls)
    flip(next((tmp_path / "run" / "rows").glob("action.memmap")), 3)
    report = verify(tmp_path / "run")
    assert [Path(each.file).name for each in report.damaged] == ["action.memmap"]
    assert report.to_dict()["damaged"][0]["what"].endswith("the first one at byte 0")


def test_checksums_of_rows_are_outdated_by_the_next_owner_and_written_at_close(tmp_path: Path) -> None:
    path = a_folder(tmp_path / "rows", checksums=False)
    assert "no checksums" in verify(path).notes[0] and not (path / SUMS).exists()
    seal(path)
    assert verify(path).notes == []
    storage = LazyMemmapStorage.open(path)
    assert "outdated" in verify(path).notes[0]
    with pytest.raises(RuntimeError, match="in use"):
        seal(path)
    buffer = TensorDictReplayBuffer(storage=storage)
    buffer.extend(steps(3))
    assert verify(path).ok
    storage.close()
    assert verify(path).notes == []
    reader = LazyMemmapStorage.open(path, "r")
    assert verify(path).notes == [] and len(reader) == 20
    LazyMemmapStorage.open(path).cleanup()
    assert not list(path.iterdir())


KILLED = """
import os, torch
from interop import LazyMemmapStorage

if (child := os.fork()) == 0:
    for run in range(2):
        storage = LazyMemmapStorage.open(path)
        storage.set(range(2), torch.full((2, 3), 7.0))
        if not run:
            storage.close()
    os.kill(os.getpid(), 9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -9
"""


def test_a_killed_writer_leaves_no_wrong_checksums(in_a_fork: Callable[..., str], tmp_path: Path) -> None:
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "rows", checksums=True)
    storage.set(range(4), torch.ones(4, 3))
    storage.close()
    in_a_fork(KILLED, path=str(tmp_path / "rows"))
    report = verify(tmp_path / "rows")
    assert report.ok and "has not closed it" in report.notes[0]
    seal(tmp_path / "rows")
    assert verify(tmp_path / "rows").notes == []


def test_writes_take_no_more_operations_with_checksums(tmp_path: Path) -> None:
    data = TensorDict({"x": torch.zeros(2, 3)}, [2])
    storages = [
        LazyMemmapStorage(8, scratch_dir=tmp_path / name, checksums=name == "with") for name in ("with", "without")
    ]
    for storage in storages:
        storage.set(range(2), data)
    assert not any((tmp_path / name / SUMS).exists() for name in ("with", "without"))
    for storage in storages:
        storage.close()
    assert (tmp_path / "with" / SUMS).exists() and not (tmp_path / "without" / SUMS).exists()


def memory_to_verify(path: Path) -> tuple[Report, int]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = verify(path)
    return report, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("size", [1 << 28, pytest.param(100 << 30, marks=pytest.mark.slow)])
def test_large_rows_are_streamed(size: int, tmp_path: Path) -> None:
    path = sparse(tmp_path / "rows", size)
    seal(path)
    report, memory = memory_to_verify(path)
    assert report.ok and report.bytes > size and not report.notes
    assert memory < 32 << 10  # KiB
    with open(
        path / "_-single-tensor-_.memmap" if (path / "_-single-tensor-_.memmap").exists() else largest(path), "r+b"
    ) as file:
        file.seek(size // 2)
        file.write(b"x")
    assert f"byte {size // 2:,}" in str(verify(path))


def largest(path: Path) -> Path:
    return max(path.iterdir(), key=os.path.getsize)


# ------------------------------------------------------------------ datasets of others


def _minari(path: Path, data_format: str) -> None:
    minari = pytest.importorskip("minari")
    gymnasium = pytest.importorskip("gymnasium")
    data = path / "data"
    data.mkdir(parents=True)
    space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    kinds = {"data_format": data_format, "observation_space": space, "action_space": space}
    storage = minari.dataset.minari_storage.MinariStorage.new(data_path=data, env_spec=None, **kinds)
    from minari.data_collector import EpisodeBuffer

    rng = np.random.default_rng(0)
    episodes = [
        EpisodeBuffer(
            id=number,
            observations=[*rng.normal(size=(6, 2)).astype(np.float32)],
            actions=[*rng.normal(size=(5, 2)).astype(np.float32)],
            rewards=[1.0] * 5,
            terminations=[False] * 4 + [True],
            truncations=[False] * 5,
            infos={},
        )
        for number in range(3)
    ]
    storage.update_episodes(episodes)


def _parquet(path: Path, checksum: bool = False) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (path / "data").mkdir(parents=True)
    values = pa.table({"x": np.arange(3000) + 0.5})
    name = path / "data" / "train-00000-of-00001.parquet"
    parquet.write_table(values, name, compression="none", use_dictionary=False, write_page_checksum=checksum)


OF_OTHERS = {
    "minari hdf5": lambda path: _minari(path, "hdf5"),
    "minari arrow": lambda path: _minari(path, "arrow"),
    "minari parquet": lambda path: _minari(path, "parquet"),
    "hub": _parquet,
}


def _rows_of(path: Path) -> torch.Tensor:
    """All values that a reader gets, as one tensor."""
    buffer = interop.open(path)
    rows = buffer[:]
    return torch.cat([rows[key].double().reshape(-1) for key in sorted(rows.keys(True, True), key=str)])


@pytest.mark.parametrize("name", OF_OTHERS)
@pytest.mark.parametrize("places", [3, pytest.param(60, marks=pytest.mark.slow)], ids=["some", "many"])
def test_what_a_reader_refuses_is_damage_and_other_values_need_a_note(
    name: str, places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    original = tmp_path / "original"
    OF_OTHERS[name](original)
    report = verify(original)
    assert report.ok and report.bytes == 0 and report.notes, "they have no checksums"
    expected = _rows_of(original)
    rng = np.random.default_rng(len(name))
    changes = [
        (each.relative_to(original), at)
        for each in files_of(original)
        for at in (None, *rng.integers(each.stat().st_size, size=places).tolist())
    ]
    for number, (file, at) in enumerate(changes):
        path = tmp_path / f"copy{number}"
        shutil.copytree(original, path)
        if at is None:
            (path / file).unlink()
        else:
            flip(path / file, at)
        try:
            found = verify(path)
        except interop.UnknownPathError:  # without the file that says what it is
            continue
        try:
            same = torch.equal(_rows_of(path), expected)
        except (CheckpointCorrupt, DatasetError):
            assert not found.ok, (file, at)
            with contextlib.suppress(CheckpointCorrupt):
                interop.inspect(path)
        else:
            assert same or not found.ok or found.notes, (file, at)
        shutil.rmtree(path)


def test_bytes_are_compared_where_a_page_has_a_checksum(tmp_path: Path) -> None:
    _parquet(tmp_path / "with", checksum=True)
    _parquet(tmp_path / "without")
    report = verify(tmp_path / "with")
    assert report.bytes > 24_000 and not report.notes
    [file] = files_of(tmp_path / "with")
    flip(file, 12_000)
    assert not verify(tmp_path / "with").ok
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "some.h5", "w") as h5:
        h5.create_dataset("sure", data=np.zeros(1000), fletcher32=True)
        h5.create_dataset("not", data=np.zeros(1000))
    report = verify(tmp_path / "some.h5")
    assert 8000 <= report.bytes < 9000 and "1 of its arrays have no checksums, as not" in report.notes[0]


def test_the_files_for_other_programs_are_checked(tmp_path: Path) -> None:
    path = a_folder(tmp_path / "rows")
    for change in (lambda text: text.replace("float32", "float64", 1), lambda text: text[:40]):
        meta = path / "meta.json"
        before = meta.read_text()
        meta.write_text(change(before))
        assert ["meta.json" in each.file for each in verify(path).damaged] == [True]
        meta.write_text(before)
    assert verify(path).ok


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Reading` looks at the manifest once more, after the files were compared."""
    path = a_checkpoint(tmp_path / "it")
    replaced = []

    def reading(*given: object) -> object:
        if not replaced:
            replaced.append(a_checkpoint(path))
            raise CheckpointCorrupt(f"{path}/data-0: cannot be read (No such file or directory)")
        return Reading(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(verification, "Reading", reading)
    assert verify(path).ok and replaced
    monkeypatch.setattr(verification, "_was_replaced", lambda *_: False)
    replaced.clear()
    assert not verify(path).ok
