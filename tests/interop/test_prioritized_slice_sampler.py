"""Slices whose first items come by their priority."""

from collections import Counter

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    TensorDictReplayBuffer,
)
from tests.interop.slice_model import SliceModel, drawn, starts

PRIORITIES = torch.tensor([3.0, 1, 0.5, 2, 4, 9, 1, 1, 5, 2, 2, 7, 1, 3, 2, 6])


def filled(lengths=(5, 2, 1, 7, 3), lanes=()):
    """A model of 16 rows that is full, with episodes of some lengths, and all its rows as data."""
    model = SliceModel(16 // max(1, int(np.prod(lanes))), lanes)
    ends = np.zeros((sum(lengths), model.lanes), bool)
    ends[np.cumsum(lengths)[:-1] - 1] = True
    return model, model.write(ends, ends.cumsum(0) - ends + 50 * np.arange(model.lanes))


def buffer_of(model, data, kind=TensorDictReplayBuffer, storage=LazyTensorStorage, **choices):
    sampler = PrioritizedSliceSampler(16, **{"alpha": 1.0, "beta": 1.0, "eps": 0.0, **choices})
    buffer = kind(storage=storage(16, ndim=1 + len(model.shape)), sampler=sampler)
    buffer.extend(data)
    return buffer


def by_priority(model, length, strict=True, need=None):
    """The slices that may be drawn, and the priority of each."""
    slot = {number: slot for slot, number in enumerate(model.numbers())}
    found = starts(model.trajectories(), length, strict, need)
    return {each: PRIORITIES[slot[first]].item() for first, each in found.items()}


CHOICES = {
    "strict": ({}, 4),
    "not strict": ({"strict_length": False}, 4),
    "all but the last": ({"span": (False, True)}, 2),
    "two behind": ({"span": (0, 2)}, 2),
    "one behind, not strict": ({"span": (False, 1), "strict_length": False}, 3),
    "of ids": ({"traj_key": "id"}, 4),
}


@pytest.mark.parametrize(("choices", "need"), CHOICES.values(), ids=CHOICES)
def test_starts_come_in_proportion_to_their_priority(choices, need):
    torch.manual_seed(0)
    model, data = filled()
    buffer = buffer_of(model, data, slice_len=4, **choices)
    buffer.update_priority(torch.arange(16), PRIORITIES)
    wanted = by_priority(model, 4, choices.get("strict_length", True), need)
    seen = [each for _ in range(100) for each in drawn(buffer, 4 * 16)]
    assert set(seen) == set(wanted)
    counts = np.array([Counter(seen)[each] for each in wanted])
    expected = np.array(list(wanted.values())) * len(seen) / sum(wanted.values())
    assert (abs(counts - expected) < 5 * np.sqrt(expected) + 1).all()


def three_episodes(alpha, beta):
    ids = torch.arange(9) // 3
    data = TensorDict({"x": torch.arange(9), "episode": ids, "step": torch.arange(9) % 3}, [9])
    sampler = PrioritizedSliceSampler(9, alpha, beta, num_slices=3)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=6)
    buffer.extend(data)
    return buffer


def test_priorities_of_three_episodes():
    buffer = three_episodes(0.7, 0.9)
    assert {first for _ in range(20) for first, _ in drawn(buffer)} == {0, 1, 3, 4, 6, 7}
    buffer.update_priority(torch.arange(9), torch.tensor([0.0, 3, 3, 0, 0, 0, 1, 1, 1]))
    batches = [buffer.sample() for _ in range(20)]
    assert {start for batch in batches for start in batch["x"][::2].tolist()} == {1, 6, 7}
    for batch in batches:
        weights = batch["priority_weight"]
        assert weights.shape == (6,)
        assert torch.equal(weights[::2], weights[1::2])
        torch.testing.assert_close(
            weights[batch["x"] == 6], torch.full(((batch["x"] == 6).sum(),), 9.12e-6), rtol=1e-3, atol=0
        )
        assert torch.equal(batch["next", "truncated"].reshape(3, 2), torch.tensor([[False, True]] * 3))


def test_short_slices_have_the_weight_of_their_start_too():
    model, data = filled((1, 4, 2, 9))
    buffer = buffer_of(model, data, slice_len=3, strict_length=False, span=(False, 1))
    buffer.update_priority(torch.arange(16), PRIORITIES)
    lengths = set()
    for _ in range(20):
        batch, info = buffer.sample(24, return_info=True)
        ends = info["next", "truncated"].reshape(-1).nonzero().reshape(-1) + 1
        sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
        lengths |= set(sizes.tolist())
        weights = info["priority_weight"].split(sizes.tolist())
        for items, weight in zip(batch["x"].split(sizes.tolist()), weights, strict=True):
            torch.testing.assert_close(weight, (PRIORITIES.min() / PRIORITIES[items[0]]).expand(len(items)))
    assert lengths == {1, 2, 3}


def test_priorities_of_the_items_of_a_sample():
    buffer = three_episodes(1.0, 1.0)
    for _ in range(40):
        batch = buffer.sample()
        buffer.update_tensordict_priority(batch.set("td_error", batch["x"] + 1.0))
    torch.testing.assert_close(buffer.sampler.priorities, torch.arange(9) + 1.0)
    batch, info = buffer.sample(return_info=True)
    buffer.update_priority(info["index"], torch.full((6,), 0.25))
    assert (buffer.sampler.priorities[batch["x"]] == 0.25).all()
