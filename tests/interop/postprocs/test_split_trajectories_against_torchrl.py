"""Trajectories as rows, here and in TorchRL: the same entries."""

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from interop.postprocs import split_trajectories

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl", reason="TorchRL is not installed")
    from torchrl.collectors.utils import split_trajectories as theirs

pytestmark = pytest.mark.filterwarnings("ignore")


def data_of(shape: tuple[int, ...], seed: int, collector: bool, ids: bool) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    done = torch.rand((*shape, 1), generator=generator) < 0.3
    below = {"obs": torch.rand((*shape, 3), generator=generator), "done": done, "reward": done.double()}
    data = TensorDict(
        {"obs": below["obs"] + 1, "action": torch.arange(done.numel()).reshape(shape), "next": below}, shape
    )
    if collector:
        data["collector"] = TensorDict({"x": done.int()}, shape)
    if ids:
        begins = torch.ones_like(done[..., 0])
        begins[..., 1:] = done[..., :-1, 0]
        data["collector", "traj_ids"] = begins.reshape(-1).cumsum(0).reshape(shape) + 10
    return data


def _mask(collector: bool) -> tuple[str, ...]:
    return ("collector", "mask") if collector else ("mask",)


@pytest.mark.parametrize("shape", [(1,), (10,), (30,), (3, 8)])
@pytest.mark.parametrize(("collector", "ids"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"as_nested": True},
        {"prefix": "meta"},
        {"trajectory_key": ("meta", "ids")},
        {"prefix": "p", "trajectory_key": "i"},
    ],
)
def test_the_same(shape: tuple[int, ...], collector: bool, ids: bool, options: dict[str, Any]) -> None:
    for seed in range(3):
        data = data_of(shape, seed, collector, ids)
        if options.get("as_nested") and bool((split_trajectories(data).get(_mask(collector))).all()):
            continue  # then they pad nothing, and make nothing nested
        mine, other = split_trajectories(data, **options), theirs(data, **options)
        assert mine.batch_size == other.batch_size
        assert set(mine.keys(True, True)) == set(other.keys(True, True))
        for key in mine.keys(True, True):
            one, another = mine.get(key), other.get(key)
            if not one.is_nested:
                one, another = one[None], another[None]
            for each, expected in zip(one.unbind(0), another.unbind(0), strict=True):
                torch.testing.assert_close(each, expected, rtol=0, atol=0)
