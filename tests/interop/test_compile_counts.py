"""How often the torch API makes JAX compile: once per rule, batch size and layout, for all values and lengths."""

import copy
import pickle
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from interop.host import compiled
from tests.interop.bits import on_each_device

FUNCTIONS = {name: held for name, held in vars(compiled).items() if hasattr(held, "_cache_size")}
LONGEST = 33  # of a batch whose length varies
POWERS = 2  # of lengths: 64, 128


@pytest.fixture(autouse=True)
def _from_nothing() -> Iterator[None]:
    for function in FUNCTIONS.values():
        function.clear_cache()
    yield


def traces() -> dict[str, int]:
    """The number of programs of each function that has any."""
    counts = {name: function._cache_size() for name, function in FUNCTIONS.items()}
    return {name: count for name, count in counts.items() if count}


def priority_traces() -> int:
    """Programs that give priorities to items."""
    return sum(
        count
        for name, count in traces().items()
        if name not in ("init", "tree_of", "draw", "draw_words", "read", "reweight")
    )


def lengths(count: int) -> list[int]:
    """From 1 to the longest, in no order."""
    return np.random.default_rng(0).permutation(np.linspace(1, LONGEST, count).astype(int)).tolist()


@on_each_device
def test_uniform_draws_compile_once_and_on_the_host_nothing(device):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000, device=device), batch_size=32)
    for count in lengths(60):
        rb.extend(TensorDict({"a": torch.zeros(count, 3, device=device), "b": torch.zeros(count)}, [count]).to(device))
        rb.add(TensorDict({"a": torch.zeros(3), "b": torch.zeros(())}, []).to(device))
        rb.sample()
    counts = traces()
    if device == "cpu":
        assert not counts
        return
    assert counts.pop("draw") == 1
    assert counts.pop("allocate", 1) == 1
    assert counts.pop("write", 0) <= 7
    assert not counts


def test_a_batch_size_compiles_once_more():
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=PrioritizedSampler(1000, 0.5, 0.5))
    for fill in range(1, 6):
        rb.extend(torch.zeros(100, 3))
        for batch_size in (1, 7, 32):
            for _ in range(fill):
                rb.sample(batch_size)
    counts = traces()
    assert (counts["draw_words"], counts["assign_and_draw"]) == (3, 1)


def test_batch_sizes_up_to_a_power_of_two_share_programs_and_draw_the_same():
    def drawn(size):
        sampler = PrioritizedSampler(100, 0.7, 0.5)
        rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, generator=torch.Generator().manual_seed(0))
        rb.extend(torch.arange(100))
        return torch.cat([rb.sample(size) for _ in range(2)]).reshape(2, size)

    most = drawn(64)
    for size in (33, 40, 63):
        assert torch.equal(drawn(size), most[:, :size])
    assert traces() == {"tree_of": 1, "draw_words": 1}


def test_equal_buffers_and_their_copies_share_programs():
    rule = {"alpha": 0.5, "beta": 0.5, "batch_size": 8}
    buffers = [PrioritizedReplayBuffer(storage=LazyTensorStorage(50), **rule) for _ in range(5)]
    for rb in buffers:
        rb.extend(torch.zeros(20))
        rb.update_priority([1, 2], [0.5, 0.7])
        rb.sample()
    first = traces()
    assert first == {"tree_of": 1, "draw_words": 1}
    for rb in (pickle.loads(pickle.dumps(buffers[0])), copy.deepcopy(buffers[1])):
        rb.extend(torch.zeros(20))
        rb.update_priority([1, 2], [0.5, 0.7])
        rb.sample()
    assert traces() == first


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_the_setting_of_64_bit_types_changes_no_draw_and_costs_one_program_at_most(dtype):
    rb = PrioritizedReplayBuffer(alpha=0.5, beta=0.5, dtype=dtype, storage=LazyTensorStorage(20), batch_size=8)
    drawn = []
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            rb.extend(torch.zeros(20))
            rb.update_priority([1, 2], [0.5, 0.7])
            torch.manual_seed(0)
            drawn.append(rb.sample(return_info=True)[1])
    for key in ("index", "priority_weight"):
        assert drawn[0][key].dtype == drawn[1][key].dtype
        assert torch.equal(drawn[0][key], drawn[1][key]) and torch.equal(drawn[0][key], drawn[2][key])
    counts = traces()
    assert counts.pop("assign_and_draw") == (2 if dtype == torch.float32 else 1)  # under either setting
    assert counts == {"tree_of": 1, "draw_words": 1}


def test_updates_compile_once_per_power_of_two():
    sampler = PrioritizedSampler(1000, 0.5, 0.5, max_priority_within_buffer=True)
    rb = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=8)
    rb.extend(torch.zeros(1000))
    rb.sample()
    before = priority_traces()
    for count in (*range(1, LONGEST + 1), *range(LONGEST, 0, -1)):
        rb.update_priority(torch.arange(count), torch.rand(count))
        if count % 10 == 0:
            rb.sample()
    between = priority_traces() - before
    assert 1 <= between <= POWERS + 3  # ten updates that wait for one draw reach up to 512 together
    for count in range(1, LONGEST + 1):
        rb.update_priority(torch.arange(count), torch.rand(count))
        rb.sample()
    assert priority_traces() - before <= POWERS + 3
    rb.update_priority(5, 0.5)
    rb.update_priority(torch.arange(7), 0.5)
    rb.sample()
    assert priority_traces() - before <= POWERS + 3


@pytest.mark.parametrize("lanes", [(), (3,)])
def test_extends_with_priorities_compile_once_per_power_of_two(lanes):
    storage = LazyTensorStorage(999, ndim=1 + len(lanes))
    rb = TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.5, storage=storage, batch_size=8)
    for count in lengths(30):
        shape = [*lanes, count]
        rb.extend(TensorDict({"a": torch.zeros(shape), "td_error": torch.rand(shape)}, shape))
        sample = rb.sample()
        sample["td_error"] = torch.rand(8)
        rb.update_tensordict_priority(sample)
    counts = traces()
    assert counts.pop("tree_of") == 1
    assert counts and max(counts.values()) <= POWERS + len(lanes)
