"""Folders that torchrl wrote are loaded as they are: every row, counter and parameter."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import is_tensorclass

import interop as rl
from fbuf.checkpoint import CheckpointMismatch
from interop.checkpoint.torchrl_dirs import is_torchrl_dump
from tests.interop.checkpoint.torchrl_dumps_targets import EXPECTED, FOLDER, TARGETS, Scaling, Step, content, same_bits


def loaded(name: str, **options: Any) -> Any:
    buffer = TARGETS[name]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the checkpoint counts")
        buffer.loads(FOLDER / name, **options)
    return buffer


def check(buffer: Any, expected: dict[str, Any]) -> None:
    assert len(buffer) == expected["length"]
    same_bits(content(buffer), expected["leaves"])
    if expected["_cursor"] is not None:
        assert buffer._writer._cursor == expected["_cursor"]
        assert buffer._writer.write_count == expected["_write_count"]


ONE_BUFFER = [name for name in TARGETS if name != "ensemble"]


@pytest.mark.parametrize("name", ONE_BUFFER)
def test_every_row_and_counter_is_that_of_the_dump(name):
    check(loaded(name), EXPECTED[name])


def test_every_dump_is_one():
    assert {*TARGETS, "non_tensors", "flat", "h5"} == EXPECTED.keys()
    assert all(is_torchrl_dump(FOLDER / name) for name in EXPECTED)


def test_a_folder_of_ours_or_of_nobody_is_none(tmp_path):
    assert not is_torchrl_dump(tmp_path)
    assert not is_torchrl_dump(tmp_path / "missing")
    buffer = loaded("plain")
    buffer.dumps(tmp_path / "ours")
    assert not is_torchrl_dump(tmp_path / "ours")
    (tmp_path / "ours" / "storage").mkdir()
    assert not is_torchrl_dump(tmp_path / "ours")
    with pytest.raises(FileNotFoundError):
        buffer.loads(tmp_path)


@pytest.mark.parametrize("name", [name for name in ONE_BUFFER if "next" in EXPECTED[name] and "compressed" not in name])
def test_the_next_write_goes_to_the_slot_that_torchrl_takes(name):
    buffer, expected = loaded(name), EXPECTED[name]["next"]
    found = torch.as_tensor(buffer.extend(buffer[:1] if name != "one_tensor" else torch.tensor([50])))
    if "highest" in name and EXPECTED[name]["length"] == 8:
        return  # the row there is another one: see the test of ranks
    assert found.tolist() == expected


@pytest.mark.parametrize(
    "name", ["uniform", "two_dims_full", "tensorclass", "pytree", "epoch", "priorities", "compressed"]
)
def test_what_was_loaded_can_be_saved_and_loaded_again(name, tmp_path):
    buffer = loaded(name)
    buffer.dumps(tmp_path / "ours")
    again = TARGETS[name]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the checkpoint counts")
        again.loads(tmp_path / "ours")
    check(again, EXPECTED[name])


def test_a_buffer_that_was_written_to_is_written_over():
    buffer = loaded("uniform_full")
    assert len(buffer) == 8
    buffer.loads(FOLDER / "uniform")
    check(buffer, EXPECTED["uniform"])
    assert buffer.sample().shape == (3,)


def test_the_generator_goes_on_where_it_was():
    buffer = loaded("uniform")
    saved = np.fromfile(FOLDER / "uniform/rng_state/rng_state.memmap", np.uint8)
    assert (buffer._rng.get_state().numpy() == saved).all()


def test_tensorclasses_come_back_as_those_of_the_target():
    assert type(loaded("tensorclass")[:]) is Step
    assert type(loaded("tensorclass_below")[:]["step"]) is Step
    fresh = rl.ReplayBuffer(storage=rl.LazyTensorStorage(8), batch_size=3)
    fresh.loads(FOLDER / "tensorclass")
    assert not is_tensorclass(fresh[:])
    same_bits(fresh[:], EXPECTED["tensorclass"]["leaves"])


# ---------------------------------------------------------------------- samplers


@pytest.mark.parametrize("name", ["priorities", "priorities_double", "priorities_without_alpha"])
def test_priorities_are_those_that_were_given(name):
    buffer, expected = loaded(name), EXPECTED[name]["priorities"]
    sampler = buffer._sampler
    given = torch.tensor(expected["given"], dtype=sampler.dtype)
    if not expected["alpha"]:
        given = torch.ones_like(given)
    torch.testing.assert_close(sampler.priorities, given, rtol=1e-6, atol=0)
    assert (sampler.alpha, sampler.beta, sampler.eps) == (expected["alpha"], expected["beta"], expected["eps"])
    assert sampler.default_priority == 3.0
    weights = (given + expected["eps"]) ** expected["alpha"]
    counts = np.zeros(5)
    for _ in range(40):
        counts += np.bincount(sampler.sample(buffer._storage, 500)[0].numpy(), minlength=5)
    expected_counts = counts.sum() * (weights / weights.sum()).double().numpy()
    assert (((counts - expected_counts) ** 2) / expected_counts).sum() < 25


def test_parameters_of_the_dump_count_with_a_warning():
    sampler = rl.PrioritizedSampler(8, 0.9, 0.9)
    buffer = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(8), sampler=sampler, batch_size=3)
    with pytest.warns(UserWarning, match="alpha"):
        buffer.loads(FOLDER / "priorities")
    assert (sampler.alpha, sampler.beta) == (0.6, 0.4)


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("epoch", rl.SamplerWithoutReplacement),
        ("consuming", lambda: rl.ConsumingSampler(max_sample_count=2)),
        ("plain", lambda: rl.StalenessAwareSampler(max_staleness=20, version_key="traj")),
    ],
)
def test_samplers_with_a_state_of_their_own_are_set_after_loading(name, sampler):
    refused(tensors(sampler=sampler()), name, "set_sampler")
    buffer = loaded(name)
    buffer.set_sampler(sampler())
    assert len(buffer.sample()) == 3


# ---------------------------------------------------------------------- writers, transforms, ensembles


@pytest.mark.parametrize("name", ["highest", "highest_partial"])
def test_ranks_are_kept(name):
    buffer = loaded(name)
    assert sorted(map(list, buffer._writer._heap)) == EXPECTED[name]["heap"]
    assert buffer._writer.rank_key == (("next", "reward") if name == "highest" else "traj")


def test_a_loaded_ranking_goes_on():
    buffer = loaded("highest")
    row = buffer[:1].clone().exclude("index")
    row["next", "reward"][:] = 100.0
    lowest = min(EXPECTED["highest"]["heap"])
    assert buffer.extend(row).tolist() == [lowest[1]]
    row["next", "reward"][:] = -1.0
    assert buffer.extend(row).tolist() == [-1]


def test_generations_are_kept():
    buffer = loaded("generations")
    assert buffer._writer.generations_of(torch.arange(8)).tolist() == EXPECTED["generations"]["generation"]


def test_the_state_of_transforms_is_loaded():
    buffer = loaded("transforms")
    assert (float(buffer._transform[0].loc), float(buffer._transform[0].scale)) == (0.5, 2.0)
    with pytest.raises(CheckpointMismatch, match="scale"):
        TARGETS["uniform"]().loads(FOLDER / "transforms")
    with pytest.raises(CheckpointMismatch, match="scale"):
        rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(8), batch_size=3, transform=Scaling()).loads(
            FOLDER / "uniform"
        )


def test_each_member_of_an_ensemble_is_loaded():
    buffer, expected = loaded("ensemble"), EXPECTED["ensemble"]["members"]
    for place, each in enumerate(expected):
        check(buffer[place], each)
    assert buffer.sample().numel()


# ---------------------------------------------------------------------- what does not fit


def refused(buffer: Any, name: str, match: str) -> None:
    before = buffer.state_dict() if len(buffer) else None
    with pytest.raises(CheckpointMismatch, match=match or None):
        buffer.loads(FOLDER / name)
    if before is None:
        assert len(buffer) == 0
        return
    after = buffer.state_dict()
    assert str(before) == str(after)


def tensors(size: int = 8, **given: Any) -> rl.ReplayBuffer:
    return rl.ReplayBuffer(storage=rl.LazyTensorStorage(size), batch_size=3, **given)


@pytest.mark.parametrize(
    ("name", "build", "match"),
    [
        ("plain", lambda: tensors(9), "capacity"),
        ("two_dims", lambda: tensors(12), "another ndim"),
        ("plain", lambda: rl.ReplayBuffer(storage=rl.LazyTensorStorage(8, ndim=2), batch_size=3), "ndim=2"),
        ("plain", lambda: rl.ReplayBuffer(storage=rl.ListStorage(8), batch_size=3), "ListStorage"),
        ("plain", lambda: rl.ReplayBuffer(storage=rl.CompressedListStorage(8), batch_size=3), ""),
        ("compressed", lambda: rl.ReplayBuffer(storage=rl.CompressedListStorage(1), batch_size=3), "max_size=1"),
        ("plain", lambda: tensors(sampler=rl.PrioritizedSampler(8, 0.6, 0.4)), "PrioritizedSampler"),
        ("plain", lambda: tensors(writer=rl.ImmutableDatasetWriter()), "ImmutableDatasetWriter"),
        ("plain", lambda: rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(8), writer=rl.TensorDictMaxValueWriter()),
         "TensorDictMaxValueWriter"),
        ("highest", lambda: tensors(), "RoundRobinWriter"),
        ("priorities", lambda: tensors(), "RandomSampler"),
        ("priorities_double", lambda: tensors(sampler=rl.PrioritizedSampler(8, 1.1, 1.0, 1e-6)), "float64"),
        ("epoch", lambda: tensors(sampler=rl.PrioritizedSampler(8, 0.6, 0.4)), "PrioritizedSampler"),
        ("flat", lambda: tensors(), "TensorStorageCheckpointer"),
        ("h5", lambda: tensors(), "H5"),
        ("pytree", lambda: tensors(), "write one item"),
        ("non_tensors", lambda: tensors(), "'name'"),
        ("ensemble", lambda: tensors(), "SamplerEnsemble"),
    ],
)  # fmt: skip
def test_a_dump_of_something_else_is_refused(name, build, match):
    refused(build(), name, match)


@pytest.mark.parametrize("name", ["one_tensor", "dtypes", "pytree", "tensorclass", "two_dims"])
def test_other_items_are_refused_and_nothing_changes(name):
    buffer = loaded("plain")
    refused(buffer, name, "")
    check(buffer, EXPECTED["plain"])


def test_keys_of_one_side_need_strict_to_be_off():
    buffer = loaded("plain")
    refused(buffer, "memmap", "nothing")
    buffer.loads(FOLDER / "memmap", strict=False)
    assert len(buffer) == 7
    torch.testing.assert_close(buffer[:]["traj"], torch.arange(7) // 4)


@pytest.mark.parametrize("name", ["uniform", "dtypes", "pytree", "priorities", "compressed_tensordicts"])
def test_settings_of_torch_do_not_matter(name):
    buffer = TARGETS[name]()
    with torch.device("meta"), torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*the checkpoint counts")
        buffer.loads(FOLDER / name)
    check(buffer, EXPECTED[name])
    buffer.sample()
