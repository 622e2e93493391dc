"""Folders that torchrl wrote: rows, counters and priorities are converted exactly; the rest is refused with the cure."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import is_tensorclass

import interop as rl
from fbuf.checkpoint import CheckpointMismatch
from tests.interop.checkpoint.torchrl_dumps_read import (
    EXPECTED,
    FOLDER,
    STRUCTURES,
    TARGETS,
    Step,
    bytes_of,
    fingerprint,
    load,
    same_bits,
)


def loaded(name: str) -> Any:
    buffer = TARGETS[name]()
    load(buffer, FOLDER / name, buffer)
    return buffer


def check(buffer: Any, expected: dict[str, Any]) -> None:
    assert len(buffer) == expected["length"]
    same_bits(buffer.storage[:], expected["leaves"])
    if expected["_cursor"] is not None:
        assert (buffer.writer.cursor, buffer.writer.write_count) == (expected["_cursor"], expected["_write_count"])


def tensors(size: int = 8, **given: Any) -> rl.ReplayBuffer:
    return rl.ReplayBuffer(storage=rl.LazyTensorStorage(size), batch_size=3, **given)


@pytest.mark.parametrize("name", TARGETS)
def test_a_dump_is_converted_loaded_and_goes_on(name: str, tmp_path: Path) -> None:
    """Whatever torch's default device and grad mode are; over what another load stored; the next slot is torchrl's."""
    expected, buffer = EXPECTED[name], TARGETS[name]()
    with torch.device("meta"), torch.inference_mode():
        for _ in range(2):
            load(buffer, FOLDER / name, buffer)
            check(buffer, expected)
    buffer.dumps(tmp_path / "ours")
    again = TARGETS[name]()
    again.loads(tmp_path / "ours")
    check(again, expected)
    if "next" in expected:
        row = torch.tensor([50]) if name == "one_tensor" else buffer[:1]
        assert torch.as_tensor(buffer.extend(row)).tolist() == expected["next"]


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in STRUCTURES])
def test_a_folder_says_what_buffer_wrote_it(name: str) -> None:
    buffer = TARGETS[name]()
    load(buffer, FOLDER / name)
    check(buffer, EXPECTED[name])


def test_a_conversion_changes_nothing_else(tmp_path: Path) -> None:
    """Neither the folder nor the buffer that says how it is to be read, and no file beside the checkpoint."""
    like, before = loaded("pytree"), bytes_of(FOLDER / "pytree")
    like.extend(like[:2])
    kept = fingerprint(like)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/mine.txt").write_text("mine")
    for _ in range(2):  # over a checkpoint that is there
        rl.convert_torchrl(str(FOLDER / "pytree"), tmp_path / "ours", like)
    assert (bytes_of(FOLDER / "pytree"), fingerprint(like)) == (before, kept)
    assert os.listdir(tmp_path) == ["ours"] and (tmp_path / "ours/mine.txt").read_text() == "mine"
    with pytest.raises(CheckpointMismatch):
        rl.convert_torchrl(FOLDER / "h5", tmp_path / "other")
    assert os.listdir(tmp_path) == ["ours"]


def test_loads_names_the_conversion(tmp_path: Path) -> None:
    folder, buffers = FOLDER / "plain", (tensors(), rl.ReplayBufferEnsemble(tensors(), tensors()))
    for buffer in buffers:
        with pytest.raises(CheckpointMismatch, match="written by torchrl") as error:
            buffer.loads(folder)
        assert f"interop.formats.convert_torchrl({str(folder)!r}, " in str(error.value)
    assert not len(buffers[0])


def test_what_is_no_folder_of_torchrl(tmp_path: Path) -> None:
    loaded("plain").dumps(tmp_path / "ours")
    shutil.copytree(FOLDER / "plain", tmp_path / "theirs")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(FileNotFoundError, match="nothing_here"):
        rl.convert_torchrl(tmp_path / "nothing_here", tmp_path / "new")
    for folder in (tmp_path, tmp_path / "ours"):
        with pytest.raises(CheckpointMismatch, match="not written by `dumps`"):
            rl.convert_torchrl(folder, tmp_path / "new")
    with pytest.raises(ValueError, match="another folder"):
        rl.convert_torchrl(tmp_path / "link", tmp_path / "theirs")
    with pytest.raises(TypeError, match="like must be a ReplayBuffer or None, got str"):
        rl.convert_torchrl(tmp_path / "theirs", tmp_path / "new", "ReplayBuffer")  # type: ignore[arg-type]


def test_tensorclasses_come_back_as_those_of_the_target() -> None:
    assert type(loaded("tensorclass")[:]) is Step
    assert type(loaded("tensorclass_below")[:]["step"]) is Step
    fresh = tensors()
    load(fresh, FOLDER / "tensorclass")
    assert not is_tensorclass(fresh[:])
    same_bits(fresh[:], EXPECTED["tensorclass"]["leaves"])


@pytest.mark.parametrize("name", ["priorities", "priorities_double", "priorities_without_alpha"])
def test_priorities_are_those_that_were_given(name: str) -> None:
    expected, sampler = EXPECTED[name]["priorities"], loaded(name).sampler
    given = torch.tensor(expected["given"], dtype=sampler.dtype)
    given = given if expected["alpha"] else torch.ones_like(given)  # every weight is one: what was given is not known
    torch.testing.assert_close(sampler.priorities, given, rtol=1e-6, atol=0)
    assert (sampler.alpha, sampler.beta, sampler.eps) == (expected["alpha"], expected["beta"], expected["eps"])
    assert sampler.default_priority == 3.0


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("epoch", rl.SamplerWithoutReplacement),
        ("consuming", lambda: rl.ConsumingSampler(max_sample_count=2)),
        ("plain", lambda: rl.StalenessAwareSampler(max_staleness=20, version_key="traj")),
    ],
)
def test_samplers_with_a_state_of_their_own_are_set_after_loading(name: str, sampler: Any) -> None:
    refused(tensors(sampler=sampler()), name, "set_sampler")
    buffer = loaded(name)
    buffer.set_sampler(sampler())
    assert len(buffer.sample()) == 3


# ---------------------------------------------------------------------- what does not fit


def refused(buffer: Any, name: str, match: str) -> None:
    before = str(buffer.state_dict()) if len(buffer) else None
    with pytest.raises(CheckpointMismatch, match=match):
        load(buffer, FOLDER / name, buffer)
    assert not len(buffer) if before is None else str(buffer.state_dict()) == before


@pytest.mark.parametrize(
    ("name", "build", "match"),
    [
        ("plain", lambda: tensors(9), "capacity"),
        ("two_dims", lambda: tensors(12), "another ndim"),
        ("plain", lambda: rl.ReplayBuffer(storage=rl.LazyTensorStorage(8, ndim=2), batch_size=3), "ndim=2"),
        ("plain", lambda: rl.ReplayBuffer(storage=rl.ListStorage(8), batch_size=3), "not into a ListStorage"),
        ("compressed", tensors, "extend a buffer that has a LazyTensorStorage"),
        ("ensemble", tensors, "dump each buffer of an ensemble by itself"),
        ("plain", lambda: tensors(sampler=rl.PrioritizedSampler(8, 0.6, 0.4)), "no priorities.*a PrioritizedSampler cannot"),
        ("plain", lambda: rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(8), writer=rl.TensorDictMaxValueWriter()),
         "not with a TensorDictMaxValueWriter"),
        ("highest", tensors, "ranks of rows are not read"),
        ("priorities", tensors, "has priorities.*a RandomSampler cannot"),
        ("priorities_double", lambda: tensors(sampler=rl.PrioritizedSampler(8, 1.1, 1.0, 1e-6)), "float64"),
        ("flat", tensors, "TensorStorageCheckpointer"),
        ("h5", tensors, "H5"),
        ("transforms", tensors, "the state of transforms is not read"),
        ("pytree", tensors, "with one item of their structure"),
        ("non_tensors", tensors, "'name' is a"),
    ],
)  # fmt: skip
def test_a_dump_of_something_else_is_refused(name: str, build: Any, match: str) -> None:
    refused(build(), name, match)


@pytest.mark.parametrize("name", ["one_tensor", "dtypes", "pytree", "tensorclass", "two_dims"])
def test_other_items_are_refused_and_nothing_changes(name: str) -> None:
    refused(loaded("plain"), name, "does not fit|ndim|leading dims|are no rows|are not those")
