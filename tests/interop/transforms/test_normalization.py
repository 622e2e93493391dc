"""Normalizing by a fixed location and scale."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointMismatch
from interop import LazyTensorStorage, ListStorage, ReplayBuffer
from interop.transforms import Compose, ObservationNorm, RewardScaling, ToTensorImage


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def observations(values, *batch):
    return TensorDict({"obs": values}, batch or [values.shape[0]])


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 1, 1), (1, 1, 2, 4, 5), (4, 1), (5,)])
def test_numbers_follow_the_memory_order_of_images(shape, standard):
    channels_last = normal(6, 3, 4, 5, 2).movedim(-1, -3)
    loc, scale = normal(*shape, seed=1), normal(*shape, seed=2).abs() + 1
    norm = ObservationNorm(loc, scale, ["obs"], in_keys_inv=["obs"], standard_normal=standard)
    for values in (channels_last, channels_last[..., 1:, ::2].mT.mT[:, :2], channels_last[:1].expand(6, 3, 2, 4, 5)):
        if shape[-1] not in (1, values.shape[-1]) or (len(shape) > 1 and shape[-2] not in (1, values.shape[-2])):
            continue
        found = norm(observations(values))["obs"]
        expected = (values - loc) / scale if standard else values * scale + loc
        assert torch.equal(found, expected)
        torch.testing.assert_close(norm.inv(observations(found))["obs"], values, rtol=1e-4, atol=1e-4)
    assert norm(observations(channels_last))["obs"].stride() == channels_last.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("standard", [False, True])
def test_values_are_moved_and_scaled(dtype, standard):
    values = torch.arange(6).reshape(3, 2).to(dtype)
    wide = values.double()
    expected = (wide - 1) / 2 if standard else wide * 2 + 1
    floating = dtype if dtype.is_floating_point else torch.float32
    data = TensorDict({"reward": values, "obs": values}, [3])
    rewards = RewardScaling(1.0, 2.0, standard_normal=standard)(data.copy())["reward"]
    norm = ObservationNorm(1, 2, ["obs"], in_keys_inv=["obs"], standard_normal=standard)
    found = norm(data.copy())
    for each in (rewards, found["obs"]):
        assert each.dtype == floating
        torch.testing.assert_close(each.double(), expected)
    torch.testing.assert_close(norm.inv(found)["obs"].double(), wide)
    assert norm.inv(found)["obs"] is not found["obs"]


def test_tensors_fit_the_last_dims():
    data = TensorDict({"obs": normal(2, 3, 4), "next": {"obs": normal(2, 3, 4, seed=1)}}, [2, 3])
    loc, scale = normal(4, seed=2), normal(4, seed=3).abs() + 1
    norm = ObservationNorm(loc, scale, ["obs", ("next", "obs")], standard_normal=True)
    out = norm(data.copy())
    torch.testing.assert_close(out["next", "obs"], (data["next", "obs"] - loc) / scale)
    assert norm.initialized
    for wrong in (torch.ones(3), torch.ones(5, 2, 3, 4)):
        with pytest.raises(ValueError, match=r"ObservationNorm: 'obs': loc of shape"):
            ObservationNorm(wrong, 1.0 if wrong.ndim > 1 else wrong, ["obs"])(data.copy())
        with pytest.raises(ValueError, match=r"RewardScaling: 'obs': scale of shape"):
            RewardScaling(0.0, wrong, ["obs"])(data.copy())


def test_what_is_refused_at_construction():
    with pytest.raises(ValueError, match="in_keys"):
        ObservationNorm(0.0, 1.0)
    with pytest.raises(ValueError, match="must not contain 0"):
        ObservationNorm(torch.zeros(2), torch.tensor([1.0, 0.0]), ["obs"], standard_normal=True)
    with pytest.raises(ValueError, match="scale must not be negative"):
        ObservationNorm(0.0, -1.0, ["obs"])
    assert ObservationNorm(0.0, 0.0, ["obs"]).scale > 0 and ObservationNorm(0.0, -torch.ones(1), ["obs"]).scale < 0
    with pytest.raises(ValueError, match="both loc and scale"):
        ObservationNorm(0.0, None, ["obs"])
    with pytest.raises(TypeError, match="loc must be a number"):
        RewardScaling(None, 1.0)
    with pytest.raises(TypeError, match="scale must be a number"):
        RewardScaling(0.0, "1")
    with pytest.raises(ValueError, match="must not contain 0"):
        RewardScaling(0.0, torch.tensor([1.0, 0.0]), standard_normal=True)


def test_repr_and_state():
    assert repr(RewardScaling(1.0, 2.0)) == "RewardScaling(loc=1.0000, scale=2.0000, keys=['reward'])"
    assert repr(RewardScaling(torch.zeros(2), 2.0)) == "RewardScaling(keys=['reward'])"
    assert repr(ObservationNorm(1.0, 2.0, ["obs"])) == "ObservationNorm(loc=1.0000, scale=2.0000, keys=['obs'])"
    assert repr(ObservationNorm(in_keys=["obs"])) == "ObservationNorm(keys=['obs'])"
    assert set(RewardScaling(1.0, 2.0).state_dict()) == {"loc", "scale", "standard_normal"}
    other = RewardScaling(0.0, 1.0)
    other.load_state_dict(RewardScaling(1.0, 2.0, standard_normal=True).state_dict())
    assert other(TensorDict({"reward": torch.tensor([3.0])}, [1]))["reward"] == 1.0


@pytest.mark.parametrize("standard", [False, True])
def test_statistics_make_data_standard_normal(standard):
    values = normal(500, 3) * torch.tensor([1.0, 10.0, 0.1]) + torch.tensor([0.0, 100.0, -5.0])
    norm = ObservationNorm(in_keys=["obs"], standard_normal=standard)
    norm.init_stats(observations(values))
    out = norm(observations(values))["obs"]
    torch.testing.assert_close(out.mean(0), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(out.std(0), torch.ones(3), rtol=0, atol=1e-4)
    assert norm.loc.dtype == torch.float32
    with pytest.raises(RuntimeError, match="there already"):
        norm.init_stats(observations(values))


@pytest.mark.parametrize(
    ("reduce", "cat", "keep", "shape"),
    [(0, None, None, (4, 5)), ((0, 1), 0, None, (5,)), ((0, -1), 0, -1, (4, 1)), ((-3, 2), -3, (2, 0), (1, 4, 1))],
)
def test_dims_are_as_given(reduce, cat, keep, shape):
    values = normal(20, 4, 5) * 3 + 2
    norm = ObservationNorm(in_keys=["obs"], standard_normal=True)
    norm.init_stats(
        [observations(values[:7]), observations(values[7:8]), observations(values[8:])], reduce, cat, None, keep
    )
    wide, axes = values.double().numpy(), (reduce,) if isinstance(reduce, int) else tuple(reduce)
    np.testing.assert_allclose(norm.loc.reshape(shape), wide.mean(axes).reshape(shape), atol=1e-5)
    np.testing.assert_allclose(norm.scale.reshape(shape), wide.std(axes, ddof=1).reshape(shape), atol=1e-5)
    assert norm.loc.shape == norm.scale.shape == shape


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("inside", [False, True])
def test_statistics_of_a_buffer_are_after_the_transforms_before(storage, inside):
    pixels = torch.randint(0, 256, (2500, 2, 2, 3), dtype=torch.uint8)
    norm = ObservationNorm(in_keys=["pixels"], standard_normal=True)
    chain = Compose(ToTensorImage(), norm, lambda data: data.set("late", data["pixels"])) if inside else ToTensorImage()
    rb = ReplayBuffer(storage=storage(3000), transform=chain, batch_size=4)
    rb.extend(TensorDict({"pixels": pixels}, [2500]))
    if inside:
        with pytest.raises(RuntimeError, match="init_stats"):
            rb.sample()
    norm.init_stats(rb, reduce_dim=(0, 2, 3), cat_dim=0, keep_dims=(2, 3))
    wide = pixels.double().numpy() / 255
    np.testing.assert_allclose(norm.loc.numpy(), wide.mean((0, 1, 2)).reshape(3, 1, 1), atol=1e-6)
    np.testing.assert_allclose(norm.scale.numpy(), wide.std((0, 1, 2), ddof=1).reshape(3, 1, 1), atol=1e-6)
    if not inside:
        rb.append_transform(norm)
    assert rb[:]["pixels"].mean().abs() < 1e-4
    assert rb.sample()["pixels"].shape == (4, 3, 2, 2)


def test_what_init_stats_refuses_changes_nothing():
    norm = ObservationNorm(in_keys=["obs"])
    two = ObservationNorm(in_keys=["obs", "other"])
    good = observations(normal(4, 2))
    bad = normal(4, 2)
    bad[2, 1] = float("nan")
    for call, error, text in (
        (lambda: norm.init_stats(10), TypeError, "takes a tensordict, a buffer"),
        (lambda: norm.init_stats([torch.ones(3)]), TypeError, "takes tensordicts"),
        (lambda: norm.init_stats(TensorDict({"x": torch.ones(3)}, [3])), KeyError, "obs"),
        (lambda: norm.init_stats(TensorDict({"obs": "text"}, [])), TypeError, "obs"),
        (lambda: norm.init_stats(observations(bad)), ValueError, "'obs': infinities or NaNs"),
        (lambda: norm.init_stats(good[:1]), ValueError, "at least two"),
        (lambda: norm.init_stats([]), ValueError, "at least two"),
        (lambda: norm.init_stats([good, observations(normal(4, 3))]), ValueError, "different shapes"),
        (lambda: norm.init_stats(good, 2), ValueError, "out of range"),
        (lambda: norm.init_stats(good, (0, 1)), ValueError, "cat_dim"),
        (lambda: norm.init_stats(good, 0, 1), ValueError, "cat_dim"),
        (lambda: two.init_stats(good), ValueError, "key must say"),
    ):
        with pytest.raises(error, match=text):
            call()
        assert not norm.initialized
    with pytest.raises(RuntimeError, match="init_stats"):
        norm(good)
    two.init_stats(good, key="obs")
    assert two.initialized


def test_statistics_are_saved_and_loaded_where_there_are_none(tmp_path):
    def buffer():
        chain = Compose(ObservationNorm(in_keys=["obs"], standard_normal=True))
        return ReplayBuffer(storage=LazyTensorStorage(10), transform=chain)

    rb, other, third = buffer(), buffer(), buffer()
    rb.extend(observations(normal(10, 3) * 2 + 1))
    rb.dumps(tmp_path / "before")
    third.loads(tmp_path / "before")
    rb.transform[0].init_stats(rb)
    rb.dumps(tmp_path / "after")
    other.loads(tmp_path / "after")
    third.load_state_dict(rb.state_dict())
    for each in (other, third, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))):
        assert torch.equal(each[:]["obs"], rb[:]["obs"])
    file = io.BytesIO()
    torch.save(rb.transform.state_dict(), file)
    file.seek(0)
    fresh = Compose(ObservationNorm(in_keys=["obs"]))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh[0].loc, rb.transform[0].loc) and fresh[0].standard_normal
    wide = ReplayBuffer(storage=LazyTensorStorage(10), transform=ObservationNorm(torch.ones(4), torch.ones(4), ["obs"]))
    with pytest.raises(CheckpointMismatch, match="loc and scale are"):
        wide.loads(tmp_path / "after")
    with pytest.raises(ValueError, match="standard_normal, loc and scale"):
        wide.transform[0].set_extra_state({"loc": torch.ones(4)})
