"""Rewards and clipped entries beside an installed torchrl."""

import pytest
import torch
from tensordict import TensorDict

theirs = pytest.importorskip("torchrl.envs.transforms", reason="torchrl is not installed")

from interop import transforms as ours  # noqa: E402

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int8]
CASES = [
    ("RewardClipping", {"clamp_min": -1, "clamp_max": 2}),
    ("RewardClipping", {"clamp_min": -0.5, "clamp_max": 0.5}),
    ("BinarizeReward", {}),
    ("SignTransform", {"in_keys": ["reward"], "in_keys_inv": ["reward"]}),
    ("ClipTransform", {"in_keys": ["reward"], "low": -1, "high": 2, "in_keys_inv": ["reward"]}),
    ("ClipTransform", {"in_keys": ["reward"], "out_keys": ["b"], "low": 0.5}),
    ("ClipTransform", {"in_keys": ["reward"], "high": 0.5}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_values_in_both_directions(name, options, dtype):
    data = TensorDict({"reward": (torch.randn(4, 5, 1) * 3).to(dtype)}, [4, 5])
    pair = [getattr(each, name)(**options) for each in (ours, theirs)]
    for run in (lambda t: t(data.clone()), lambda t: t.inv(data.clone())):
        found, expected = (run(each) for each in pair)
        assert set(found.keys()) == set(expected.keys())
        for key in set(found.keys()):
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)
    assert repr(pair[0]) == repr(pair[1])
    assert set(pair[0].state_dict()) <= set(pair[1].state_dict())


def test_sums_step_by_step_as_in_an_environment():
    ends = torch.rand(3, 12, 1) < 0.3
    rewards = torch.randn(3, 12, 1)
    data = TensorDict({"next": {"reward": rewards, "done": ends}}, [3, 12], names=[None, "time"])
    found = ours.RewardSum([("next", "reward")])(data)["next", "episode_reward"]
    env_side, total = theirs.RewardSum(reset_keys=["_reset"]), torch.zeros(3, 1)
    for t in range(12):
        step = TensorDict({"reward": rewards[:, t], "done": ends[:, t]}, [3])
        step = env_side._step(TensorDict({"episode_reward": total}, [3]), step)
        torch.testing.assert_close(found[:, t], step["episode_reward"])
        total = torch.where(ends[:, t], 0.0, step["episode_reward"])


def test_sums_over_one_dim_named_time():
    # With more dims theirs sums over the one before, and it never looks for an end.
    data = TensorDict({"reward": torch.randn(9)}, [9], names=["time"])
    found, expected = ours.RewardSum()(data.clone()), theirs.RewardSum()(data.clone())
    torch.testing.assert_close(found["episode_reward"], expected["episode_reward"])
    for keys in (None, ["a", ("b", "c")]):
        assert ours.RewardSum(keys).out_keys == theirs.RewardSum(keys).out_keys
    for each in (ours, theirs):
        with pytest.raises(ValueError, match="'time'"):
            each.RewardSum()(TensorDict({"reward": torch.randn(9)}, [9]))
