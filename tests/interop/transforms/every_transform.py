"""One example of each transform, and data for it: what `test_contract.py` holds all of them to."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from interop import transforms as T  # noqa: N812

ITEMS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    data: Callable[[], TensorDict]
    reads: Any = None  # a key without which `forward` raises KeyError
    writes: Any = None  # the same for `inv`
    random: bool = False
    waits: bool = False  # a first write stores less than it is given
    keeps: bool = False  # a write leaves something for the next one
    other_type: bool = False  # what is stored has the dtypes or the shapes that `forward` gives


def _of(seed, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def images():
    flat = torch.arange(ITEMS * 8 * 10 * 3) % 251
    return TensorDict({"pixels": flat.to(torch.uint8).reshape(ITEMS, 8, 10, 3)}, [ITEMS])


def channels():
    flat = torch.arange(ITEMS * 3 * 8 * 10) % 251
    return TensorDict({"pixels": flat.to(torch.uint8).reshape(ITEMS, 3, 8, 10)}, [ITEMS])


def steps():
    """Independent steps."""
    return TensorDict(
        {
            "observation": _of(0, [ITEMS, 4]),
            "position": _of(1, [ITEMS, 2]),
            "deep": TensorDict({"velocity": _of(2, [ITEMS, 3])}, [ITEMS]),
            "double": _of(3, [ITEMS, 4]).double(),
            "action": torch.arange(ITEMS) % 4,
            "choice": torch.nn.functional.one_hot(torch.arange(ITEMS) % 4, 4),
            "reward": _of(4, [ITEMS, 1]),
            "next": TensorDict({"reward": _of(5, [ITEMS, 1]), "observation": _of(6, [ITEMS, 4])}, [ITEMS]),
        },
        [ITEMS],
    )


def sequences(length=5):
    """Items that are sequences in time, [ITEMS, length]; an episode ends in the middle of each, and another with it."""
    shape = [ITEMS, length]
    done = torch.zeros(*shape, 1, dtype=torch.bool)
    done[:, 2] = done[:, -1] = True
    frames = torch.arange(ITEMS * (length + 1) * 12, dtype=torch.float32).reshape(ITEMS, length + 1, 3, 2, 2)
    return TensorDict(
        {
            "observation": _of(0, [*shape, 4]),
            "frame": frames[:, :-1],
            "done": torch.zeros_like(done),
            "terminated": torch.zeros_like(done),
            "truncated": torch.zeros_like(done),
            "next": TensorDict(
                {
                    "observation": _of(1, [*shape, 4]),
                    "frame": frames[:, 1:],
                    "reward": _of(2, [*shape, 1]),
                    "done": done,
                    "terminated": done,
                    "truncated": torch.zeros_like(done),
                },
                shape,
            ),
        },
        shape,
    )


def stream():
    """Steps that follow each other in time."""
    return sequences()[0].repeat(2)[:ITEMS]


def _norm():
    return T.ObservationNorm(loc=1.0, scale=2.0, in_keys=["observation"], in_keys_inv=["observation"])


def _seen(norm):
    norm.update(steps())
    return norm


def _burn_in():
    torch.manual_seed(0)
    module = TensorDictModule(torch.nn.Linear(4, 3), in_keys=["observation"], out_keys=[("next", "hidden")])
    return T.BurnInTransform([module], burn_in=2, out_keys=["hidden"])


def same(one, other):
    """The same entries, bit for bit but for the kind of a NaN."""
    assert one.batch_size == other.batch_size and set(one.keys(True, True)) == set(other.keys(True, True))
    for key in one.keys(True, True):
        torch.testing.assert_close(one.get(key), other.get(key), rtol=0, atol=0, equal_nan=True)


CASES = {
    "ToTensorImage": Case(lambda: T.ToTensorImage(), images, reads="pixels", other_type=True),
    "Resize": Case(lambda: T.Resize(5, 6), channels, reads="pixels", other_type=True),
    "Crop": Case(lambda: T.Crop(4, 3, top=1, left=2), channels, reads="pixels", other_type=True),
    "CenterCrop": Case(lambda: T.CenterCrop(4, 3), channels, reads="pixels", other_type=True),
    "GrayScale": Case(lambda: T.GrayScale(), channels, reads="pixels", other_type=True),
    "RenameTransform": Case(
        lambda: T.RenameTransform(["position"], ["place"], ["stored"], ["observation"]),
        steps,
        reads="position",
        writes="observation",
        other_type=True,
    ),
    "CatTensors": Case(
        lambda: T.CatTensors([("deep", "velocity"), "observation"], "all"), steps, reads="observation", other_type=True
    ),
    "Stack": Case(
        lambda: T.Stack(["observation", ("next", "observation")], "all", dim=-2),
        steps,
        reads="observation",
        other_type=True,
    ),
    "SelectTransform": Case(lambda: T.SelectTransform("observation", ("deep", "velocity")), steps, other_type=True),
    "ExcludeTransform": Case(lambda: T.ExcludeTransform("position", ("next", "reward")), steps, other_type=True),
    "ExcludeTransform inverse": Case(lambda: T.ExcludeTransform("position", inverse=True), steps, other_type=True),
    "RandomCropTensorDict": Case(lambda: T.RandomCropTensorDict(3), sequences, random=True, other_type=True),
    "MultiStepTransform": Case(
        lambda: T.MultiStepTransform(2, 0.9), stream, writes=("next", "reward"), waits=True, keeps=True
    ),
    "CatFrames": Case(lambda: T.CatFrames(3, dim=-3, in_keys=["frame"]), sequences, reads="frame", other_type=True),
    "DoubleToFloat": Case(
        lambda: T.DoubleToFloat(in_keys=["double"], in_keys_inv=["double"]),
        steps,
        reads="double",
        writes="double",
        other_type=True,
    ),
    "DTypeCastTransform": Case(
        lambda: T.DTypeCastTransform(torch.int64, torch.int32, in_keys=["action"]),
        steps,
        reads="action",
        other_type=True,
    ),
    "DeviceCastTransform": Case(lambda: T.DeviceCastTransform("cpu"), steps),
    "RewardScaling": Case(lambda: T.RewardScaling(1.0, 2.0), steps, reads="reward"),
    "RewardClipping": Case(lambda: T.RewardClipping(-0.5, 0.5), steps, reads="reward"),
    "BinarizeReward": Case(lambda: T.BinarizeReward(), steps, reads="reward", other_type=True),
    "SignTransform": Case(lambda: T.SignTransform(in_keys=["reward"]), steps, reads="reward"),
    "ClipTransform": Case(lambda: T.ClipTransform(in_keys=["reward"], low=-0.5, high=0.5), steps, reads="reward"),
    "RewardSum": Case(lambda: T.RewardSum(in_keys=[("next", "reward")], time_dim=-1), sequences, other_type=True),
    "Reward2GoTransform": Case(lambda: T.Reward2GoTransform(0.9), sequences, writes=("next", "reward")),
    "ObservationNorm": Case(_norm, steps, reads="observation", writes="observation"),
    "FlattenObservation": Case(
        lambda: T.FlattenObservation(-3, -1, in_keys=["pixels"]), images, reads="pixels", other_type=True
    ),
    "SqueezeTransform": Case(
        lambda: T.SqueezeTransform(-1, in_keys=["reward"]), steps, reads="reward", other_type=True
    ),
    "UnsqueezeTransform": Case(
        lambda: T.UnsqueezeTransform(-1, in_keys=["observation"]), steps, reads="observation", other_type=True
    ),
    "PermuteTransform": Case(
        lambda: T.PermuteTransform([-1, -3, -2], in_keys=["pixels"]), images, reads="pixels", other_type=True
    ),
    "DiscreteActionProjection": Case(
        lambda: T.DiscreteActionProjection(3, 4, "choice"), steps, reads="choice", writes="choice", other_type=True
    ),
    "UnaryTransform": Case(
        lambda: T.UnaryTransform(in_keys=["observation"], out_keys=["negative"], fn=torch.neg),
        steps,
        reads="observation",
        other_type=True,
    ),
    "FiniteTensorDictCheck": Case(lambda: T.FiniteTensorDictCheck(), steps),
    "BurnInTransform": Case(_burn_in, sequences, reads="observation", other_type=True),
    "ExpandAs": Case(lambda: T.ExpandAs("action", "observation", "wide"), steps, reads="action", other_type=True),
    "FlattenTensorDict": Case(lambda: T.FlattenTensorDict(), steps),
    "VecNorm": Case(lambda: _seen(T.VecNorm(in_keys=["observation"])), steps, reads="observation", keeps=True),
    "VecNormV2": Case(
        lambda: _seen(T.VecNormV2(in_keys=["observation"], reduce_batch_dims=True)),
        steps,
        reads="observation",
        keeps=True,
    ),
}
