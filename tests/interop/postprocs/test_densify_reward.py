"""What is still to be earned, in place of sparse rewards."""

import pytest
import torch
from tensordict import TensorDict

from interop.postprocs import DensifyReward


def line(rewards, ends=(), dtype=torch.float32, batch=None):
    done = torch.zeros(len(rewards), 1, dtype=torch.bool)
    done[list(ends)] = True
    batch = [len(rewards)] if batch is None else batch
    return TensorDict({"next": {"reward": torch.tensor(rewards, dtype=dtype)[:, None], "done": done}}, batch)


SPARSE = [0, 0, 0, 3, 0, 0, 0, 7, 0, 0]


@pytest.mark.parametrize("batch", [[], [10]])
def test_ten_steps_by_hand(batch):
    data = line(SPARSE, ends=[3, 7], batch=batch)
    assert DensifyReward()(data) is data
    assert data["next", "reward"][:, 0].tolist() == [3, 3, 3, 3, 7, 7, 7, 7, 0, 0]
    half = DensifyReward(discount=0.5, reward_key_out=("deep", "return"))(line(SPARSE, ends=[3, 7]))
    assert half["next", "deep", "return"][:4, 0].tolist() == [0.375, 0.75, 1.5, 3]
    assert half["next", "reward"][:, 0].tolist() == SPARSE


def test_lanes_and_agents_are_apart():
    draw = torch.Generator().manual_seed(0)
    rewards, done = torch.randn(3, 8, 2, 1, generator=draw), torch.rand(3, 8, 2, 1, generator=draw) < 0.2
    data = TensorDict({"next": {"reward": rewards, "done": done}}, [3, 8], names=[None, "time"])
    found = DensifyReward(discount=0.9)(data)["next", "reward"]
    by_dim = DensifyReward(discount=0.9, time_dim=1)(TensorDict({"next": {"reward": rewards, "done": done}}, [3]))
    assert torch.equal(found, by_dim["next", "reward"])
    for lane in range(3):
        for agent in range(2):
            one = TensorDict({"next": {"reward": rewards[lane, :, agent], "done": done[lane, :, agent]}}, [8])
            torch.testing.assert_close(found[lane, :, agent], DensifyReward(discount=0.9)(one)["next", "reward"])
            total = torch.zeros(1)
            for t in reversed(range(8)):
                total = rewards[lane, t, agent] + 0.9 * total * ~done[lane, t, agent]
                torch.testing.assert_close(found[lane, t, agent], total)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.int64, torch.float32)]
)
def test_rewards_of_every_kind(dtype, kept):
    found = DensifyReward(discount=0.5)(line([1, 1, 1, 4], dtype=dtype))["next", "reward"]
    assert found.dtype == kept
    assert found[:, 0].tolist() == [2.25, 2.5, 3, 4]


def test_gradients_flow():
    data = line([1.0, 1, 1, 1], ends=[2])
    rewards = data["next", "reward"].requires_grad_()
    DensifyReward(discount=0.5)(data)["next", "reward"][0].backward()
    assert rewards.grad[:, 0].tolist() == [1, 0.5, 0.25, 0]


def test_what_does_not_fit_is_refused():
    for missing in ("reward", "done"):
        with pytest.raises(KeyError, match=missing):
            DensifyReward()(line(SPARSE).exclude(("next", missing)))
    data = line(SPARSE)
    data["next", "done"] = data["next", "done"][:, 0]
    with pytest.raises(RuntimeError, match="must have the same shape"):
        DensifyReward()(data)
    for dim in (1, -1, 2, -3):
        with pytest.raises(ValueError, match="is not time"):
            DensifyReward(time_dim=dim)(line(SPARSE))
    with pytest.raises(ValueError, match="from 0 to 1"):
        DensifyReward(discount=1.5)


def test_keys_are_told():
    made = DensifyReward(reward_key="a", done_key="b", reward_key_out="c")
    assert (made.in_keys, made.out_keys) == (["a", "b"], ["c"])
    assert DensifyReward().out_keys == ["reward"]
