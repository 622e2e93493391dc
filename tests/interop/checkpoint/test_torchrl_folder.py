"""Folders that torchrl wrote: rows, counters and priorities are loaded exactly; the rest is refused with the cure."""

from typing import Any

import pytest
import torch
from tensordict import is_tensorclass

import interop as rl
from fbuf.checkpoint import CheckpointMismatch
from tests.interop.checkpoint.torchrl_dumps_read import EXPECTED, FOLDER, TARGETS, Step, load, same_bits


def loaded(name: str) -> Any:
    buffer = TARGETS[name]()
    load(buffer, FOLDER / name)
    return buffer


def check(buffer: Any, expected: dict[str, Any]) -> None:
    assert len(buffer) == expected["length"]
    same_bits(buffer._storage[:], expected["leaves"])
    if expected["_cursor"] is not None:
        assert (buffer._writer._cursor, buffer._writer.write_count) == (expected["_cursor"], expected["_write_count"])


def tensors(size: int = 8, **given: Any) -> rl.ReplayBuffer:
    return rl.ReplayBuffer(storage=rl.LazyTensorStorage(size), batch_size=3, **given)


@pytest.mark.parametrize("name", TARGETS)
def test_a_dump_is_loaded_goes_on_and_is_saved_as_ours(name: str, tmp_path: Any) -> None:
    """Whatever torch's default device and grad mode are; over what another load stored; the next slot is torchrl's."""
    expected, buffer = EXPECTED[name], TARGETS[name]()
    with torch.device("meta"), torch.inference_mode():
        for _ in range(2):
            load(buffer, FOLDER / name)
            check(buffer, expected)
    buffer.dumps(tmp_path / "ours")
    again = TARGETS[name]()
    load(again, tmp_path / "ours")
    check(again, expected)
    if "next" in expected:
        row = torch.tensor([50]) if name == "one_tensor" else buffer[:1]
        assert torch.as_tensor(buffer.extend(row)).tolist() == expected["next"]


def test_tensorclasses_come_back_as_those_of_the_target() -> None:
    assert type(loaded("tensorclass")[:]) is Step
    assert type(loaded("tensorclass_below")[:]["step"]) is Step
    fresh = tensors()
    fresh.loads(FOLDER / "tensorclass")
    assert not is_tensorclass(fresh[:])
    same_bits(fresh[:], EXPECTED["tensorclass"]["leaves"])


@pytest.mark.parametrize("name", ["priorities", "priorities_double", "priorities_without_alpha"])
def test_priorities_are_those_that_were_given(name: str) -> None:
    expected, sampler = EXPECTED[name]["priorities"], loaded(name)._sampler
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
        buffer.loads(FOLDER / name)
    assert not len(buffer) if before is None else str(buffer.state_dict()) == before


@pytest.mark.parametrize(
    ("name", "build", "match"),
    [
        ("plain", lambda: tensors(9), "capacity"),
        ("two_dims", lambda: tensors(12), "another ndim"),
        ("plain", lambda: rl.ReplayBuffer(storage=rl.LazyTensorStorage(8, ndim=2), batch_size=3), "ndim=2"),
        ("plain", lambda: rl.ReplayBuffer(storage=rl.ListStorage(8), batch_size=3), "not into a ListStorage"),
        ("compressed", lambda: rl.ReplayBuffer(storage=rl.CompressedListStorage(8)), "with the items of a list"),
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
        ("pytree", tensors, "write one item"),
        ("non_tensors", tensors, "'name' is a"),
    ],
)  # fmt: skip
def test_a_dump_of_something_else_is_refused(name: str, build: Any, match: str) -> None:
    refused(build(), name, match)


@pytest.mark.parametrize("name", ["one_tensor", "dtypes", "pytree", "tensorclass", "two_dims"])
def test_other_items_are_refused_and_nothing_changes(name: str) -> None:
    refused(loaded("plain"), name, "does not fit|ndim|leading dims|are no rows|are not those")
