"""Rollouts as transitions of n steps: against a loop over steps, and by hand."""

import copy
import pickle

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from interop.postprocs import MultiStep
from tests.interop.postprocs.rollouts import assert_as_by_loop, rollout


def line(rewards, ends=(), dtype=torch.float32, **more):
    """One rollout; the observation at step t is t, and t + 1 after it."""
    count = len(rewards)
    at = torch.arange(count, dtype=torch.float32)
    done = torch.zeros(count, 1, dtype=torch.bool)
    done[list(ends)] = True
    following = TensorDict({"obs": at + 1, "reward": torch.tensor(rewards).to(dtype)[:, None], "done": done}, [count])
    return TensorDict({"obs": at, "next": following, **more}, [count])


@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("batch", [(13,), (2, 1, 8)])
def test_transitions_are_those_of_a_loop(batch, n):
    data = rollout(*batch, seed=n)
    before = data.clone()
    found = MultiStep(0.9, n)(data)
    assert_as_by_loop(found, data, 0.9, n)
    assert found.batch_size == data.batch_size
    assert set(data.keys(True, True)) == set(before.keys(True, True)) and (data == before).all()


def test_padding_is_no_start_and_no_window_reaches_into_it():
    mask = torch.tensor([True, True, True, True, False, False])
    data = line([1.0, 1, 1, 1, 100, 100], collector=TensorDict({"mask": mask}, [6]))
    found = MultiStep(0.5, 3)(data)
    assert found["next", "reward"][:4, 0].tolist() == [1.75, 1.75, 1.5, 1.0]
    assert found["next", "obs"][:4].tolist() == [3, 4, 4, 4]
    assert found["nonterminal"].tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("trailing", [(), (1,)])
def test_agents_that_end_each_by_itself(trailing):
    data = rollout(2, 6, agents=(3,))
    for key in ("done", "terminated", "truncated"):
        data["next", key] = data["next", key].reshape(2, 6, 3, *trailing)
    found = MultiStep(0.9, 3)(data)
    assert found["gamma"].shape == (2, 6, 3, *trailing)
    for key in ("done", "terminated", "truncated"):
        data["next", key] = found["next", key] = data["next", key].reshape(2, 6, 3, 1)
    assert_as_by_loop(found, data, 0.9, 3, agents=1)


def test_flags_for_all_agents_and_a_reward_for_each():
    data = rollout(2, 6)
    data["next", "agents"] = TensorDict({"reward": torch.randn(2, 6, 3, 1)}, [2, 6, 3])
    together, one = MultiStep(0.9, 3), MultiStep(0.9, 3)
    together.reward_keys = [("agents", "reward"), "reward"]
    found = together(data)
    for i in range(3):
        alone = data.clone()
        alone["next", "reward"] = data["next", "agents", "reward"][:, :, i]
        torch.testing.assert_close(found["next", "agents", "reward"][:, :, i], one(alone)["next", "reward"])
    torch.testing.assert_close(found["next", "reward"], one(data)["next", "reward"])
    assert torch.equal(found["next", "agents", "original_reward"], data["next", "agents", "reward"])
    assert torch.equal(found["next", "original_reward"], data["next", "reward"])


@pytest.mark.parametrize(
    ("dtype", "kept", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-15),
        (torch.bfloat16, torch.bfloat16, 4e-3),
        (torch.int64, torch.float32, 1e-7),
        (torch.bool, torch.float32, 1e-7),
    ],
)
def test_rewards_of_every_kind(dtype, kept, tolerance):
    found = MultiStep(0.9, 3)(line([1.0] * 8, dtype=dtype))["next", "reward"]
    assert found.dtype == kept
    exact = torch.tensor([2.71] * 6 + [1.9, 1], dtype=torch.float64)
    torch.testing.assert_close(found[:, 0].double(), exact, rtol=tolerance, atol=0)


def test_entries_of_every_kind_arrive():
    count, data = 8, line([1.0] * 8, ends=[4])
    dtypes = [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.bfloat16, torch.complex64, torch.int8]
    for dtype in dtypes:
        data["next", str(dtype)] = torch.arange(count).to(dtype)
    data["next", "empty"] = torch.zeros(count, 0, 3)
    data["next", "text"] = NonTensorStack(*"abcdefgh")
    data["next", "strided"] = torch.arange(2 * count).reshape(2, count).T
    found = MultiStep(0.9, 3)(data)
    last = torch.tensor([2, 3, 4, 4, 4, 7, 7, 7])
    for dtype in dtypes:
        assert found["next", str(dtype)].dtype == dtype
        assert found["next", str(dtype)].tolist() == last.to(dtype).tolist()
    assert found["next", "empty"].shape == (count, 0, 3)
    assert found["next", "strided"].tolist() == data["next", "strided"][last].tolist()
    assert found.get(("next", "text")).tolist() == list("cdeeehhh")


def test_gradients_flow_to_rewards_and_observations():
    data = line([1.0] * 6, ends=[3])
    data["next", "reward"].requires_grad_()
    data["next", "obs"].requires_grad_()
    found = MultiStep(0.5, 3)(data)
    (found["next", "reward"][1] + found["next", "obs"][0] * 2).sum().backward()
    assert data["next", "reward"].grad[:, 0].tolist() == [0, 1, 0.5, 0.25, 0, 0]
    assert data["next", "obs"].grad.tolist() == [0, 0, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (line([1.0] * 4).exclude(("next", "reward")), KeyError, "reward"),
        (line([1.0] * 4).exclude(("next", "done")), KeyError, "done"),
        (
            rollout(6, agents=(3,)).unsqueeze(0).set(("next", "done"), torch.zeros(1, 6, 3, 1, 1)),
            RuntimeError,
            "compatible with",
        ),
        ({}, TypeError, "takes a tensordict, got dict"),
        (line([1.0])[0], ValueError, "whose last dim is time"),
    ],
)
def test_data_that_is_no_rollout_is_refused(data, error, text):
    with pytest.raises(error, match=text):
        MultiStep(0.9, 3)(data)


@pytest.mark.parametrize(("gamma", "n", "error"), [(0.9, 0, ValueError), (0.9, 1.5, TypeError), (1.1, 3, ValueError)])
def test_wrong_discounts_and_steps_are_refused(gamma, n, error):
    with pytest.raises(error):
        MultiStep(gamma, n)


def test_it_is_a_module_with_its_discount_as_state():
    made, other = MultiStep(0.9, 3), MultiStep(0.5, 3)
    assert list(made.state_dict()) == ["gammas"] and made.gammas.shape == (1, 1, 4)
    assert repr(made) == "MultiStep(gamma=0.9, n_steps=3)"
    other.load_state_dict(made.state_dict())
    assert other.gamma == pytest.approx(0.9)
    made.load_state_dict(MultiStep(0.9, 3).state_dict())
    assert made.gamma == 0.9  # not as float32 has it
    with pytest.raises(RuntimeError, match="size mismatch"):
        MultiStep(0.9, 2).load_state_dict(made.state_dict())
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (same.gamma, same.n_steps) == (0.9, 3)
