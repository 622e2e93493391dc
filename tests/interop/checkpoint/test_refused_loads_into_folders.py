"""Loads into storages in folders that are refused, and saves that are: nothing is left, and nothing has changed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fbuf import CheckpointCorrupt, CheckpointMismatch
from interop import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, ReplayBuffer, RoundRobinWriter
from tests.interop.rows import check_same, flat_td


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(folder: Path, capacity: int = 8, **options: Any) -> ReplayBuffer:
    """One with priorities that has written nothing yet."""
    storage = LazyMemmapStorage(capacity, scratch_dir=folder, **options)
    return ReplayBuffer(storage=storage, sampler=PrioritizedSampler(capacity, 1.0, 1.0))


def filled(capacity: int = 8) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=PrioritizedSampler(capacity, 1.0, 1.0))
    buffer.extend(flat_td(range(10)))
    buffer.update_priority(torch.arange(8), torch.arange(8) + 1.0)
    return buffer


def flipped(folder: Path, which: Callable[[Path], bool]) -> None:
    """Flip a bit of one of the data files."""
    (file,) = [path for path in folder.rglob("*") if path.is_file() and path.name != "MANIFEST.json" and which(path)]
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    os.chmod(file, 0o644)
    file.write_bytes(damaged)


def rows_flipped(folder: Path) -> None:
    flipped(folder, lambda path: path.name != "small")


def rest_flipped(folder: Path) -> None:
    flipped(folder, lambda path: path.name == "small")


def rows_cut(folder: Path) -> None:
    (file,) = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("MANIFEST.json", "small")]
    os.chmod(file, 0o644)
    os.truncate(file, file.stat().st_size - 1)


def manifest_flipped(folder: Path) -> None:
    path = folder / "MANIFEST.json"
    path.write_bytes(path.read_bytes().replace(b'"_cursor"', b'"_cursoR"', 1))


DAMAGES = {each.__name__: each for each in (rows_flipped, rest_flipped, rows_cut, manifest_flipped)}


def goes_on(buffer: ReplayBuffer, folder: Path) -> None:
    """It takes rows and priorities, and they are kept."""
    buffer.extend(flat_td([1, 2]))
    buffer.update_priority([1], 3.0)
    check_same(buffer[:], flat_td([1, 2]))
    buffer.storage.close()
    again = ReplayBuffer(storage=LazyMemmapStorage.open(folder), sampler=PrioritizedSampler(8, 1.0, 1.0))
    check_same(again[:], flat_td([1, 2]))
    assert again.sampler.priorities.tolist() == [1, 3] and again.write_count == 2


# ------------------------------------------------------------------ into a folder without rows


@pytest.mark.parametrize(  # a storage by itself has nothing but rows
    ("through", "damage"),
    [("buffer", each) for each in DAMAGES] + [("storage", each) for each in DAMAGES if each != "rest_flipped"],
)
def test_damage_leaves_no_files_and_no_lock(through: str, damage: str, tmp_path: Path) -> None:
    source = filled()
    (source if through == "buffer" else source.storage).dumps(tmp_path / "c")
    if through == "storage" and damage == "manifest_flipped":
        path = tmp_path / "c" / "MANIFEST.json"
        path.write_bytes(path.read_bytes().replace(b'"ring"', b'"rinG"', 1))
    else:
        DAMAGES[damage](tmp_path / "c")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "mine").write_text("kept")
    buffer = made(tmp_path / "rows")
    for _ in range(2):
        with pytest.raises(CheckpointCorrupt):
            (buffer if through == "buffer" else buffer.storage).loads(tmp_path / "c")
        assert content(tmp_path / "rows") == {"mine": b"kept"} and not buffer.storage.initialized
        assert (len(buffer), buffer.write_count, buffer.writer.cursor) == (0, 0, 0)
    goes_on(buffer, tmp_path / "rows")


def mismatches() -> dict[str, Callable[[Path], ReplayBuffer]]:
    def with_(folder: Path, **parts: Any) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=folder), **parts)

    return {
        "capacity": lambda folder: made(folder, 9),
        "ndim": lambda folder: made(folder, ndim=2),
        "sampler": with_,
        "writer": lambda folder: with_(
            folder, sampler=PrioritizedSampler(8, 1.0, 1.0), writer=RoundRobinWriter(track_generations=True)
        ),
        "priorities": lambda folder: with_(folder, sampler=PrioritizedSampler(8, 1.0, 1.0, dtype=torch.float64)),
    }


@pytest.mark.parametrize("call", ["loads", "load_state_dict"])
@pytest.mark.parametrize("kind", mismatches())
def test_what_does_not_fit_leaves_no_files_and_no_lock(kind: str, call: str, tmp_path: Path) -> None:
    source = filled()
    source.dumps(tmp_path / "c")
    given = tmp_path / "c" if call == "loads" else source.state_dict()
    buffer = mismatches()[kind](tmp_path / "rows")
    with pytest.raises(CheckpointMismatch):
        getattr(buffer, call)(given)
    assert not (tmp_path / "rows").exists() and not buffer.storage.initialized
    buffer.extend(flat_td([1, 2]).reshape(2, 1) if kind == "ndim" else flat_td([1, 2]))
    assert len(buffer) == 2


@pytest.mark.parametrize("place", [("_writer", "_cursor"), ("_sampler", "_beta"), ("_storage", "_layout"), ("_rng",)])
def test_a_state_dict_that_is_damaged_leaves_no_files_and_no_lock(place: tuple[str, ...], tmp_path: Path) -> None:
    state: Any = filled().state_dict()
    node = state
    for key in place[:-1]:
        node = node[key]
    assert place[-1] in node
    node[place[-1]] = ["no"]
    buffer = made(tmp_path / "rows")
    for _ in range(2):
        with pytest.raises((CheckpointCorrupt, CheckpointMismatch)):
            buffer.load_state_dict(state)
        assert not (tmp_path / "rows").exists() and not buffer.storage.initialized
    goes_on(buffer, tmp_path / "rows")


# ------------------------------------------------------------------ into a folder with rows


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_keeps_the_rows_that_were_to_be_replaced(damage: str, tmp_path: Path) -> None:
    before = made(tmp_path / "rows")
    before.extend(flat_td([31, 32, 33]))
    before.update_priority([1], 5.0)
    before.storage.close()
    filled().dumps(tmp_path / "c")
    whole = content(tmp_path / "c")
    DAMAGES[damage](tmp_path / "c")
    assert content(tmp_path / "c") != whole
    files = {name: data for name, data in content(tmp_path / "rows").items() if name != "storage.lock"}
    buffer = made(tmp_path / "rows", existsok=True)
    with pytest.raises(CheckpointCorrupt):
        buffer.loads(tmp_path / "c")
    assert {name: data for name, data in content(tmp_path / "rows").items() if name != "storage.lock"} == files
    again = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path / "rows"), sampler=PrioritizedSampler(8, 1.0, 1.0))
    check_same(again[:], flat_td([31, 32, 33]))
    assert again.sampler.priorities.tolist() == [1, 5, 1] and (again.write_count, again.writer.cursor) == (3, 3)


# ------------------------------------------------------------------ saves
