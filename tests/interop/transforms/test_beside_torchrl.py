"""Transforms of TorchRL in buffers of this library, where TorchRL is: as in its own buffers."""

import pickle
import warnings

import pytest
import torch
from tensordict import TensorDict

from interop import (
    Compose,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl import data as other
    from torchrl.envs import transforms as theirs

pytestmark = pytest.mark.filterwarnings("ignore")
REWARD = ("next", "reward")


def steps(items=6, seed=0):
    """An episode, all of it."""
    random = torch.Generator().manual_seed(seed)
    done = torch.zeros(items, 1, dtype=torch.bool)
    done[-1] = True
    following = {
        "observation": torch.randn(items, 3, generator=random),
        "reward": torch.randn(items, 1, generator=random),
        "done": done,
        "terminated": done.clone(),
        "truncated": torch.zeros_like(done),
    }
    return TensorDict(
        {
            "observation": torch.randn(items, 3, generator=random),
            "image": torch.randint(255, (items, 3, 4, 4), generator=random, dtype=torch.uint8),
            "pixels": torch.randint(255, (items, 4, 5, 3), generator=random, dtype=torch.uint8),
            "action": torch.randn(items, 2, generator=random),
            "double": torch.randn(items, 2, generator=random, dtype=torch.double),
            "next": following,
        },
        [items],
    )


MAKE = {
    "BinarizeReward": lambda: theirs.BinarizeReward(in_keys=[REWARD]),
    "CatFrames": lambda: theirs.CatFrames(2, -1, in_keys=["observation"], out_keys=["stack"]),
    "CatTensors": lambda: theirs.CatTensors(["observation", "action"], "both", del_keys=False),
    "ClipTransform": lambda: theirs.ClipTransform(in_keys=["observation"], low=-0.5),
    "Compose": lambda: theirs.Compose(
        theirs.RewardScaling(0.0, 2.0, in_keys=[REWARD]), theirs.RenameTransform(["observation"], ["seen"])
    ),
    "DTypeCastTransform": lambda: theirs.DTypeCastTransform(
        torch.float32, torch.float16, in_keys=["observation"], in_keys_inv=["observation"]
    ),
    "DoubleToFloat": lambda: theirs.DoubleToFloat(in_keys=["double"], in_keys_inv=["double"]),
    "ExcludeTransform": lambda: theirs.ExcludeTransform("image"),
    "ExcludeTransform inverse": lambda: theirs.ExcludeTransform("image", inverse=True),
    "FlattenObservation": lambda: theirs.FlattenObservation(-3, -1, in_keys=["image"]),
    "MultiStepTransform": lambda: theirs.MultiStepTransform(2, 0.9),
    "ObservationNorm": lambda: theirs.ObservationNorm(1.0, 2.0, in_keys=["observation"], in_keys_inv=["action"]),
    "PermuteTransform": lambda: theirs.PermuteTransform((-1, -2, -3), in_keys=["image"], in_keys_inv=["image"]),
    "RandomCropTensorDict": lambda: theirs.RandomCropTensorDict(3),
    "RenameTransform": lambda: theirs.RenameTransform(["observation"], ["seen"]),
    "RenameTransform inverse": lambda: theirs.RenameTransform(["kept"], ["observation"], ["kept"], ["observation"]),
    "Reward2GoTransform": lambda: theirs.Reward2GoTransform(gamma=0.5),
    "RewardClipping": lambda: theirs.RewardClipping(-0.1, 0.1, in_keys=[REWARD]),
    "RewardScaling": lambda: theirs.RewardScaling(0.0, 2.0, in_keys=[REWARD]),
    "SelectTransform": lambda: theirs.SelectTransform("observation", REWARD),
    "SignTransform": lambda: theirs.SignTransform(in_keys=["observation"]),
    "SqueezeTransform": lambda: theirs.SqueezeTransform(-1, in_keys=[REWARD]),
    "ToTensorImage": lambda: theirs.ToTensorImage(),
    "UnaryTransform": lambda: theirs.UnaryTransform(["observation"], ["absolute"], fn=torch.abs),
    "UnsqueezeTransform": lambda: theirs.UnsqueezeTransform(-1, in_keys=["observation"], in_keys_inv=["action"]),
    "VecNorm": lambda: theirs.VecNorm(in_keys=["observation"]),
}
each = pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)


def written(transform, storage=None, buffer=ReplayBuffer, **kwargs):
    rb = buffer(storage=LazyTensorStorage(10) if storage is None else storage, transform=transform, **kwargs)
    rb.extend(steps())
    return rb


def everything(rb):
    """All that is read, without its index; draws are settled."""
    torch.manual_seed(0)
    return rb[:].exclude("index")


def same(one, another):
    assert set(one.keys(True, True)) == set(another.keys(True, True))
    for key in one.keys(True, True):
        torch.testing.assert_close(one.get(key), another.get(key), rtol=0, atol=0)


@each
def test_data_is_what_it_is_in_a_buffer_of_theirs(make):
    there = everything(written(make(), other.LazyTensorStorage(10), other.ReplayBuffer))
    for storage in (LazyTensorStorage, LazyMemmapStorage, ListStorage):
        same(everything(written(make(), storage(10))), there)
    same(everything(written(Compose(make(), lambda data: data))), there)
    same(everything(written(Compose(lambda data: data, theirs.Compose(make())))), there)


@each
def test_samples_of_both_kinds_of_buffer_have_been_through_it(make):
    for buffer in (ReplayBuffer, TensorDictReplayBuffer):
        rb = written(make(), buffer=buffer)
        if "RandomCrop" in str(rb.transform):
            continue  # it is for items that are sequences
        kinds = {key: value.dtype for key, value in everything(rb).items(True, True)}
        found = rb.sample(4)
        assert {key: found.get(key).dtype for key in kinds} == kinds


@each
def test_it_is_saved_and_copied(make, tmp_path):
    rb = written(make())
    torch.manual_seed(0)
    before = everything(rb)
    rb.dumps(tmp_path)
    loaded = ReplayBuffer(storage=LazyTensorStorage(10), transform=make())
    loaded.loads(tmp_path)
    as_dict = ReplayBuffer(storage=LazyTensorStorage(10), transform=make())
    as_dict.load_state_dict(rb.state_dict())
    for twin in (loaded, as_dict, pickle.loads(pickle.dumps(rb))):
        if "VecNorm" not in str(rb.transform):  # which changes its statistics whenever it is read
            same(everything(twin), before)
