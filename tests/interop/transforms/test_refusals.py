"""Arguments and data that transforms refuse: by name, and nothing changes."""

import pytest
import torch
from tensordict import TensorDict

from interop import transforms as T  # noqa: N812


def data():
    return TensorDict(
        {
            "a": torch.ones(4, 2),
            "b": torch.zeros(4, 3),
            "flat": torch.ones(4),
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
        (T.RewardClipping(0.0, 1.0, ["complex"]), NotImplementedError, "RewardClipping: 'complex'"),
        (T.RewardClipping(torch.zeros(3), None, ["flat"]), RuntimeError, "'flat' of shape"),
        (T.RewardClipping(torch.zeros(4, 4), None, ["flat"]), ValueError, "'flat' .* result would be of shape .4, 4."),
        (T.BinarizeReward(["flat"]), ValueError, r"'flat' .*rewards must be \[\.\.\., 1\]"),
        (T.SignTransform(["n"]), TypeError, "'n' must be a tensor"),
        (T.DiscreteActionProjection(1, 2, "b"), ValueError, "'b' .*one-hot actions of at most 2"),
        (T.ToTensorImage(in_keys=["pixels", "a"]), ValueError, r"'a' of shape \[4, 2\]: images have three dims"),
        (T.GrayScale(), ValueError, "'pixels' .*images need 3 channels"),
        (T.FlattenObservation(-4, -1), ValueError, "'pixels' .*4 dims are needed behind 1 batch dims"),
        (T.FlattenObservation(0, 1, allow_positive_dim=True), ValueError, "'pixels' would be of shape .8, 3, 5."),
        (T.PermuteTransform((-1, -2), in_keys=["square"]), ValueError, "'square' .*2 dims are needed"),
        (T.ExpandAs("a", "b"), RuntimeError, "'a' of shape"),
        (T.ExpandAs("a", "gone"), KeyError, "'gone' not found"),
        (T.CatTensors(["a", "flat"], "c"), ValueError, r"'flat' \[4\] do not fit along dim -1"),
        (T.CatTensors(["a", ("n", "a")], "c", dim=0), ValueError, "'c' would be of shape .8, 2. in a tensordict"),
        (T.CatTensors(["a", "n"]), TypeError, "'n' must be a tensor"),
        (T.CatTensors(["a", ("locked", "a")]), RuntimeError, "locked"),
        (T.CatTensors(["a"], ("n", "a", "x")), KeyError, "'a' is no tensordict but a Tensor"),
        (T.Stack(["a", "n"], "c"), ValueError, "do not fit along dim -1"),
        (T.Stack(["a", ("n", "a")], "c", dim=-3), ValueError, "batch dims have to stay"),
        (T.Stack(["a", "gone"], "c"), KeyError, "'gone' not found"),
        (T.RenameTransform(["b"], [("wide", "x")]), ValueError, r"\[4, 3\] in a tensordict of batch size \[4, 2\]"),
        (T.RenameTransform(["a", ("locked", "a")], ["c", "d"]), RuntimeError, "locked"),
        (T.FlattenTensorDict(), TypeError, None),
    ],
)
def test_reading(transform, error, text):
    if text is None:
        with pytest.raises(error, match="tensordict, got dict"):
            transform({"a": 1})
        return
    given = data()
    with pytest.raises(error, match=text):
        transform(given)
    assert set(given.keys(True)) == set(data().keys(True))
    assert all(torch.equal(given[key], data()[key]) for key in data().keys(True, True) if key != "text")


@pytest.mark.parametrize(
    ("transform", "error", "text"),
    [
        (T.DiscreteActionProjection(1, 5, "b"), ValueError, "'b' .*one-hot actions of 5 places"),
        (T.PermuteTransform((-1, -2), in_keys_inv=["a"]), ValueError, "2 dims are needed"),
        (T.Stack(["p", "q"], "b", "b", ["p", "q"]), ValueError, r"'b' of shape \[4, 3\] has no dim -1 of size 2"),
        (T.ClipTransform(in_keys_inv=["gone"], low=0), KeyError, "'gone' not found"),
    ],
)
def test_writing(transform, error, text):
    with pytest.raises(error, match=text):
        transform.inv(data())


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: T.RewardClipping(), ValueError, "clamp_min, clamp_max or both"),
        (lambda: T.RewardClipping(1, -1), ValueError, "must not be above"),
        (lambda: T.RewardClipping(torch.tensor([0.0, float("nan")]), 1.0), ValueError, "clamp_min must be a number"),
        (lambda: T.RewardClipping(True, 1), TypeError, "clamp_min must be a number"),
        (lambda: T.ClipTransform(["a"]), TypeError, "low, high or both"),
        (lambda: T.ClipTransform(["a"], low=1.0, high=1.0), ValueError, "low must be below high"),
        (lambda: T.ClipTransform(["a"], low=torch.ones(2)), TypeError, "low must be one number"),
        (lambda: T.DiscreteActionProjection(4, 3), ValueError, "num_actions_effective"),
        (lambda: T.UnaryTransform(["a"], ["a"], fn=None), TypeError, "fn must be callable"),
        (lambda: T.DoubleToFloat(out_keys=["a"]), ValueError, "out_keys without in_keys"),
        (lambda: T.DTypeCastTransform("float64", torch.float32), TypeError, "dtype_in"),
        (lambda: T.ToTensorImage(dtype=torch.uint8), ValueError, "from_int=False"),
        (lambda: T.Resize((3, 4), 5), ValueError, "two sizes"),
        (lambda: T.Resize(3, interpolation="lanczos"), ValueError, "interpolation must be one of"),
        (lambda: T.Resize(0), ValueError, "w must be at least 1"),
        (lambda: T.FlattenObservation(0, -1), ValueError, "first_dim must be negative"),
        (lambda: T.FlattenObservation(-1, -2), ValueError, "not be behind"),
        (lambda: T.UnsqueezeTransform(0, in_keys=["a"]), RuntimeError, "dim must be negative"),
        (lambda: T.PermuteTransform((-1, -1)), ValueError, "dims must be a permutation"),
        (lambda: T.CatTensors(), ValueError, "at least one"),
        (lambda: T.CatTensors(["a"], ["b"]), TypeError, "out_key must be one key"),
        (lambda: T.Stack(["a"], "c", dim=1), ValueError, "allow_positive_dim=True"),
        (lambda: T.Stack(["a"], "c", "d"), ValueError, "both of in_key_inv and out_keys_inv"),
        (lambda: T.RenameTransform(["a"], ["b"], ["i"]), ValueError, "as many"),
        (lambda: T.RenameTransform(["a", "b"], ["b", "c"]), ValueError, "swap names with two transforms"),
        (lambda: T.SelectTransform(["a", "b"]), TypeError, "each argument must be a key"),
        (lambda: T.RandomCropTensorDict(0), ValueError, "sub_seq_len must be at least 1"),
        (lambda: T.RandomCropTensorDict(1, generator=0), TypeError, "generator must be"),
        (lambda: T.CatFrames(2.5, -1), TypeError, "N must be an int"),
        (lambda: T.CatFrames(3, 1), ValueError, "dim must be negative"),
        (lambda: T.CatFrames(3, -1, padding="zeros"), ValueError, "'same' or 'constant', got 'zeros'"),
        (lambda: T.CatFrames(3, -1, out_keys=["a", "b"]), ValueError, "as many"),
        (lambda: T.BurnInTransform([torch.nn.Linear(1, 1)], 2), TypeError, "TensorDictModules, got a Linear"),
        (lambda: T.MultiStepTransform(0, 0.9), ValueError, "n_steps"),
        (lambda: T.Reward2GoTransform(1.5), ValueError, "from 0 to 1"),
        (lambda: T.ObservationNorm(0.0, 1.0), ValueError, "in_keys"),
        (lambda: T.ObservationNorm(0.0, None, ["a"]), TypeError, "scale must be a number"),
        (lambda: T.ObservationNorm(0.0, -1.0, ["a"]), ValueError, "scale must not be negative"),
        (lambda: T.RewardScaling(0.0, torch.zeros(1), standard_normal=True), ValueError, "must not contain 0"),
        (lambda: T.VecNorm(["a"], decay=1.5), ValueError, "decay"),
        (lambda: T.VecNormV2(["a"], eps=-1.0), ValueError, "eps"),
    ],
)
def test_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()
