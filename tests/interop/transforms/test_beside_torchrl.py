"""Transforms of torchrl in buffers of this library, where torchrl is installed: as in its own buffers."""

import pickle
import warnings

import pytest
import torch
from tensordict import TensorDict

from interop import Compose, LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from tests.interop.transforms.every_transform import same

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl import data as other
    from torchrl.envs import transforms as theirs

pytestmark = pytest.mark.filterwarnings("ignore")
REWARD, OBS = [("next", "reward")], ["observation"]


def steps(items=6):
    """An episode, all of it."""
    random = torch.Generator().manual_seed(0)
    done = torch.zeros(items, 1, dtype=torch.bool)
    done[-1] = True
    flags = {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}

    def numbers(*shape):
        return torch.randn(items, *shape, generator=random)

    return TensorDict(
        {
            "observation": numbers(3),
            "image": torch.randint(255, (items, 3, 4, 4), generator=random, dtype=torch.uint8),
            "pixels": torch.randint(255, (items, 4, 5, 3), generator=random, dtype=torch.uint8),
            "action": numbers(2),
            "double": numbers(2).double(),
            "next": {"observation": numbers(3), "reward": numbers(1), **flags},
        },
        [items],
    )


CASES = [
    ("BinarizeReward", (REWARD,), {}),
    ("CatFrames", (2, -1, OBS, ["stack"]), {}),
    ("CatTensors", (["observation", "action"], "both"), {"del_keys": False}),
    ("ClipTransform", (OBS,), {"low": -0.5}),
    ("DTypeCastTransform", (torch.float32, torch.float16, OBS), {"in_keys_inv": OBS}),
    ("DoubleToFloat", (["double"],), {"in_keys_inv": ["double"]}),
    ("ExcludeTransform", ("image",), {}),
    ("ExcludeTransform", ("image",), {"inverse": True}),
    ("FlattenObservation", (-3, -1, ["image"]), {}),
    ("MultiStepTransform", (2, 0.9), {}),
    ("ObservationNorm", (1.0, 2.0, OBS), {"in_keys_inv": ["action"]}),
    ("PermuteTransform", ((-1, -2, -3), ["image"]), {"in_keys_inv": ["image"]}),
    ("RandomCropTensorDict", (3,), {}),
    ("RenameTransform", (OBS, ["seen"]), {}),
    ("RenameTransform", (["kept"], OBS, ["kept"], OBS), {}),
    ("Reward2GoTransform", (0.5,), {}),
    ("RewardClipping", (-0.1, 0.1, REWARD), {}),
    ("RewardScaling", (0.0, 2.0, REWARD), {}),
    ("SelectTransform", ("observation", *REWARD), {}),
    ("SignTransform", (OBS,), {}),
    ("SqueezeTransform", (-1,), {"in_keys": REWARD}),
    ("ToTensorImage", (), {}),
    ("UnaryTransform", (OBS, ["absolute"]), {"fn": torch.abs}),
    ("UnsqueezeTransform", (-1,), {"in_keys": OBS, "in_keys_inv": ["action"]}),
    ("VecNorm", (OBS,), {}),
]


def written(transform, storage=LazyTensorStorage, buffer=ReplayBuffer):
    rb = buffer(storage=storage(10), transform=transform)
    rb.extend(steps())
    return rb


def everything(rb):
    """All that is read, without its index; draws are settled."""
    torch.manual_seed(0)
    return rb[:].exclude("index")


@pytest.mark.parametrize(("name", "args", "kwargs"), CASES, ids=str)
def test_buffers(name, args, kwargs, tmp_path):
    def make():
        return getattr(theirs, name)(*args, **kwargs)

    there = everything(written(make(), other.LazyTensorStorage, other.ReplayBuffer))
    for storage in (LazyTensorStorage, LazyMemmapStorage, ListStorage):
        same(everything(written(make(), storage)), there)
    same(everything(written(Compose(lambda data: data, theirs.Compose(make())))), there)
    if name != "RandomCropTensorDict":  # it is for items that are sequences
        found = written(make(), buffer=TensorDictReplayBuffer).sample(4)
        assert all(found.get(key).dtype == value.dtype for key, value in there.items(True, True))
    rb, loaded, stated = written(make()), *(ReplayBuffer(storage=LazyTensorStorage(10), transform=make()) for _ in "ab")
    rb.dumps(tmp_path)
    loaded.loads(tmp_path)
    stated.load_state_dict(rb.state_dict())
    for twin in (loaded, stated, pickle.loads(pickle.dumps(rb))):
        if name != "VecNorm":  # which changes its statistics whenever it is read
            same(everything(twin), there)
