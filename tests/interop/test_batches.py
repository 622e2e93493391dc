"""Batches that are read by runs and built in one step: the same as when rows are read one by one and entries set."""

import itertools

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from interop.host.rows import TorchRows
from interop.shared.storage_lock import locked
from tests.interop.rows import check_same

LEAVES = {
    "float": lambda n: torch.randn(n, 3),
    "half": lambda n: torch.randn(n, 2).to(torch.bfloat16),
    "words": lambda n: torch.randint(0, 2**16, (n,)).to(torch.uint16),
    "flags": lambda n: torch.rand(n, 1) > 0.5,
    "complex": lambda n: torch.randn(n, 2, 2, dtype=torch.complex64),
    "nothing": lambda n: torch.zeros(n, 0),
    "long": lambda n: torch.arange(n),
}


@pytest.mark.parametrize("begins", [[0], [3, 3, 0], [20, 12, 7, 20]])
def test_runs_are_their_rows(begins):
    rows = TorchRows([make(24) for make in LEAVES.values()], ())
    slots = (torch.tensor(begins)[:, None] + torch.arange(4)).reshape(-1)
    assert rows.runs is not None
    known = {4: torch.ones(2)}
    found = rows.runs.read(np.array(begins), 4, slots, known)
    for place, (one, other) in enumerate(zip(found, rows.read(slots), strict=True)):
        check_same(one, known.get(place, other))
    found[0].zero_()  # is a copy
    check_same(rows.runs.read(np.array(begins), 4, slots, known)[0], rows.read(slots)[0])


def test_rows_that_are_not_contiguous_are_read_one_by_one():
    memory = torch.arange(80.0).reshape(20, 4)
    rows = TorchRows([memory[:, 1:3]], ())
    assert torch.equal(rows.runs.read(np.array([0]), 4, torch.arange(4), {})[0], memory[:4, 1:3])
    found = rows.runs.one(0, np.array([0]), 4, np.arange(4))
    assert found.tolist() == memory[:4, 1:3].tolist()


def test_a_run_beyond_the_rows_is_refused():
    runs = TorchRows([torch.arange(8.0)], ()).runs
    with pytest.raises(IndexError):
        runs.one(0, np.array([6]), 3, np.arange(6, 9))


# ------------------------------------------------------------------ whole batches


def steps(count=40):
    at = torch.arange(count)
    after = {"done": (at % 10 == 9)[:, None], "terminated": (at % 20 == 9)[:, None], "x": at + 1}
    data = TensorDict({"x": at, "is_init": (at % 10 == 0)[:, None], "next": TensorDict(after, [count])}, [count])
    return data.set("b", torch.randn(count, 2).to(torch.bfloat16))


def wanted(buffer, batch_size, seed):
    """The batch as it comes by parts: named, told, read, set."""
    torch.manual_seed(seed)
    with locked(buffer):
        index, info = buffer.sampler.sample(buffer.storage, batch_size)
        data = buffer.storage.get(index)
    if isinstance(buffer, TensorDictReplayBuffer):
        for key, value in {**info, "index": torch.stack(index, -1)}.items():
            data.set(key, value)
    return data, {**info, "index": index}


PARTS = itertools.product(
    [(), ("is_init",), ("is_init", ("next", "terminated")), ("is_init", ("next", "done"))],
    [ReplayBuffer, TensorDictReplayBuffer],
    [LazyTensorStorage, LazyMemmapStorage],
    [("next", "truncated"), "truncated", None, ("other", "truncated")],
    [{}, {"span": True}, {"pad_output": True, "strict_length": False}],
)


@pytest.mark.parametrize(
    ("without", "kind", "make", "key", "choices"),
    # Of three choices one, another for each of the rest.
    [pytest.param(*each, marks=pytest.mark.slow if (n + n // 3) % 3 else ()) for n, each in enumerate(PARTS)],
)
def test_batches_are_what_their_parts_are(without, kind, make, key, choices):
    data = steps().exclude(*without)
    data["id"] = data["x"] // 10
    sampler = SliceSampler(slice_len=4, traj_key="id", truncated_key=key, **choices)
    buffer = kind(storage=make(32), sampler=sampler, batch_size=64)
    buffer.extend(data)  # some slices go around the ring
    for seed in range(4):
        expected, told = wanted(buffer, 64, seed)
        torch.manual_seed(seed)
        batch, info = buffer.sample(return_info=True)
        check_same(batch, expected)
        assert list(info) == list(told)
        check_same({**info, "index": info["index"][0]}, {**told, "index": told["index"][0]})
        torch.manual_seed(seed)
        check_same(buffer.sample(), expected)


def test_batches_of_several_lanes():
    data = steps().reshape(2, 20)
    sampler = SliceSampler(slice_len=4, end_key=("next", "done"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40, ndim=2), sampler=sampler, batch_size=32)
    buffer.extend(data)
    expected, _ = wanted(buffer, 32, 0)
    torch.manual_seed(0)
    check_same(buffer.sample(), expected)


def test_what_a_collate_function_takes_out_is_told_anew():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(40),
        sampler=SliceSampler(slice_len=4),
        collate_fn=lambda data: data.exclude("index", ("next", "truncated"), inplace=True),
        batch_size=8,
    )
    buffer.extend(steps())
    batch = buffer.sample()
    assert batch["index"].shape == (8, 1)
    assert batch["next", "truncated"].sum() == 2


def test_each_batch_has_memory_of_its_own():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=SliceSampler(slice_len=4), batch_size=8)
    buffer.extend(steps())
    for _ in range(2):
        batch = buffer.sample()
        flags = batch["next", "truncated"].clone()
        assert flags.reshape(2, 4).tolist() == [[False, False, False, True]] * 2
        for leaf in batch.values(True, True):
            leaf.zero_()
    assert torch.equal(buffer[:]["x"], steps()["x"])


class Marked(TensorStorage):
    def build(self, leaves, batch_size):
        built = super().build(leaves, batch_size)
        return built.set("mark", torch.ones(built.batch_size))


def test_what_a_storage_builds_in_its_own_way_is_built_so():
    buffer = TensorDictReplayBuffer(storage=Marked(steps()), sampler=SliceSampler(slice_len=4), batch_size=8)
    batch = buffer.sample()
    assert batch["mark"].sum() == 8
    assert batch["next", "truncated"].sum() == 2
