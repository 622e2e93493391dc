"""The same rollouts through these functions and through those of torchrl, where it is installed: the same values."""

import itertools
import warnings

import pytest
import torch
from tensordict import TensorDict

from interop.postprocs import DensifyReward, MultiStep, split_trajectories
from interop.transforms import MultiStepTransform, Reward2GoTransform
from tests.interop.postprocs.rollouts import rollout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl", reason="torchrl is not installed")
    from torchrl.collectors.utils import split_trajectories as their_split
    from torchrl.data import postprocs as other
    from torchrl.envs import transforms as theirs

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = [(1,), (13,), (2, 8), (3, 1, 16)]


def same(one, another):
    assert set(one.keys(True, True)) == set(another.keys(True, True))
    assert one.batch_size == another.batch_size
    for key in another.keys(True, True):
        left, right = one.get(key), another.get(key)
        assert left.dtype == right.dtype and left.ndim == right.ndim, key
        for each, expected in zip(left.unbind(0), right.unbind(0), strict=True):
            torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)


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


def test_multi_step_of_padded_rollouts_and_their_state():
    data, lengths = rollout(3, 8, seed=3), torch.tensor([8, 5, 2])
    data["collector"] = TensorDict({"mask": torch.arange(8) < lengths[:, None]}, [3, 8])
    data["next", "done"][torch.arange(3), lengths - 1] = True
    same(MultiStep(0.9, 3)(data), other.MultiStep(0.9, 3)(data))
    one, another = MultiStep(0.9, 3), other.MultiStep(0.5, 3)
    one.load_state_dict(another.state_dict())
    assert one.gamma == 0.5
    another.load_state_dict(MultiStep(0.9, 3).state_dict())


@pytest.mark.parametrize("batch", [(8,), (2, 8)])
def test_a_stream_in_all_pieces(batch):
    data = rollout(*batch, seed=5)
    for cuts in (*range(0, 2**7, 11), 2**7 - 1):
        places = [0, *(i + 1 for i in range(7) if cuts >> i & 1), 8]
        pair = MultiStepTransform(3, 0.9), theirs.MultiStepTransform(3, 0.9)
        for a, b in itertools.pairwise(places):
            made, wanted = (each.inv(data[..., a:b].clone()) for each in pair)
            assert (made is None) == (wanted is None)
            if made is not None:
                same(made, wanted)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("gamma", [1.0, 0.9, torch.tensor(0.5)])
def test_returns_to_go(batch, gamma):
    data, discount = rollout(*batch, seed=6), float(gamma)
    same(DensifyReward(discount=discount)(data.clone()), other.DensifyReward(discount=discount)(data.clone()))
    data["next", "done"][..., -1:, :] = True
    same(Reward2GoTransform(gamma).inv(data), theirs.Reward2GoTransform(gamma).inv(data))


@pytest.mark.parametrize("shape", [(1,), (10,), (30,), (3, 8)])
@pytest.mark.parametrize(("collector", "ids"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    "options", [{}, {"as_nested": True}, {"prefix": "meta"}, {"prefix": "p", "trajectory_key": ("m", "i")}]
)
def test_split_trajectories(shape, collector, ids, options):
    for seed in range(3):
        data = rollout(*shape, seed=seed, ends=0.6)
        if collector:
            data["collector", "x"] = data["action"].clone()
        if ids:
            begins = torch.ones(shape, dtype=torch.int64)
            begins[..., 1:] = data["next", "done"][..., :-1, 0]
            data["collector", "traj_ids"] = begins.reshape(-1).cumsum(0).reshape(shape) + 10
        mask = ("collector", "mask") if collector else "mask"
        if options.get("as_nested") and bool(split_trajectories(data).get(mask).all()):
            continue  # then they pad nothing, and make nothing nested
        same(split_trajectories(data, **options), their_split(data, **options))
