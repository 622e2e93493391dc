"""Rewards summed up over each trajectory, against plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from interop.transforms import RewardSum

AFTER = ("next", "reward")


def summed(rewards, ends):
    """Sums of one row."""
    out, total = [], 0
    for reward, end in zip(rewards, ends, strict=True):
        total = total + reward
        out.append(total)
        total = 0 if end else total
    return out


def rollout(rewards, ends):
    after = TensorDict({"reward": rewards, "done": ends}, rewards.shape[:2])
    return TensorDict({"next": after, "done": torch.zeros_like(ends)}, rewards.shape[:2], names=[None, "time"])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9), st.floats(0, 1), st.integers(0, 99), st.sampled_from([torch.float64, torch.int32, torch.bool])
)
def test_sums_are_of_one_trajectory_each(length, share, seed, dtype):
    rng = np.random.default_rng(seed)
    rewards = torch.from_numpy(rng.integers(-5, 6, (3, length, 1))).to(dtype)
    ends = torch.from_numpy(rng.random((3, length, 1)) < share)
    out = RewardSum([AFTER])(rollout(rewards, ends))["next", "episode_reward"]
    expected = [summed(*rows) for rows in zip(rewards[..., 0].double().tolist(), ends[..., 0].tolist(), strict=True)]
    assert out.shape == rewards.shape
    assert out.dtype == (dtype if dtype.is_floating_point else torch.int64)
    assert out[..., 0].double().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_narrow_floats_are_rounded_once(dtype):
    rewards = torch.full((1, 4000, 1), 0.25, dtype=dtype)
    out = RewardSum([AFTER])(rollout(rewards, torch.zeros(1, 4000, 1).bool()))["next", "episode_reward"]
    assert out.dtype == dtype and out[0, -1, 0] == 1000


@pytest.mark.parametrize(
    ("names", "dim", "most"), [(["time", None], None, 4), *((None, d, m) for d, m in ((0, 4), (-2, 4), (1, 2)))]
)
def test_time_is_the_dim_of_that_name_or_as_given(names, dim, most):
    after = {"next": {"reward": torch.ones(4, 2, 1), "done": torch.zeros(4, 2, 1).bool()}}
    assert RewardSum([AFTER], ["sum"], time_dim=dim)(TensorDict(after, [4, 2], names=names))["sum"].max() == most


REWARDS, ENDS = torch.ones(1, 4, 1), torch.tensor([[[0], [1], [0], [0]]]).bool()
NONE, TWO, ONE = torch.zeros_like(ENDS), [1, 2, 1, 2], [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("data", "key", "expected"),
    [
        ({"next": {"reward": REWARDS, "done": ENDS}, "done": NONE}, AFTER, TWO),
        ({"next": {"reward": REWARDS, "done": NONE}, "done": ENDS}, AFTER, ONE),
        ({"next": {"reward": REWARDS, "terminated": NONE, "truncated": ENDS}}, AFTER, TWO),
        ({"next": {"reward": REWARDS, "terminated": ENDS.float()}}, AFTER, TWO),
        ({"reward": REWARDS, "next": {"done": ENDS}, "done": NONE}, "reward", TWO),
        ({"reward": REWARDS, "done": ENDS}, "reward", TWO),
        ({"reward": REWARDS}, "reward", ONE),
        ({"reward": REWARDS[..., 0], "done": ENDS}, "reward", TWO),
        ({"reward": REWARDS, "done": ENDS[..., 0]}, "reward", TWO),
    ],
)
def test_where_the_end_of_a_trajectory_is_looked_for(data, key, expected):
    found = RewardSum([key], ["sum"])(TensorDict(data, [1, 4], names=[None, "time"]))
    assert found["sum"].flatten().tolist() == expected


def test_flags_are_for_all_agents():
    after = {"agents": {"reward": torch.ones(1, 4, 3, 1)}, "done": ENDS}
    found = RewardSum([("next", "agents", "reward")])(TensorDict({"next": after}, [1, 4], names=[None, "time"]))
    assert found["next", "agents", "episode_reward"][0, :, 2, 0].tolist() == TWO


def test_a_huge_reward_is_not_felt_in_the_next_trajectory():
    rewards = torch.tensor([1e30, float("inf"), float("nan"), 1.0, 2.0, 0.25]).reshape(1, 6, 1)
    ends = torch.tensor([1, 1, 1, 0, 0, 1]).bool().reshape(1, 6, 1)
    out = RewardSum([AFTER])(rollout(rewards, ends))["next", "episode_reward"].flatten()
    assert out[3:].tolist() == [1.0, 3.0, 3.25]
    assert torch.equal(out[:2], rewards[0, :2, 0]) and out[2].isnan()


@pytest.mark.parametrize(
    ("data", "options", "error", "text"),
    [
        ({"next": {"reward": REWARDS}, "done": ENDS}, {}, KeyError, "of before the step"),
        ({"next": {"reward": REWARDS, "done": torch.zeros(1, 4, 3).bool()}}, {}, ValueError, "is of shape"),
        ({"next": {"reward": REWARDS}}, {"time_dim": 2}, ValueError, "time_dim 2 is out of range"),
        ({"next": {"reward": REWARDS}}, {}, ValueError, r"no dim .* is named 'time'"),
    ],
)
def test_refusals(data, options, error, text):
    names = None if "is named" in text else [None, "time"]
    with pytest.raises(error, match=text):
        RewardSum([AFTER], **options)(TensorDict(data, [1, 4], names=names))
