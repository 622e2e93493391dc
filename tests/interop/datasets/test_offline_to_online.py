"""Batches of a dataset and of new data: exact parts, uniform draws in each; and copies of datasets."""

import pytest
import torch
from scipy import stats
from tensordict import TensorDict

import interop.datasets
from interop import (
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    TensorDictReplayBuffer,
    prefill_replay_buffer,
)


def dataset(count: int = 20) -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(count), generator=torch.Generator().manual_seed(0))
    rb.extend(TensorDict({"x": -1 - torch.arange(count)}, [count]))
    return rb


def test_parts_are_exact_and_draws_uniform() -> None:
    torch.manual_seed(0)
    rb = OfflineToOnlineReplayBuffer(dataset(), online_capacity=10, offline_fraction=0.3, batch_size=10)
    assert (rb.sample()["x"] < 0).all() and len(rb) == 20
    rb.extend(TensorDict({"x": torch.arange(10)}, [10]))
    draws = torch.stack([rb.sample()["x"] for _ in range(600)])
    assert (draws[:, :3] < 0).all() and (draws[:, 3:] >= 0).all() and len(rb) == 30
    for part, kinds in ((-1 - draws[:, :3], 20), (draws[:, 3:], 10)):
        assert stats.chisquare(part.flatten().bincount(minlength=kinds)).pvalue > 1e-4
    for size in (1, 2, 3, 5, 8):
        assert int((rb.sample(size)["x"] < 0).sum()) == round(0.3 * size)
    rb.anneal(5, 10)
    assert rb.offline_fraction == pytest.approx(0.15)
    rb.anneal(11, 10)
    assert (rb.sample()["x"] >= 0).all()


def test_a_text_names_a_dataset() -> None:
    interop.datasets.register_dataset("rising", lambda name, **given: dataset())
    rb = OfflineToOnlineReplayBuffer("rising:x", online_capacity=5, batch_size=4, transform=lambda batch: batch["x"])
    assert rb.sample().shape == (4,)


@pytest.mark.parametrize("count", [None, 7, 45, 100])
def test_a_copy_has_each_item_once_in_order(count: int | None) -> None:
    lanes = ReplayBuffer(storage=LazyTensorStorage(60, ndim=2))
    lanes.extend(TensorDict({"x": torch.arange(60).reshape(3, 20)}, [3, 20]))
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    assert prefill_replay_buffer(rb, lanes, count, chunk_size=7) is rb
    assert rb[:]["x"].tolist() == list(range(min(60, count or 60)))
    assert "index" not in prefill_replay_buffer(ReplayBuffer(storage=LazyTensorStorage(9)), dataset(), 9)[:]


def test_refusals() -> None:
    for given in ({}, {"online_capacity": 5, "online_storage": LazyTensorStorage(5)}):
        with pytest.raises(ValueError, match="one of online_storage"):
            OfflineToOnlineReplayBuffer(dataset(), **given)
    for fraction in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match="offline_fraction"):
            OfflineToOnlineReplayBuffer(dataset(), online_capacity=5, offline_fraction=fraction)
    rb = OfflineToOnlineReplayBuffer(dataset(), online_capacity=5)
    with pytest.raises(ValueError, match="batch_size"):
        rb.sample()
    rb.extend(TensorDict({"z": torch.zeros(5)}, [5]))
    with pytest.raises(KeyError, match="only in the new data 'z'"):
        rb.sample(4)
