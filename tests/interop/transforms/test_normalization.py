"""Normalizing by a fixed location and scale, and by running statistics, against NumPy."""

import copy
import io
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointMismatch
from interop import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from interop.transforms import Compose, ObservationNorm, RewardScaling, VecNorm, VecNormV2
from tests.interop.test_threads import together

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def td(values):
    return TensorDict({"obs": values}, values.shape[:1])


@pytest.mark.parametrize("standard", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 1, 2, 4, 5), (5,)])
def test_numbers_follow_the_memory_order_of_images(shape, standard):
    channels_last = normal(6, 3, 4, 5, 2).movedim(-1, -3)
    loc, scale = normal(*shape, seed=1), normal(*shape, seed=2).abs() + 1
    norm = ObservationNorm(loc, scale, ["obs"], in_keys_inv=["obs"], standard_normal=standard)
    for values in (channels_last, channels_last[:1].expand(6, 3, 2, 4, 5)):
        found = norm(td(values))["obs"]
        assert torch.equal(found, (values - loc) / scale if standard else values * scale + loc)
        torch.testing.assert_close(norm.inv(td(found))["obs"], values, rtol=1e-4, atol=1e-4)
    assert norm(td(channels_last))["obs"].stride() == channels_last.stride()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("standard", [False, True])
def test_values_are_moved_and_scaled(dtype, standard):
    values = torch.arange(6).reshape(3, 2).to(dtype)
    expected = (values.double() - 1) / 2 if standard else values.double() * 2 + 1
    data = TensorDict({"reward": values, "obs": values}, [3])
    norm = ObservationNorm(1, 2, ["obs"], in_keys_inv=["obs"], standard_normal=standard)
    found = RewardScaling(1.0, 2.0, standard_normal=standard)(norm(data.copy()))
    for key in ("reward", "obs"):
        assert found[key].dtype == (dtype if dtype.is_floating_point else torch.float32)
        torch.testing.assert_close(found[key].double(), expected)
    torch.testing.assert_close(norm.inv(found)["obs"].double(), values.double())


def test_tensors_fit_the_last_dims():
    for wrong in (torch.ones(3), torch.ones(5, 2, 3, 4)):
        with pytest.raises(RuntimeError, match="ObservationNorm: 'obs' of shape"):
            ObservationNorm(wrong, torch.ones(1), ["obs"])(td(normal(2, 3, 4)))
    assert ObservationNorm(0.0, 0.0, ["obs"]).scale > 0 and ObservationNorm(0.0, -torch.ones(1), ["obs"]).scale < 0


def test_repr_and_state():
    assert repr(RewardScaling(1.0, 2.0)) == "RewardScaling(loc=1.0000, scale=2.0000, keys=['reward'])"
    assert repr(RewardScaling(torch.zeros(2), 2.0)) == "RewardScaling(keys=['reward'])"
    assert set(RewardScaling(1.0, 2.0).state_dict()) == {"loc", "scale", "standard_normal"}
    other = RewardScaling(0.0, 1.0)
    other.load_state_dict(RewardScaling(1.0, 2.0, standard_normal=True).state_dict())
    assert other(TensorDict({"reward": torch.tensor([3.0])}, [1]))["reward"] == 1.0


def weighted(batches, weights):
    """Mean and variance of rows of batches that each count for a weight."""
    rows = np.concatenate([batch.double().numpy() for batch in batches])
    counts = np.concatenate([np.full(len(batch), weight) for batch, weight in zip(batches, weights, strict=True)])
    mean = np.average(rows, axis=0, weights=counts)
    return mean, np.average((rows - mean) ** 2, axis=0, weights=counts)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 1e3, -1e5]),
)
def test_running_statistics_are_weighted_means_of_all_that_came(sizes, decay, offset):
    batches = [normal(size, 3, seed=i, dtype=torch.float64) + offset for i, size in enumerate(sizes)]
    first, second = VecNorm(["obs"], decay=decay), VecNormV2(["obs"], decay=decay, reduce_batch_dims=True)
    for batch in batches:
        first.update(td(batch))
        second.update(td(batch))
    real = [i for i, size in enumerate(sizes) if size]
    after = np.cumsum(sizes[::-1])[::-1] - sizes
    by_call = [decay ** sum(j > i for j in real) for i in range(len(sizes))]
    by_value = [
        1.0 if decay == 1 else decay ** after[i] * (1 - decay**size) / max(size, 1) for i, size in enumerate(sizes)
    ]
    probe = normal(4, 3, seed=99, dtype=torch.float64) + offset
    for norm, weights, spread in (
        (first, by_call, lambda variance: np.sqrt(np.maximum(variance, 1e-4))),
        (second, by_value, lambda variance: np.maximum(np.sqrt(variance), 1e-4)),
    ):
        mean, variance = weighted(batches, weights)
        found = norm.eval()(td(probe))["obs"].numpy()
        np.testing.assert_allclose(found, (probe.numpy() - mean) / spread(variance), rtol=1e-6, atol=1e-5)


def test_float32_with_a_large_mean_keeps_its_variance():
    values, norm = normal(4000, 2) * 0.5 + 4096.0, VecNorm(["obs"], decay=1.0)
    for part in values.split(16):
        norm.update(td(part))
    out = norm.eval()(td(values))["obs"]
    torch.testing.assert_close(out.std(0), torch.ones(2), rtol=1e-3, atol=0)
    torch.testing.assert_close(out.mean(0), torch.zeros(2), rtol=0, atol=1e-3)


def test_modes_outside_of_buffers():
    norm = VecNorm(["obs"], ["normed"], decay=1.0)
    with pytest.raises(RuntimeError, match="no statistics of 'obs' yet"):
        norm.eval()(td(normal(4, 3)))
    norm.train()(td(normal(4, 3)))
    before = norm.loc["obs"]
    assert set(norm.eval()(td(normal(4, 3, seed=1))).keys()) == {"obs", "normed"}
    norm.train().freeze()(td(normal(4, 3, seed=1)))
    assert torch.equal(norm.loc["obs"], before)
    norm.unfreeze()(td(normal(4, 3, seed=1)))
    assert not torch.equal(norm.loc["obs"], before)
    frozen = norm.clone().freeze()
    kept = frozen.loc["obs"]
    norm.update(td(normal(4, 3, seed=2)))
    frozen.inv(td(normal(4, 3, seed=2)))
    assert frozen.frozen and torch.equal(frozen.loc["obs"], kept) and not norm.frozen


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_buffer_counts_what_is_written_and_not_what_is_read(kind):
    norm, values = VecNorm(["obs"], decay=1.0), normal(10, 3) * 5 + 2
    rb = kind(storage=LazyTensorStorage(10), transform=norm, batch_size=8)
    rb.extend(td(values[:4]))
    for i in range(4, 10):
        rb.add(td(values[i : i + 1])[0])
    assert torch.equal(rb.storage[:]["obs"], values)
    rb.sample()
    expected = (values - values.mean(0)) / values.std(0, correction=0)
    torch.testing.assert_close(rb[:]["obs"], expected, rtol=1e-4, atol=1e-5)
    norm.freeze()
    rb.extend(td(values + 100))
    torch.testing.assert_close(norm.loc["obs"], values.mean(0))


def test_a_write_that_fails_counts_for_nothing():
    norm, x = VecNorm(["obs"]), torch.ones(4)
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=norm)
    rb.extend(TensorDict({"obs": normal(4, 3), "x": x}, [4]))
    before, bad = pickle.dumps(norm.get_extra_state()), normal(4, 3)
    bad[1, 1] = float("inf")
    for wrong, error, text in (
        ({"obs": normal(4, 3)}, KeyError, "x"),
        ({"obs": normal(4, 3), "x": torch.ones(4, 7)}, (ValueError, RuntimeError), "x"),
        ({"obs": bad, "x": x}, ValueError, "'obs' has infinities or NaNs"),
        ({"obs": normal(4, 2), "x": x}, ValueError, r"'obs' has values of shape \[2\]"),
        ({"x": x}, KeyError, "'obs' not found"),
        ({"obs": "text", "x": x}, TypeError, "'obs': a tensor"),
    ):
        with pytest.raises(error, match=text):
            rb.extend(TensorDict(wrong, [4]))
        assert pickle.dumps(norm.get_extra_state()) == before and len(rb) == 4


def rows(seed):
    return TensorDict({"obs": normal(6, 3, seed=seed), "next": {"obs": normal(6, 3, seed=seed + 9)}}, [6])


def test_a_resumed_buffer_goes_on_exactly(tmp_path):
    def buffer():
        norm = VecNorm(["obs", ("next", "obs")], decay=0.9)
        return ReplayBuffer(storage=LazyTensorStorage(20), transform=Compose(RewardScaling(1.0, 2.0, ["obs"]), norm))

    rb, loaded, stated = buffer(), buffer(), buffer()
    empty = rb.transform.state_dict()
    rb.extend(rows(0))
    rb.dumps(tmp_path)
    loaded.loads(tmp_path)
    stated.load_state_dict(rb.state_dict())
    others = [loaded, stated, copy.deepcopy(rb), pickle.loads(pickle.dumps(rb))]
    for each in (rb, *others):
        each.extend(rows(2))
    for each in others:
        for key in ("obs", ("next", "obs")):
            assert torch.equal(each[:][key], rb[:][key])
    file = io.BytesIO()
    torch.save(rb.transform.state_dict(), file)
    file.seek(0)
    again = buffer().transform
    again.load_state_dict(torch.load(file, weights_only=True))
    assert str(again.state_dict()) == str(rb.transform.state_dict())
    again.load_state_dict(empty)
    assert str(again.state_dict()) == str(empty)
    chain = Compose(RewardScaling(1.0, 2.0, ["obs"]), VecNorm(["other"]))
    with pytest.raises(CheckpointMismatch):
        ReplayBuffer(storage=LazyTensorStorage(20), transform=chain).loads(tmp_path)


def test_a_state_that_does_not_fit_is_refused():
    norm = VecNorm(["obs"])
    norm.update(td(normal(4, 3)))
    fields, wide = norm.get_extra_state()["'obs'"], torch.ones(2).double()
    for wrong in (
        {"'x'": fields},
        {"'obs'": {**fields, "mean": fields["mean"].float()}},
        {"'obs'": {**fields, "mean": wide}},
        {"'obs'": {**fields, "mean": wide, "squares": wide}},
    ):
        with pytest.raises(ValueError, match="statistics"):
            norm.set_extra_state(wrong)
    assert torch.equal(norm.get_extra_state()["'obs'"]["mean"], fields["mean"])


def test_other_forms():
    norm = VecNorm(["obs", "x"], ["obs", "y"])
    data = TensorDict({"obs": normal(30, 2) + 5, "x": normal(30, 1, seed=3) * 7}, [30])
    norm.update(data)
    expected, found = norm.eval()(data.copy()), norm.to_observation_norm()(data.copy())
    for key in ("obs", "y"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)
    each = VecNormV2(["obs"], decay=1.0)
    each(td(normal(4, 3)))
    assert torch.equal(each.loc["obs"], normal(4, 3))
    with pytest.raises(ValueError, match="values of shape"):
        each(td(normal(2, 3)))


def test_threads_lose_no_update():
    norm, batches = VecNorm(["obs"], decay=1.0), [normal(3, 2, seed=i) for i in range(80)]

    def update(some):
        for each in some:
            norm.update(td(each))

    assert together(*(partial(update, batches[i::4]) for i in range(4))) == []
    assert norm.get_extra_state()["'obs'"]["weight"] == 240
    torch.testing.assert_close(norm.loc["obs"], torch.cat(batches).mean(0))


@pytest.mark.parametrize("kind", [VecNorm, VecNormV2])
def test_a_fixed_transform_needs_statistics_of_every_entry(kind):
    norm = kind(["obs", "x"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"has no statistics of 'obs' yet: write data"):
            norm.to_observation_norm()
        norm.update(TensorDict({"obs": torch.zeros(0, 3), "x": torch.zeros(0)}, [0]))  # no values, no statistics
    norm.set_missing_tolerance(True)
    norm.update(TensorDict({"obs": normal(9, 2)}, [9]))
    assert norm.to_observation_norm().in_keys == ["obs"]
    norm.set_missing_tolerance(False)
    with pytest.raises(RuntimeError, match=r"has no statistics of 'x' yet"):
        norm.to_observation_norm()


def test_by_default_one_of_the_entries_is_enough():
    norm = VecNorm()
    with pytest.raises(RuntimeError, match=r"has no statistics of 'observation' yet"):
        norm.to_observation_norm()
    norm.update(TensorDict({"reward": normal(9, 1)}, [9]))
    assert norm.to_observation_norm().in_keys == ["reward"]
