"""Rewards between bounds, as signs and summed up, against plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from interop.transforms import BinarizeReward, ClipTransform, RewardClipping, RewardSum, SignTransform


def td(values, key="reward"):
    values = torch.as_tensor(values)
    return TensorDict({key: values}, values.shape[:1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64])
@pytest.mark.parametrize("bounds", [(-1, 1), (-1, None), (None, 1000), (0, 300), (-1000, 100)])
def test_integer_bounds_do_not_wrap_around(dtype, bounds):
    held = torch.iinfo(dtype)
    values = torch.tensor([max(held.min, -(2**40)), 0, 1, 100, min(held.max, 2**40)]).to(dtype)
    out = RewardClipping(*bounds)(td(values))["reward"]
    low, high = (default if bound is None else bound for bound, default in zip(bounds, (-(2**50), 2**50), strict=True))
    assert out.dtype == dtype and out.tolist() == [min(max(value, low), high) for value in values.tolist()]


def test_bounds_that_leave_no_number_of_the_dtype():
    data = td(torch.ones(3, dtype=torch.uint8))
    for bounds, kind in (((None, -5), "upper"), ((256, None), "lower")):
        with pytest.raises(ValueError, match=f"'reward': the {kind} bound"):
            RewardClipping(*bounds)(data)
    with pytest.raises(ValueError, match="clamp_min must be a number"):
        RewardClipping(torch.tensor([0.0, float("nan")]), 1.0)
    with pytest.raises(TypeError, match="clamp_max must be a number"):
        RewardClipping(0.0, torch.tensor(1j))
    with pytest.raises(TypeError, match="RewardClipping: 'reward'"):
        RewardClipping(0.0, 1.0)(td(torch.ones(3) * 1j))


@pytest.mark.parametrize(
    ("low", "high", "given_", "expected"),
    [
        (-1, 1, [-3.0, 0.5, 2.0], [-1.0, 0.5, 1.0]),
        (-1, 1, [-3, 0, 2], [-1, 0, 1]),
        (-0.5, 0.5, [-3, 0, 2], [-0.5, 0.0, 0.5]),
        (None, 1.0, [-3.0, 2.0], [-3.0, 1.0]),
        (0, None, [-3.0, 2.0], [0.0, 2.0]),
        (torch.tensor([0.0, 1.0]), None, [[-1.0, -1.0]], [[0.0, 1.0]]),
    ],
)
def test_rewards_are_clipped(low, high, given_, expected):
    out = RewardClipping(low, high)(td(given_))["reward"]
    torch.testing.assert_close(out, torch.tensor(expected))


def test_what_clipping_refuses_and_shows():
    assert repr(RewardClipping(-1, 1)) == "RewardClipping(clamp_min=-1.0000, clamp_max=1.0000, keys=['reward'])"
    assert set(RewardClipping(-1, 1).state_dict()) == {"clamp_min", "clamp_max"}
    for arguments, error in (
        ((), ValueError),
        ((1, -1), ValueError),
        ((float("nan"), 1), ValueError),
        (("a", 1), TypeError),
        ((True, 1), TypeError),
    ):
        with pytest.raises(error):
            RewardClipping(*arguments)
    with pytest.raises(ValueError, match="'reward': bounds of shape"):
        RewardClipping(torch.zeros(2))(td([[1.0], [2.0]]))


def test_entries_are_clipped_in_both_directions():
    transform = ClipTransform(["a"], ["b"], ["stored"], ["a"], low=-1, high=0.5)
    data = td([-3.0, 0.0, 2.0], "a")
    assert transform(data.copy())["b"].tolist() == [-1.0, 0.0, 0.5]
    stored = transform.inv(data)
    assert stored["stored"].tolist() == [-1.0, 0.0, 0.5] and set(data.keys()) == {"a"}
    assert ClipTransform(["a"], low=1)(td([0, 2], "a"))["a"].dtype == torch.float32
    assert ClipTransform(["a"], high=1.0)(td([0.0, 2.0], "a"))["a"].tolist() == [0.0, 1.0]
    for arguments, error in (
        ({}, TypeError),
        ({"low": 1.0, "high": 1.0}, ValueError),
        ({"low": float("nan")}, ValueError),
        ({"low": torch.ones(2)}, TypeError),
        ({"low": "1"}, TypeError),
    ):
        with pytest.raises(error):
            ClipTransform(["a"], **arguments)


def test_signs_and_ones_and_zeros():
    out = BinarizeReward()(td([[-1.0], [0.0], [0.1]]))["reward"]
    assert out.dtype == torch.int8 and out.tolist() == [[0], [0], [1]]
    for wrong in ([1.0, 2.0], [[1.0, 2.0]]):
        with pytest.raises(ValueError, match=r"BinarizeReward: 'reward': rewards must be \[\.\.\., 1\]"):
            BinarizeReward()(td(wrong))
    transform = SignTransform(["reward"], in_keys_inv=["reward"])
    for values in ([-3, 0, 2], [-0.5, 0.0, 2.5]):
        expected = torch.tensor(values).sign()
        torch.testing.assert_close(transform(td(values))["reward"], expected)
        torch.testing.assert_close(transform.inv(td(values))["reward"], expected)
    with pytest.raises(TypeError, match="'reward' must be a tensor"):
        transform(TensorDict({"reward": "text"}))


def summed(rewards, ends):
    """Sums of one row."""
    out, total = [], 0
    for reward, end in zip(rewards, ends, strict=True):
        total = total + reward
        out.append(total)
        if end:
            total = 0
    return out


def rollout(rewards, ends, **others):
    batch = rewards.shape[:2]
    after = TensorDict({"reward": rewards, "done": ends, **others}, batch)
    return TensorDict({"next": after, "done": torch.zeros_like(ends)}, batch, names=[None, "time"])


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9), st.floats(0, 1), st.integers(0, 99), st.sampled_from([torch.float64, torch.int32, torch.bool])
)
def test_sums_are_of_one_trajectory_each(length, share, seed, dtype):
    rng = np.random.default_rng(seed)
    rewards = torch.from_numpy(rng.integers(-5, 6, (3, length, 1))).to(dtype)
    ends = torch.from_numpy(rng.random((3, length, 1)) < share)
    out = RewardSum([("next", "reward")])(rollout(rewards, ends))["next", "episode_reward"]
    expected = [summed(*rows) for rows in zip(rewards[..., 0].double().tolist(), ends[..., 0].tolist(), strict=True)]
    assert out.shape == rewards.shape
    assert out.dtype == (dtype if dtype.is_floating_point else torch.int64)
    assert out[..., 0].double().tolist() == expected


def test_time_is_the_dim_of_that_name_or_as_given():
    rewards, ends = torch.ones(4, 2, 1), torch.zeros(4, 2, 1, dtype=torch.bool)
    after = {"next": {"reward": rewards, "done": ends}}
    by_name = TensorDict(after, [4, 2], names=["time", None])
    assert RewardSum([("next", "reward")])(by_name)["next", "episode_reward"][:, 0, 0].tolist() == [1, 2, 3, 4]
    unnamed = TensorDict(after, [4, 2])
    for dim, expected in ((0, 4), (-2, 4), (1, 2), (-1, 2)):
        out = RewardSum([("next", "reward")], ["sum"], time_dim=dim)(unnamed.copy())
        assert out["sum"].max() == expected
    with pytest.raises(ValueError, match=r"no dim .* is named 'time'"):
        RewardSum([("next", "reward")])(unnamed)
    with pytest.raises(ValueError, match="time_dim 2 is out of range"):
        RewardSum([("next", "reward")], time_dim=2)(unnamed)


def test_where_the_end_of_a_trajectory_is_looked_for():
    rewards, ends = torch.ones(1, 4, 1), torch.tensor([[[0], [1], [0], [0]]]).bool()
    none = torch.zeros_like(ends)

    def sums(data, key, **options):
        batch = TensorDict(data, [1, 4], names=[None, "time"])
        return RewardSum([key], ["sum"], **options)(batch)["sum"].flatten()[:4].tolist()

    reset, not_reset = [1, 2, 1, 2], [1, 2, 3, 4]
    after = ("next", "reward")
    assert sums({"next": {"reward": rewards, "done": ends}, "done": none}, after) == reset
    assert sums({"next": {"reward": rewards, "done": none}, "done": ends}, after) == not_reset
    assert sums({"next": {"reward": rewards, "terminated": none, "truncated": ends}}, after) == reset
    assert sums({"next": {"reward": rewards, "terminated": ends}}, after) == reset
    assert sums({"reward": rewards, "next": {"done": ends}, "done": none}, "reward") == reset
    assert sums({"reward": rewards, "done": ends}, "reward") == reset
    assert sums({"reward": rewards}, "reward") == not_reset
    assert sums({"reward": rewards[..., 0], "done": ends}, "reward") == reset
    assert sums({"reward": rewards, "done": ends[..., 0]}, "reward") == reset
    assert sums({"reward": rewards, "done": none, "end": ends}, "reward", done_keys=["end"]) == reset
    agents = {"agents": {"reward": torch.ones(1, 4, 3, 1)}}
    out = RewardSum([("next", "agents", "reward")])(
        TensorDict({"next": {**agents, "done": ends}}, [1, 4], names=[None, "time"])
    )
    assert out["next", "agents", "episode_reward"][0, :, 2, 0].tolist() == reset
    with pytest.raises(KeyError, match="done_keys"):
        sums({"next": {"reward": rewards}, "done": ends}, after)
    with pytest.raises(KeyError, match="'end'"):
        sums({"reward": rewards}, "reward", done_keys=["end"])
    with pytest.raises(ValueError, match="'reward' is of shape"):
        sums({"reward": rewards, "done": torch.zeros(1, 4, 3).bool()}, "reward")
    with pytest.raises(ValueError, match="done_keys must be one for each"):
        RewardSum(["a", "b"], done_keys=["done"])


def test_what_is_huge_in_one_trajectory_is_not_felt_in_the_next():
    rewards = torch.tensor([1e30, float("inf"), float("nan"), 1.0, 2.0, 0.25]).reshape(1, 6, 1)
    ends = torch.tensor([1, 1, 1, 0, 0, 1]).bool().reshape(1, 6, 1)
    out = RewardSum([("next", "reward")])(rollout(rewards, ends))["next", "episode_reward"].flatten()
    assert out[3:].tolist() == [1.0, 3.0, 3.25]
    assert torch.equal(out[:2], rewards[0, :2, 0]) and out[2].isnan()


def test_flags_of_ends_may_be_numbers():
    flags = {"terminated": torch.tensor([[0.0], [1.0], [0.0]]), "truncated": torch.tensor([[2], [0], [0]]).byte()}
    data = TensorDict({"next": {"reward": torch.ones(3, 1), **flags}}, [3])
    assert RewardSum([("next", "reward")], time_dim=0)(data)["next", "episode_reward"].flatten().tolist() == [1, 1, 1]
