"""Normalizing beside an installed torchrl."""

import pytest
import torch
from tensordict import TensorDict

theirs = pytest.importorskip("torchrl.envs.transforms", reason="torchrl is not installed")

from interop import transforms as ours  # noqa: E402

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8]


def same(found, expected, **tolerance):
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in found.keys(True, True):
        torch.testing.assert_close(found[key], expected[key], **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("loc", [1.0, torch.tensor([1.0, -2.0, 0.5])], ids=["number", "tensor"])
def test_location_and_scale(dtype, standard, loc):
    scale = 3.0 if isinstance(loc, float) else torch.tensor([2.0, 0.5, 3.0])
    data = TensorDict({"reward": (torch.randn(4, 5, 3) * 50).abs().to(dtype)}, [4, 5])
    data["next"] = TensorDict({"reward": data["reward"].clone()}, [4, 5])
    keys = ["reward", ("next", "reward")]
    for name, options in (
        ("RewardScaling", {}),
        ("ObservationNorm", {"in_keys_inv": keys}),
        ("ObservationNorm", {"out_keys": ["a", ("next", "b")], "in_keys_inv": ["a"], "out_keys_inv": ["reward"]}),
    ):
        pair = [
            getattr(each, name)(loc=loc, scale=scale, in_keys=keys, standard_normal=standard, **options)
            for each in (ours, theirs)
        ]
        same(*(each(data.clone()) for each in pair))
        if name == "ObservationNorm":
            same(*(each.inv(data.clone()) for each in pair))
        if isinstance(loc, float):
            assert repr(pair[0]) == repr(pair[1])


@pytest.mark.filterwarnings("ignore:This class is to be deprecated:FutureWarning")
@pytest.mark.parametrize("decay", [1.0, 0.9999, 0.5])
@pytest.mark.parametrize("eps", [1e-4, 0.3])
def test_the_older_running_form(decay, eps):
    keys = ["observation", ("next", "reward")]
    pair = [
        each.VecNorm(in_keys=keys, out_keys=["o", "r"], decay=decay, eps=eps, new_api=False) for each in (ours, theirs)
    ]
    for batch in ((8,), (3, 4), (1,), (5,)):
        data = TensorDict({"observation": torch.randn(*batch, 3) * 2 + 1}, batch)
        data["next"] = TensorDict({"reward": torch.randn(*batch, 1)}, batch)
        same(*(each(data.clone()) for each in pair), rtol=1e-3, atol=1e-4)
    for each in pair:
        each.freeze()
    data["observation"] += 7
    normed = [each(data.clone()) for each in pair]
    same(*normed, rtol=1e-3, atol=1e-4)
    same(*(each.denorm(given) for each, given in zip(pair, normed, strict=True)), rtol=1e-3, atol=1e-3)
    fixed = [each.to_observation_norm() for each in pair]
    same(*(each(data.clone()) for each in fixed), rtol=1e-3, atol=1e-4)
    for key in keys:
        for name in ("loc", "scale"):
            found, expected = (getattr(each, name)[key] for each in pair)
            torch.testing.assert_close(found, expected.reshape(found.shape), rtol=1e-3, atol=1e-5)
    assert repr(pair[0]) == repr(pair[1])


@pytest.mark.parametrize("reduced", [False, True])
def test_the_newer_running_form_that_forgets_nothing(reduced):
    pair = [each.VecNormV2(in_keys=["observation"], decay=1.0, reduce_batch_dims=reduced) for each in (ours, theirs)]
    for batch in (4, 4, 4) if not reduced else (4, 1, 7):
        data = TensorDict({"observation": torch.randn(batch, 3) * 2 + 1}, [batch])
        found, expected = pair[0](data.clone()), pair[1]._step(data.clone(), data.clone())
    same(found, expected, rtol=1e-3, atol=1e-3)
    for name in ("loc", "scale"):
        same(getattr(pair[0], name), getattr(pair[1], name), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reduced", [False, True])
def test_the_mean_of_the_newer_running_form_that_forgets(reduced):
    # Its variance is not compared: theirs subtracts the square of a mean that is not corrected yet for the first steps.
    pair = [each.VecNormV2(in_keys=["observation"], decay=0.9, reduce_batch_dims=reduced) for each in (ours, theirs)]
    for _ in range(3):
        data = TensorDict({"observation": torch.randn(4, 3) * 2 + 1}, [4])
        pair[0](data.clone())
        pair[1]._step(data.clone(), data.clone())
        same(pair[0].loc, pair[1].loc, rtol=1e-3, atol=1e-4)
