"""The same rollouts through these modules and through those of TorchRL, where that is: the same values."""

import itertools
import warnings

import pytest
import torch
from tensordict import TensorDict

from interop.postprocs import DensifyReward, MultiStep
from interop.transforms.multi_step import MultiStepTransform
from interop.transforms.reward_to_go import Reward2GoTransform
from tests.interop.postprocs.rollouts import rollout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl", reason="TorchRL is not installed")
    from torchrl.data import postprocs as other
    from torchrl.envs.transforms import MultiStepTransform as TheirTransform
    from torchrl.envs.transforms import Reward2GoTransform as TheirReward2Go

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = [(1,), (13,), (2, 8), (3, 1, 16)]


def same(ours, theirs):
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    assert ours.batch_size == theirs.batch_size
    for key in theirs.keys(True, True):
        assert (ours[key].dtype, ours[key].shape) == (theirs[key].dtype, theirs[key].shape), key
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("n", [1, 3, 20])
@pytest.mark.parametrize("ends", [0.0, 0.2, 0.9])
def test_multi_step(batch, n, ends):
    data = rollout(*batch, seed=n, ends=ends)
    same(MultiStep(0.9, n)(data), other.MultiStep(0.9, n)(data))


@pytest.mark.parametrize("change", [lambda flags: flags, lambda flags: flags.squeeze(-1)], ids=["trailing one", "none"])
def test_multi_step_of_agents(change):
    data = rollout(2, 8, seed=1, agents=(3,)).exclude("action")  # they take no entries that are not of agents
    for key in ("observation", ("next", "observation")):
        data[key] = data[key][..., :1].clone()
    data["next", "deep", "count"] = data["next", "deep", "count"].unsqueeze(-1)
    for key in ("done", "terminated", "truncated"):
        data["next", key] = change(data["next", key])
    same(MultiStep(0.9, 3)(data), other.MultiStep(0.9, 3)(data))


def test_multi_step_of_padded_rollouts():
    data = rollout(3, 8, seed=3)
    lengths = torch.tensor([8, 5, 2])
    mask = torch.arange(8) < lengths[:, None]
    data["collector"] = TensorDict({"mask": mask}, [3, 8])
    data["next", "done"][torch.arange(3), lengths - 1] = True
    same(MultiStep(0.9, 3)(data), other.MultiStep(0.9, 3)(data))


def test_state_dicts_are_exchanged():
    ours, theirs = MultiStep(0.9, 3), other.MultiStep(0.5, 3)
    ours.load_state_dict(theirs.state_dict())
    assert ours.gamma == 0.5
    theirs.load_state_dict(MultiStep(0.9, 3).state_dict())


@pytest.mark.parametrize("batch", [(8,), (2, 8)])
def test_a_stream_in_all_pieces(batch):
    data = rollout(*batch, seed=5)
    for cuts in itertools.chain(range(0, 2**7, 11), (2**7 - 1,)):
        places = [0, *(i + 1 for i in range(7) if cuts >> i & 1), 8]
        ours, theirs = MultiStepTransform(3, 0.9), TheirTransform(3, 0.9)
        for a, b in itertools.pairwise(places):
            made, wanted = ours.inv(data[..., a:b].clone()), theirs.inv(data[..., a:b].clone())
            assert (made is None) == (wanted is None)
            if made is not None:
                same(made, wanted)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_rewards_made_dense(batch, discount):
    data = rollout(*batch, seed=6)
    same(DensifyReward(discount=discount)(data.clone()), other.DensifyReward(discount=discount)(data.clone()))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("gamma", [1.0, 0.9, torch.tensor(0.5)])
def test_what_is_still_to_be_earned(batch, gamma):
    data = rollout(*batch, seed=7)
    data["next", "done"][..., -1:, :] = True
    same(Reward2GoTransform(gamma).inv(data), TheirReward2Go(gamma).inv(data))
