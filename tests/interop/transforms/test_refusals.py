"""Arguments and data that transforms refuse: by name, and nothing changes."""

import pytest
import torch
from tensordict import TensorDict

from interop import transforms as T  # noqa: N812

DIMS = "behind 1 batch dims, and"


def data():
    return TensorDict(
        {
            "a": torch.ones(4, 2),
            "b": torch.zeros(4, 3),
            "flat": torch.ones(4),
            "byte": torch.ones(4, dtype=torch.uint8),
            "complex": torch.ones(4, 1) * 1j,
            "square": torch.arange(16).reshape(4, 4),
            "pixels": torch.zeros(4, 2, 3, 5),
            "n": TensorDict({"a": torch.ones(4, 2)}, [4]),
            "text": "words",
            "wide": TensorDict({}, [4, 2]),
            "locked": TensorDict({"a": torch.ones(4, 2)}, [4]).lock_(),
        },
        [4],
    )


@pytest.mark.parametrize(
    ("transform", "error", "text"),
    [
        (T.RewardClipping(None, -5, ["byte"]), ValueError, "'byte': the upper bound -5"),
        (T.RewardClipping(256, None, ["byte"]), ValueError, "'byte': the lower bound 256"),
        (T.RewardClipping(0.0, 1.0, ["complex"]), TypeError, "RewardClipping: 'complex'"),
        (T.RewardClipping(torch.zeros(3), None, ["a"]), ValueError, "'a': bounds of shape"),
        (T.BinarizeReward(["flat"]), ValueError, r"'flat': rewards must be \[\.\.\., 1\]"),
        (T.SignTransform(["n"]), TypeError, "'n' must be a tensor"),
        (T.DoubleToFloat(["text"]), TypeError, "'text' must be a tensor"),
        (T.DiscreteActionProjection(1, 2, "b"), ValueError, "'b': one-hot actions of at most 2"),
        (T.ToTensorImage(in_keys=["pixels", "a"]), ValueError, r"'a'.*height, width, channels\], got \[4, 2\]"),
        (T.Resize(3, in_keys=["a"]), ValueError, r"Resize: 'a': images are .*channels, height, width\], got"),
        (T.Crop(2, in_keys=["a"]), ValueError, "'a': images are"),
        (T.CenterCrop(2, in_keys=["a"]), ValueError, "'a': images are"),
        (T.GrayScale(), ValueError, r"'pixels': images need 3 channels.*got \[4, 2, 3, 5\]"),
        (T.FlattenObservation(-4, -1), ValueError, f"does not fit 'pixels' .*items have 3 dims, {DIMS} 4"),
        (T.FlattenObservation(0, 1, allow_positive_dim=True), ValueError, "'pixels' would be of shape .8, 3, 5."),
        (T.UnsqueezeTransform(-3, in_keys=["a"]), ValueError, f"does not fit 'a' .*items have 1 dims, {DIMS} 2"),
        (T.PermuteTransform((-1, -2), in_keys=["square"]), ValueError, "'square' .*items have 1 dims"),
        (T.ExpandAs("a", "b"), ValueError, "does not fit 'a' of shape"),
        (T.ExpandAs("a", "gone"), KeyError, "'gone' not found"),
        (T.CatTensors(["a", "flat"], "c"), ValueError, r"'flat' \[4\] do not fit along dim -1"),
        (T.CatTensors(["a", ("n", "a")], "c", dim=0), ValueError, "'c' would be of shape .8, 2. in a tensordict"),
        (T.CatTensors(["a", "n"]), TypeError, "'n' must be a tensor"),
        (T.CatTensors(["a", "gone"]), KeyError, "'gone' not found"),
        (T.CatTensors(["a", ("locked", "a")]), RuntimeError, "locked"),
        (T.CatTensors(["a"], ("n", "a", "x")), KeyError, "'a' is no tensordict but a Tensor"),
        (T.Stack(["a", "b"], "c"), ValueError, r"'a' \[4, 2\], 'b' \[4, 3\] do not fit at dim -1"),
        (T.Stack(["a", "n"], "c"), ValueError, "do not fit at dim -1"),
        (T.Stack(["a", ("n", "a")], "c", dim=-3), ValueError, "batch dims have to stay"),
        (T.Stack(["a"], "c", dim=-5), ValueError, "do not fit at dim -5"),
        (T.Stack(["a", "gone"], "c"), KeyError, "'gone' not found"),
        (T.Stack(["a", ("locked", "a")], "c"), RuntimeError, "locked"),
        (T.RenameTransform(["a"], [("b", "x")]), KeyError, "'b' is no tensordict but a Tensor"),
        (
            T.RenameTransform(["b"], [("wide", "x")]),
            ValueError,
            r"of shape \[4, 3\] in a tensordict of batch size \[4, 2\]",
        ),
        (T.RenameTransform(["a", ("locked", "a")], ["c", "d"]), RuntimeError, "locked"),
    ],
)
def test_reading(transform, error, text):
    given = data()
    with pytest.raises(error, match=text):
        transform(given)
    assert set(given.keys(True)) == set(data().keys(True))
    assert all(torch.equal(given[key], data()[key]) for key in data().keys(True, True) if key != "text")


@pytest.mark.parametrize(
    ("transform", "error", "text"),
    [
        (T.DiscreteActionProjection(1, 5, "b"), ValueError, "'b': one-hot actions of 5 places"),
        (T.PermuteTransform((-1, -2), in_keys_inv=["a"]), ValueError, f"items have 1 dims, {DIMS} 2 are needed"),
        (T.UnsqueezeTransform(-2, in_keys_inv=["wide"]), TypeError, "'wide' must be a tensor"),
        (T.Stack(["p", "q"], "b", "b", ["p", "q"]), ValueError, r"'b' of shape \[4, 3\] has no dim -1 of size 2"),
        (T.ClipTransform(in_keys_inv=["gone"], low=0), KeyError, "'gone' not found"),
    ],
)
def test_writing(transform, error, text):
    with pytest.raises(error, match=text):
        transform.inv(data())


@pytest.mark.parametrize(
    "transform",
    [
        T.SelectTransform("a"),
        T.ExcludeTransform("a"),
        T.DoubleToFloat(),
        T.FiniteTensorDictCheck(),
        T.FlattenTensorDict(False),
    ],
)
def test_data_that_is_no_tensordict(transform):
    with pytest.raises(TypeError, match="tensordict, got dict"):
        transform({"a": 1})


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: T.RewardClipping(), ValueError, "clamp_min, clamp_max or both"),
        (lambda: T.RewardClipping(1, -1), ValueError, "must not be above"),
        (lambda: T.RewardClipping(torch.tensor([0.0, float("nan")]), 1.0), ValueError, "clamp_min must be a number"),
        (lambda: T.RewardClipping(0.0, torch.tensor(1j)), TypeError, "clamp_max must be a number"),
        (lambda: T.RewardClipping("a", 1), TypeError, "clamp_min must be a number"),
        (lambda: T.RewardClipping(True, 1), TypeError, "clamp_min must be a number"),
        (lambda: T.ClipTransform(["a"]), TypeError, "low, high or both"),
        (lambda: T.ClipTransform(["a"], low=1.0, high=1.0), ValueError, "low must be below high"),
        (lambda: T.ClipTransform(["a"], low=torch.ones(2)), TypeError, "low must be one number"),
        (lambda: T.DiscreteActionProjection(0, 3), ValueError, "num_actions_effective"),
        (lambda: T.DiscreteActionProjection(4, 3), ValueError, "num_actions_effective"),
        (lambda: T.DiscreteActionProjection(2, 3.0), TypeError, "max_actions must be an int"),
        (lambda: T.UnaryTransform(["a"], ["a"], fn=None), TypeError, "fn must be callable"),
        (lambda: T.DoubleToFloat(out_keys=["a"]), ValueError, "out_keys without in_keys"),
        (lambda: T.DoubleToFloat(["a"], out_keys_inv=["a"]), ValueError, "out_keys_inv without in_keys_inv"),
        (lambda: T.DTypeCastTransform("float64", torch.float32), TypeError, "dtype_in"),
        (lambda: T.ToTensorImage(dtype=torch.uint8), ValueError, "from_int=False"),
        (lambda: T.ToTensorImage(dtype="float32"), TypeError, "dtype"),
        (lambda: T.Resize((3, 4), 5), ValueError, "two sizes"),
        (lambda: T.Resize(3, interpolation="lanczos"), ValueError, "interpolation must be one of"),
        (lambda: T.Resize(0), ValueError, "w must be at least 1"),
        (lambda: T.CenterCrop("3"), TypeError, "w must be an int"),
        (lambda: T.Crop(3, -1), ValueError, "h must be at least 1"),
        (lambda: T.FlattenObservation(0, -1), ValueError, "first_dim must be negative"),
        (lambda: T.FlattenObservation(-1, -2), ValueError, "not be behind"),
        (lambda: T.UnsqueezeTransform(0, in_keys=["a"]), RuntimeError, "dim must be negative"),
        (lambda: T.SqueezeTransform(None, in_keys=["a"]), TypeError, "dim must be an int"),
        (lambda: T.PermuteTransform((0, 1)), ValueError, r"\[-2, -1\] for so many"),
        (lambda: T.PermuteTransform((-1, -1)), ValueError, "dims must be an order"),
        (lambda: T.CatTensors(), ValueError, "at least one"),
        (lambda: T.CatTensors(["a", "a"]), ValueError, "different"),
        (lambda: T.CatTensors(["a"], ["b"]), TypeError, "needs one key as out_key"),
        (lambda: T.Stack(["a"], "c", dim=1), ValueError, "allow_positive_dim=True"),
        (lambda: T.Stack(["a"], "c", "d"), ValueError, "both of in_key_inv and out_keys_inv"),
        (lambda: T.RenameTransform(["a"], ["b", "c"]), ValueError, "as many, got 1 and 2"),
        (lambda: T.RenameTransform(["a"], ["b"], ["i"]), ValueError, "in_keys_inv and out_keys_inv.*got 1 and 0"),
        (lambda: T.RenameTransform(["a", "b"], ["b", "c"]), ValueError, "swap names with two transforms"),
        (lambda: T.RenameTransform(["a", "b"], ["c", "c"]), ValueError, "another name"),
        (lambda: T.SelectTransform(["a", "b"]), TypeError, "takes keys as arguments"),
        (lambda: T.ExcludeTransform(("a", 1)), TypeError, "takes keys as arguments"),
        (lambda: T.RandomCropTensorDict(0), ValueError, "sub_seq_len must be at least 1"),
        (lambda: T.RandomCropTensorDict(1, generator=0), TypeError, "generator must be"),
        (lambda: T.RandomCropTensorDict(1, mask_key=3), TypeError, "mask_key must be a key"),
        (lambda: T.CatFrames(0, -1), ValueError, "N must be at least 1"),
        (lambda: T.CatFrames(2.0, -1), TypeError, "N must be an int"),
        (lambda: T.CatFrames(3, 1), ValueError, "dim must be negative"),
        (lambda: T.CatFrames(3, -1, padding="zeros"), ValueError, "'same' or 'constant', got 'zeros'"),
        (lambda: T.CatFrames(3, -1, padding_value="0"), TypeError, "must be a number"),
        (lambda: T.CatFrames(3, -1, out_keys=["a", "b"]), ValueError, "as many"),
        (lambda: T.CatFrames(3, -1, ["a", "b"], ["c", "c"]), ValueError, "must be different keys"),
        (lambda: T.CatFrames(3, -1, done_key=3), TypeError, "done_key must be a key"),
        (lambda: T.BurnInTransform([torch.nn.Linear(1, 1)], 2), TypeError, "TensorDictModules, got a Linear"),
        (lambda: T.BurnInTransform([], -1), ValueError, "burn_in must be at least 0"),
        (lambda: T.RewardSum(["a", "b"], done_keys=["done"]), ValueError, "done_keys must be one for each"),
        (lambda: T.MultiStepTransform(0, 0.9), ValueError, "n_steps"),
        (lambda: T.MultiStepTransform(1.5, 0.9), TypeError, "n_steps"),
        (lambda: T.Reward2GoTransform(1.5), ValueError, "from 0 to 1"),
        (lambda: T.ObservationNorm(0.0, 1.0), ValueError, "in_keys"),
        (lambda: T.ObservationNorm(0.0, None, ["a"]), ValueError, "both loc and scale"),
        (lambda: T.ObservationNorm(0.0, -1.0, ["a"]), ValueError, "scale must not be negative"),
        (
            lambda: T.ObservationNorm(torch.zeros(1), torch.zeros(1), ["a"], standard_normal=True),
            ValueError,
            "not contain 0",
        ),
        (lambda: T.RewardScaling(None, 1.0), TypeError, "loc must be a number"),
        (lambda: T.RewardScaling(0.0, "1"), TypeError, "scale must be a number"),
        (lambda: T.RewardScaling(0.0, torch.zeros(1), standard_normal=True), ValueError, "must not contain 0"),
        (lambda: T.VecNorm(["a"], decay=1.5), ValueError, "decay"),
        (lambda: T.VecNorm(["a"], eps=-1.0), ValueError, "eps"),
        (lambda: T.VecNorm(["a"], shapes=[[1], [2]]), ValueError, "shapes"),
        (lambda: T.VecNorm(["a"], shapes=[[1]], new_api=True), ValueError, "shapes"),
        (lambda: T.VecNorm(["a"], shared_td=TensorDict()), ValueError, "shared_td"),
        (lambda: T.VecNormV2(["a"], decay=float("nan")), ValueError, "decay"),
        (lambda: T.VecNormV2(["a"], shared_data=TensorDict()), ValueError, "shared_data"),
        (lambda: T.VecNormV2(["a"], stateful=False), ValueError, "stateful"),
    ],
)
def test_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()
