"""The rest of the rewards of a trajectory, of a rollout or when it is stored, against a loop."""

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer
from interop.postprocs import DensifyReward
from interop.transforms import Reward2GoTransform


def rollout(*shape, ends=(2, 4), agents=(), dtype=torch.float32, seed=None):
    done = torch.zeros(*shape, *agents, 1, dtype=torch.bool)
    done[:, list(ends)] = True
    reward = torch.ones(done.shape, dtype=dtype)
    if seed is not None:
        draw = torch.Generator().manual_seed(seed)
        reward, done = torch.randn(done.shape, generator=draw), torch.rand(done.shape, generator=draw) < 0.2
        done[:, -1] = True
    return TensorDict({"next": {"reward": reward, "done": done}}, shape, names=[None, "time"])


def by_loop(data, gamma):
    reward, done = data["next", "reward"], data["next", "done"]
    found, total = [], torch.zeros_like(reward[:, 0])
    for t in reversed(range(reward.shape[1])):
        total = reward[:, t] + gamma * total * ~done[:, t]
        found.append(total)
    return torch.stack(found[::-1], 1)


@pytest.mark.parametrize("agents", [(), (2,)])
def test_both_do_as_the_loop(agents):
    data = rollout(3, 8, agents=agents, seed=0)
    expected = by_loop(data, 0.9)
    torch.testing.assert_close(DensifyReward(discount=0.9)(data.clone())["next", "reward"], expected)
    torch.testing.assert_close(Reward2GoTransform(0.9).inv(data)["next", "reward"], expected)
    by_dim = TensorDict({"next": data["next"].to_dict()}, [3])
    torch.testing.assert_close(DensifyReward(discount=0.9, time_dim=1)(by_dim)["next", "reward"], expected)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.int64, torch.float32)]
)
def test_rewards_of_every_kind(dtype, kept):
    for run in (DensifyReward(discount=0.5), Reward2GoTransform(0.5).inv):
        found = run(rollout(1, 5, dtype=dtype))["next", "reward"]
        assert found.dtype == kept and found.flatten().tolist() == [1.75, 1.5, 1, 1.5, 1]


def test_gradients_flow():
    data = rollout(1, 4, ends=[2])
    rewards = data["next", "reward"].requires_grad_()
    DensifyReward(discount=0.5)(data)["next", "reward"][0, 0].backward()
    assert rewards.grad.flatten().tolist() == [1, 0.5, 0.25, 0]


def test_rewards_are_densified_in_place_or_under_another_key():
    data = rollout(2, 5, ends=[1])
    assert DensifyReward()(data) is data  # steps behind the last end are summed up to the end of the data
    assert data["next", "reward"][0].flatten().tolist() == [2, 1, 3, 2, 1]
    found = DensifyReward(reward_key="r", done_key=("a", "d"), reward_key_out=("deep", "out"))
    given = TensorDict({"next": {"r": torch.ones(1, 3, 1), "a": {"d": torch.zeros(1, 3, 1).bool()}}}, [1, 3])
    assert found(given)["next", "deep", "out"].flatten().tolist() == [3, 2, 1] and found.in_keys == ["r", ("a", "d")]


def test_what_cannot_be_densified_is_refused():
    for key in ("reward", "done"):
        with pytest.raises(KeyError, match=key):
            DensifyReward()(rollout(1, 5).exclude(("next", key)))
    data = rollout(1, 5)
    data["next", "done"] = data["next", "done"][..., 0]
    with pytest.raises(RuntimeError, match="must have the same shape"):
        DensifyReward()(data)
    for dim in (2, -1, 5):
        with pytest.raises(ValueError, match="is not time"):
            DensifyReward(time_dim=dim)(rollout(1, 5))
    for make in (lambda: DensifyReward(discount=1.5), lambda: Reward2GoTransform(1.5)):
        with pytest.raises(ValueError, match="from 0 to 1"):
            make()


def test_a_buffer_stores_the_rest_of_the_rewards():
    data = rollout(1, 5)[0]
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=Reward2GoTransform(gamma=0.5))
    rb.extend(data)
    assert rb[:]["next", "reward"].flatten().tolist() == [1.75, 1.5, 1, 1.5, 1]
    assert data["next", "reward"].eq(1).all()
    transform = rb.transform[0]
    assert transform(data) is data and list(transform.state_dict()) == ["gamma"]
    assert repr(transform) == "Reward2GoTransform(keys=[('next', 'reward')])"


@pytest.mark.parametrize("gamma", [0.5, torch.tensor(0.5), None])
def test_other_keys_are_stored(gamma):
    data = rollout(1, 5)
    data["next", "gain"], data["next", "over"] = data["next", "reward"].long(), data["next", "done"]
    transform = Reward2GoTransform(gamma, in_keys=[("next", "gain")], out_keys=["return"], done_key="over")
    found = transform.inv(data)
    assert found["return"].flatten().tolist() == ([3, 2, 1, 2, 1] if gamma is None else [1.75, 1.5, 1, 1.5, 1])
    assert found["next", "gain"].eq(1).all()


def test_a_line_without_an_end_and_flags_that_do_not_fit_are_refused():
    data = rollout(2, 5, ends=[1])
    data["next", "done"][1] = False
    with pytest.raises(RuntimeError, match="No episode ends found"):
        Reward2GoTransform().inv(data)
    with pytest.raises(ValueError, match="last dim is time"):
        Reward2GoTransform().inv(data[0, 0])
    data = rollout(2, 5, agents=(2,))
    together = Reward2GoTransform(0.5).inv(data)["next", "reward"]
    data["next", "done"] = data["next", "done"][:, :, 0]
    assert torch.equal(Reward2GoTransform(0.5).inv(data)["next", "reward"], together)
    data["next", "done"] = torch.ones(2, 5, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="one for each"):
        Reward2GoTransform().inv(data)
