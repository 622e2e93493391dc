"""Folders in torchrl's layout that are damaged, or made to harm: a typed error, nothing run, nothing written or lost."""

import contextlib
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import interop as rl
from fbuf.checkpoint import CheckpointCorrupt, CheckpointMismatch
from tests.interop.checkpoint.torchrl_dumps_read import FOLDER, TARGETS, Victim, edit, load

SOME = ("pytree", "priorities")
MORE = ("uniform", "two_dims", "tensorclass_below")
OTHER_JSON = ("{}", "[" * 100_000, '{"a": NaN}', '{"shape": [8], "shape": [8]}', '{"_type": "<class \'os.system\'>"}')
UNUSED = ("prefetch.pkl", "rng_state")


def damages(file: Path) -> Any:
    """What can have happened to a file, each with what does it."""
    raw = file.read_bytes()
    yield "deleted", file.unlink
    yield "emptied", lambda: file.write_bytes(b"")
    yield "shorter by one", lambda: file.write_bytes(raw[:-1])
    yield "extended", lambda: file.write_bytes(raw + bytes(64))
    if file.suffix == ".json":
        for text in OTHER_JSON:
            yield f"now {text[:30]}", lambda text=text: file.write_text(text)
    yield "a folder", lambda: (file.unlink(), file.mkdir())


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_damaged_file_is_named_and_nothing_changes(name, tmp_path):
    victim = Victim(name, tmp_path)
    files = [each for each in sorted(victim.folder.rglob("*")) if each.is_file()]
    silent = []
    for file in files:
        relative = str(file.relative_to(victim.folder))
        if not file.stat().st_size:
            continue
        for damage, do in list(damages(file)):
            do()
            error = victim.attacked(f"{relative} {damage}")
            if error is None and not relative.startswith(UNUSED):
                silent.append((relative, damage))
            elif error is not None:
                assert isinstance(error, CheckpointMismatch) or str(victim.folder) in str(error), (
                    relative,
                    damage,
                    error,
                )
            victim.restore(file)
    assert not silent


@pytest.mark.parametrize(
    ("named", "error"), [("TensorDictParams", None), ("", CheckpointCorrupt), ("Step", CheckpointCorrupt)]
)
def test_a_nested_class_is_the_one_that_was_described(named, error, tmp_path):
    shutil.copytree(FOLDER / "uniform", tmp_path / "dump")
    edit(tmp_path / "dump/storage/meta.json", lambda found: {**found, "next": {"type": named}})
    with pytest.raises(error) if error else contextlib.nullcontext():
        load(TARGETS["uniform"](), tmp_path / "dump")


@pytest.mark.parametrize("name", SOME)
def test_links_and_pipes_are_refused(name, tmp_path):
    victim = Victim(name, tmp_path / "copy")
    outside = tmp_path / "outside"
    for file in [each for each in sorted(victim.folder.rglob("*")) if each.is_file()]:
        relative = str(file.relative_to(victim.folder))
        if relative.startswith(UNUSED) or not file.stat().st_size:
            continue
        shutil.copy(file, outside)  # what the link leads to would be good
        file.unlink()
        file.symlink_to(outside)
        assert isinstance(victim.attacked(relative), CheckpointCorrupt), relative
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointCorrupt):
            load(victim.buffer, victim.folder, victim.buffer)
        victim.restore(file)
    for folder in [each for each in sorted(victim.folder.rglob("*")) if each.is_dir() and each.name not in UNUSED]:
        moved = tmp_path / "moved"
        shutil.move(folder, moved)
        folder.symlink_to(moved)
        assert isinstance(victim.attacked(str(folder)), CheckpointCorrupt), folder
        shutil.rmtree(moved)
        victim.restore(folder)


# ---------------------------------------------------------------------- code


class Canary:
    """Pickled, it makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def canary(tmp_path):
    yield tmp_path / "canary"
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["other.pickle", "pickle.pkl"])
@pytest.mark.parametrize("dump", ["uniform", "tensorclass_below", "non_tensors"])
def test_pickled_entries_are_refused(dump, name, tmp_path, canary):
    folder = tmp_path / dump
    shutil.copytree(FOLDER / dump, folder)
    for meta in list(folder.rglob("meta.json")):
        (meta.parent / name).write_bytes(pickle.dumps(Canary(canary)))
    for meta in list(folder.rglob("meta.json")):
        if "NonTensor" in (text := meta.read_text()) and '"data"' in text:
            edit(meta, lambda found: {**found, "data": name})
    buffer = (
        rl.ReplayBuffer(storage=rl.LazyTensorStorage(8), batch_size=3) if dump == "non_tensors" else TARGETS[dump]()
    )
    with pytest.raises(CheckpointMismatch, match="pickle"):
        load(buffer, folder, buffer)


# ---------------------------------------------------------------------- paths and sizes


@pytest.mark.parametrize("key", ["../outside", "/etc/passwd", "..", "a/../../outside", "x\0y", "\ud800", "n" * 400])
def test_names_do_not_lead_out_of_the_folder(key, tmp_path):
    (tmp_path / "outside.memmap").write_bytes(bytes(64))
    described = {"device": "cpu", "shape": [8], "dtype": "torch.int64", "is_nested": False}
    for entry in (described, {"type": "TensorDict"}):
        victim = Victim("plain", tmp_path / str(len(os.listdir(tmp_path))))
        edit(victim.folder / "storage/meta.json", lambda found, entry=entry: {**found, key: entry})
        assert isinstance(victim.attacked(key), CheckpointCorrupt)
    victim = Victim("pytree", tmp_path / "pytree")
    edit(
        victim.folder / "storage/storage_metadata.json",
        lambda found: {**found, "metadata": {**found["metadata"], key: {"dtype": "torch.int64", "shape": [8]}}},
    )
    assert isinstance(victim.attacked(key), CheckpointMismatch)
    assert (tmp_path / "outside.memmap").stat().st_size == 64


# ---------------------------------------------------------------------- values that do not fit together


SUMS, LEAST = "sampler/sumtree.memmap", "sampler/mintree.memmap"


@pytest.mark.parametrize(
    ("name", "file", "dtype", "place", "value"),
    [
        *(("priorities", SUMS, np.float64, 0, value) for value in (np.nan, 5)),
        ("priorities", LEAST, np.float64, 0, 5),
        ("priorities", LEAST, np.float64, 7, np.nan),
        ("plain", "storage/next/done.memmap", np.uint8, 0, 2),
    ],
)
def test_values_that_cannot_be_are_refused(name, file, dtype, place, value, tmp_path):
    victim = Victim(name, tmp_path)
    found = np.fromfile(victim.folder / file, dtype)
    found[place] = value
    found.tofile(victim.folder / file)
    assert str(victim.folder) in str(victim.attacked(file))


@pytest.mark.parametrize(
    ("name", "file", "key", "values"),
    [
        ("plain", "storage/storage_metadata.json", "len", (9, -1, 2.0)),
        ("plain", "storage/storage_metadata.json", "is_pytree", (True, 0)),
        ("plain", "writer/metadata.json", "cursor", (6, 8)),
        ("plain", "writer/metadata.json", "write_count", (-1,)),
        ("plain", "writer/metadata.json", "rank_key", ("obs",)),
        ("plain", "buffer_metadata.json", "batch_size", (0, "3")),
        ("priorities", "sampler/sampler_metadata.json", "_alpha", (-1.0,)),
        ("priorities", "sampler/sampler_metadata.json", "_max_capacity", (8.5, 2.0**62)),
        ("priorities", "sampler/sampler_metadata.json", "_max_priority", ([3.0], [3.0, 99.0], ["3", 0])),
        ("priorities", "sampler/sampler_metadata.json", "_eps", ("0",)),
    ],
)
def test_entries_that_cannot_be_are_refused(name, file, key, values, tmp_path):
    victim = Victim(name, tmp_path)
    for value in values:
        edit(victim.folder / file, lambda found, value=value: {**found, key: value})
        assert victim.attacked(f"{key} {value}") is not None
