"""Normalizing by running statistics, against sums over all that was written, in NumPy."""

import copy
import io
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from fbuf.checkpoint import CheckpointMismatch
from interop import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from interop.transforms import Compose, ObservationNorm, RewardScaling, VecNorm, VecNormV2


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def td(values):
    return TensorDict({"obs": values}, values.shape[:1])


def weighted(batches, weights):
    """Mean and variance of rows of batches that each count for a weight."""
    rows = np.concatenate([batch.double().numpy() for batch in batches])
    counts = np.concatenate([np.full(len(batch), weight) for batch, weight in zip(batches, weights, strict=True)])
    mean = np.average(rows, axis=0, weights=counts)
    return mean, np.average((rows - mean) ** 2, axis=0, weights=counts)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 1e3, -1e5]),
)
def test_statistics_are_weighted_means_of_all_that_came(sizes, decay, offset):
    batches = [normal(size, 3, seed=i, dtype=torch.float64) + offset for i, size in enumerate(sizes)]
    if not sum(sizes):
        return
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
        norm.eval()
        found = norm(td(probe))["obs"].numpy()
        np.testing.assert_allclose(found, (probe.numpy() - mean) / spread(variance), rtol=1e-6, atol=1e-5)
        assert norm.scale["obs"].dtype == norm.loc["obs"].dtype == torch.float32


def test_float32_with_a_large_mean_keeps_its_variance():
    values = normal(4000, 2) * 0.5 + 4096.0
    norm = VecNorm(["obs"], decay=1.0)
    for i in range(0, 4000, 16):
        norm.update(td(values[i : i + 16]))
    out = norm.eval()(td(values))["obs"]
    torch.testing.assert_close(out.std(0), torch.ones(2), rtol=1e-3, atol=0)
    torch.testing.assert_close(out.mean(0), torch.zeros(2), rtol=0, atol=1e-3)


def test_modes_outside_of_buffers():
    norm = VecNorm(["obs"], ["normed"], decay=1.0)
    with pytest.raises(RuntimeError, match="no statistics of 'obs' yet"):
        norm.eval()(td(normal(4, 3)))
    norm.train()(td(normal(4, 3)))
    before = norm.loc["obs"]
    out = norm.eval()(td(normal(4, 3, seed=1)))
    assert torch.equal(norm.loc["obs"], before) and set(out.keys()) == {"obs", "normed"}
    norm.train().freeze()(td(normal(4, 3, seed=1)))
    assert torch.equal(norm.loc["obs"], before)
    norm.unfreeze()(td(normal(4, 3, seed=1)))
    assert not torch.equal(norm.loc["obs"], before)
    frozen = norm.frozen_copy()
    kept = frozen.loc["obs"]
    norm.update(td(normal(4, 3, seed=2)))
    frozen.inv(td(normal(4, 3, seed=2)))
    assert frozen.frozen and torch.equal(frozen.loc["obs"], kept) and not norm.frozen
    with pytest.raises(RuntimeError, match="no statistics yet"):
        VecNorm(["obs"]).frozen_copy()


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_a_buffer_counts_what_is_written_and_not_what_is_read(kind):
    norm = VecNorm(["obs"], decay=1.0)
    rb = kind(storage=LazyTensorStorage(10), transform=norm, batch_size=8)
    values = normal(10, 3) * 5 + 2
    rb.extend(td(values[:4]))
    for i in range(4, 10):
        rb.add(td(values[i : i + 1])[0])
    assert torch.equal(rb.storage[:]["obs"], values)
    for _ in range(3):
        rb.sample()
        found = rb[:]["obs"]
    expected = (values - values.mean(0)) / values.std(0, correction=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    norm.freeze()
    rb.extend(td(values + 100))
    torch.testing.assert_close(norm.loc["obs"], values.mean(0))


def test_a_write_that_fails_counts_for_nothing():
    norm = VecNorm(["obs"])
    rb = ReplayBuffer(storage=LazyTensorStorage(10), transform=norm)
    rb.extend(TensorDict({"obs": normal(4, 3), "x": torch.ones(4)}, [4]))
    before = pickle.dumps(norm.get_extra_state())
    for wrong in (td(normal(4, 3)), TensorDict({"obs": normal(4, 3), "x": torch.ones(4, 7)}, [4])):
        with pytest.raises((KeyError, ValueError, RuntimeError)):
            rb.extend(wrong)
        assert pickle.dumps(norm.get_extra_state()) == before and len(rb) == 4
    bad = normal(4, 3)
    bad[1, 1] = float("inf")
    for wrong, error, text in (
        (TensorDict({"obs": bad, "x": torch.ones(4)}, [4]), ValueError, "'obs' has infinities or NaNs"),
        (TensorDict({"obs": normal(4, 2), "x": torch.ones(4)}, [4]), ValueError, r"'obs' has values of shape \[2\]"),
        (TensorDict({"x": torch.ones(4)}, [4]), KeyError, "'obs' not found"),
        (TensorDict({"obs": "text", "x": torch.ones(4)}, [4]), TypeError, "'obs': a tensor"),
    ):
        with pytest.raises(error, match=text):
            rb.extend(wrong)
        assert pickle.dumps(norm.get_extra_state()) == before and len(rb) == 4


def test_a_resumed_buffer_goes_on_exactly(tmp_path):
    def buffer():
        chain = Compose(RewardScaling(1.0, 2.0, ["obs"]), VecNorm(["obs", ("next", "obs")], decay=0.9))
        return ReplayBuffer(storage=LazyTensorStorage(20), transform=chain)

    def rows(seed):
        return TensorDict({"obs": normal(6, 3, seed=seed), "next": {"obs": normal(6, 3, seed=seed + 9)}}, [6])

    rb, loaded, stated = buffer(), buffer(), buffer()
    rb.extend(rows(0))
    rb.extend(rows(1))
    rb.dumps(tmp_path / "saved")
    loaded.loads(tmp_path / "saved")
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
    assert torch.equal(again[1].loc["obs"], rb.transform[1].loc["obs"])
    rb.transform.load_state_dict(buffer().transform.state_dict())
    assert rb.transform[1].get_extra_state() == {}
    other = ReplayBuffer(storage=LazyTensorStorage(20), transform=Compose(lambda data: data, VecNorm(["other"])))
    with pytest.raises(CheckpointMismatch):
        other.loads(tmp_path / "saved")


def test_a_state_that_does_not_fit_is_refused():
    norm = VecNorm(["obs"])
    norm.update(td(normal(4, 3)))
    state = norm.get_extra_state()
    fields = state["'obs'"]
    for wrong in (
        None,
        {"'x'": fields},
        {"'obs'": {"mean": fields["mean"]}},
        {"'obs'": {**fields, "mean": fields["mean"].float()}},
        {"'obs'": {**fields, "mean": torch.ones(2).double()}},
        {"'obs'": {name: torch.ones(5, dtype=torch.float64) for name in fields}},
        {"'obs'": {**fields, "mean": torch.ones(2).double(), "squares": torch.ones(2).double()}},
    ):
        with pytest.raises(ValueError, match="statistics"):
            norm.set_extra_state(wrong)
    assert torch.equal(norm.get_extra_state()["'obs'"]["mean"], fields["mean"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8])
@pytest.mark.parametrize("norm", [VecNorm(["obs"]), VecNormV2(["obs"], reduce_batch_dims=True, decay=1.0)], ids=repr)
def test_what_was_normalized_comes_back(norm, dtype):
    values = (normal(50, 2) * 20 + 60).to(dtype)
    norm = norm.clone()
    norm.update(td(values))
    normed = norm.eval()(td(values))
    assert normed["obs"].dtype == (dtype if dtype.is_floating_point else torch.float32)
    back = norm.denorm(normed)
    assert back is not normed
    torch.testing.assert_close(back["obs"].double(), values.double(), rtol=1e-3, atol=0.1)
    with pytest.raises(KeyError, match="obs"):
        norm.denorm(TensorDict({}, [2]))


def test_fixed_forms_normalize_alike():
    norm = VecNorm(["obs", "x"], ["obs", "y"])
    data = TensorDict({"obs": normal(30, 2) + 5, "x": normal(30, 1, seed=3) * 7}, [30])
    norm.update(data)
    fixed = norm.to_observation_norm()
    expected, found = norm.eval()(data.copy()), fixed(data.copy())
    for key in ("obs", "y"):
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)
    assert norm.standard_normal and isinstance(VecNormV2(["obs"]), VecNormV2)
    single = VecNorm(["obs"])
    single.update(data)
    assert isinstance(single.to_observation_norm(), ObservationNorm)


def test_the_newer_form():
    made = VecNorm(["obs"], decay=0.5, eps=0.1, new_api=True)
    assert type(made) is VecNormV2 and (made.decay, made.eps, made.reduce_batch_dims) == (0.5, 0.1, False)
    values = normal(4, 3)
    each = VecNormV2(["obs"], decay=1.0)
    for _ in range(2):
        each(td(values))
    assert torch.equal(each.loc["obs"], values)
    with pytest.raises(ValueError, match="reduce_batch_dims=True"):
        each(td(values[:2]))


def test_arguments_out_of_range():
    for arguments in ({"decay": 1.5}, {"decay": -0.1}, {"decay": float("nan")}, {"eps": -1.0}):
        with pytest.raises(ValueError):
            VecNorm(["obs"], **arguments)
        with pytest.raises(ValueError):
            VecNormV2(["obs"], **arguments)
    with pytest.raises(ValueError, match="shapes"):
        VecNorm(["obs"], shapes=[[1], [2]])
    with pytest.raises(ValueError, match="shared_td"):
        VecNorm(["obs"], shared_td=TensorDict())
    with pytest.raises(ValueError, match="shared_data"):
        VecNormV2(["obs"], shared_data=TensorDict())
    with pytest.raises(ValueError, match="stateful"):
        VecNormV2(["obs"], stateful=False)
    with pytest.raises(ValueError, match="shapes"):
        VecNorm(["obs"], shapes=[[1]], new_api=True)


def test_threads_lose_no_update():
    norm = VecNorm(["obs"], decay=1.0)
    batches = [normal(3, 2, seed=i) for i in range(80)]

    def work(part):
        for batch in part:
            norm.update(td(batch))

    threads = [threading.Thread(target=work, args=(batches[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = torch.cat(batches)
    assert norm.get_extra_state()["'obs'"]["weight"] == len(rows)
    torch.testing.assert_close(norm.loc["obs"], rows.mean(0))
    torch.testing.assert_close(norm.scale["obs"], rows.std(0, correction=0))


def test_what_is_ready_for_reading_is_of_the_statistics_of_now():
    values = normal(40, 3, dtype=torch.float64) * 3 + 5
    norm = VecNormV2(["obs"], decay=1.0, reduce_batch_dims=True).eval()
    other = norm.clone()
    for part in (values[:20], values[20:]):
        norm.update(td(part))
        other.update(td(part * 2))
        for dtype in (torch.float32, torch.float64):
            seen = values[: int(norm.get_extra_state()["'obs'"]["weight"])]
            expected = (seen - seen.mean(0)) / seen.std(0, correction=0)
            for each, factor in ((norm, 1), (other, 2)):
                found = each(td((seen * factor).to(dtype)))["obs"]
                torch.testing.assert_close(found, expected.to(dtype), rtol=1e-4, atol=1e-5)
    norm.eps = 100.0
    assert norm(td(values))["obs"].abs().max() < 1
