"""What is still to be earned, stored in place of rewards."""

import pytest
import torch
from tensordict import TensorDict

from interop import LazyTensorStorage, ReplayBuffer
from interop.transforms.reward_to_go import Reward2GoTransform


def episodes(*batch, ends=(2, 4)):
    done = torch.zeros(*batch, 1, dtype=torch.bool)
    done[..., list(ends), :] = True
    reward = torch.ones(*batch, 1)
    return TensorDict({"obs": torch.zeros(*batch, 3), "next": {"reward": reward, "done": done}}, batch)


def test_a_buffer_stores_what_is_still_to_be_earned():
    data = episodes(5)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=Reward2GoTransform(gamma=0.5))
    rb.extend(data)
    assert rb[:]["next", "reward"][:, 0].tolist() == [1.75, 1.5, 1, 1.5, 1]
    assert data["next", "reward"].eq(1).all()


def test_lanes_and_what_follows_the_last_end():
    data = episodes(2, 5, ends=[1])
    data["next", "done"][1] = torch.tensor([0, 0, 1, 0, 0]).bool()[:, None]
    found = Reward2GoTransform(0.5).inv(data)["next", "reward"][..., 0]
    assert found.tolist() == [[1.5, 1, 1.75, 1.5, 1], [1.75, 1.5, 1, 1.5, 1]]


def test_a_line_without_an_end_is_refused():
    data = episodes(2, 5, ends=[1])
    data["next", "done"][1] = False
    with pytest.raises(RuntimeError, match="No episode ends found"):
        Reward2GoTransform().inv(data)


@pytest.mark.parametrize("gamma", [0.5, torch.tensor(0.5), None])
def test_other_keys(gamma):
    data = episodes(5)
    transform = Reward2GoTransform(gamma, in_keys=[("next", "gain")], out_keys=["return"], done_key="over")
    data["next", "gain"], data["next", "over"] = data["next", "reward"].long(), data["next", "done"]
    found = transform.inv(data)
    wanted = [3, 2, 1, 2, 1] if gamma is None else [1.75, 1.5, 1, 1.5, 1]
    assert found["return"][:, 0].tolist() == wanted
    assert found["return"].dtype == torch.float32
    assert found["next", "gain"].eq(1).all()


def test_flags_for_agents_and_for_all():
    data = episodes(5)
    data["next", "reward"] = torch.ones(5, 2, 1)
    together = Reward2GoTransform(0.5).inv(data)["next", "reward"]
    data["next", "done"] = data["next", "done"][:, None].expand(5, 2, 1).clone()
    assert torch.equal(Reward2GoTransform(0.5).inv(data)["next", "reward"], together)
    assert together[..., 0].T.tolist() == [[1.75, 1.5, 1, 1.5, 1]] * 2
    data["next", "done"] = torch.ones(5, 3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="one for each"):
        Reward2GoTransform().inv(data)


def test_what_is_missing_is_named_and_reading_changes_nothing():
    transform = Reward2GoTransform()
    for key in ("reward", "done"):
        with pytest.raises(KeyError, match=key):
            transform.inv(episodes(5).exclude(("next", key)))
    data = episodes(5)
    assert transform(data) is data
    assert repr(transform) == "Reward2GoTransform(keys=[('next', 'reward')])"
    assert list(transform.state_dict()) == ["gamma"]
    with pytest.raises(ValueError, match="from 0 to 1"):
        Reward2GoTransform(1.5)
