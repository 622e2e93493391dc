"""Prioritized buffers whose items and priorities are on one device or on two, at the sizes of the documentation."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.interop.bits import TORCH_DEVICES

CUDA = TORCH_DEVICES[-1]  # the CPU where there is no GPU


@pytest.fixture
def scratch_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files do not outlive the test: they are large."""
    folder = tmp_path / "torchrl_rb"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def check_first_sample(sample: TensorDict, data: TensorDict, device: str) -> None:
    """Rows that were written, with their index; all of one priority."""
    assert sample.batch_size == (65_536,)
    assert set(sample.keys()) == {"obs", "td_error", "index", "priority_weight"}
    assert {value.device.type for value in sample.values()} == {device}
    index = sample["index"]
    assert index.dtype == torch.int64
    assert int(index.min()) >= 0 and int(index.max()) < 100_000
    assert torch.equal(sample["obs"], data["obs"][index])
    assert bool((sample["priority_weight"] == 1).all())
    # 65,536 draws of 100,000 rows hit 48,075 of them on average, with a standard deviation of 112
    assert abs(index.unique().numel() - 48_075) < 700


def check_after_update(rb: TensorDictPrioritizedReplayBuffer, sample: TensorDict, device: str) -> None:
    """The items of the sample have their new priorities, of equal items the last one; draws go by them."""
    wanted = np.ones(100_000, np.float32)
    wanted[sample["index"].cpu().numpy()] = sample["td_error"].cpu().numpy()
    priorities = rb.sampler.priorities.cpu()
    np.testing.assert_array_equal(priorities.numpy(), wanted)
    values = (wanted.astype(np.float64) + 1e-8) ** 0.7
    after = rb.sample()
    index = after["index"].cpu().numpy()
    weights = (values[index] / values.min()) ** -0.5
    np.testing.assert_allclose(after["priority_weight"].cpu().numpy(), weights, rtol=1e-4)
    assert after.device is None or after.device.type == device
    high = wanted > 0.5
    share = values[high].sum() / values.sum()
    assert abs(high[index].mean() - share) < 6 * np.sqrt(share * (1 - share) / 65_536)


@pytest.mark.parametrize(("storage_device", "sampler_device"), [(CUDA, None), (CUDA, "cpu"), ("files", CUDA)])
def test_storage_and_priorities_on_devices(storage_device, sampler_device, scratch_dir):
    device = "cpu" if storage_device == "files" else storage_device
    files = storage_device == "files"
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.7,
        beta=0.5,
        storage=LazyMemmapStorage(10_000_000, scratch_dir=scratch_dir)
        if files
        else LazyTensorStorage(1_000_000, device=device),
        batch_size=65_536,
        priority_key="td_error",
        **({} if sampler_device is None else {"sampler_device": sampler_device}),
    )
    data = TensorDict(
        {"obs": torch.randn(100_000, 32, device=device), "td_error": torch.ones(100_000, device=device)},
        batch_size=[100_000],
        device=device,
    )
    rb.extend(data)
    sample = rb.sample()
    check_first_sample(sample, data, device)
    sample["td_error"] = torch.rand(sample.shape, device=device)
    rb.update_tensordict_priority(sample)
    assert rb.sampler.device.type == (sampler_device or device)
    check_after_update(rb, sample, device)
    if files:
        opened = TensorDict.load_memmap(scratch_dir)
        assert opened.batch_size == (10_000_000,)
        assert torch.equal(opened["obs"][:100_000], data["obs"])


def test_a_loop_of_extends_samples_and_updates():
    S = 1_000_000
    sampler = PrioritizedSampler(S, 1.1, 1.0)
    storage = LazyMemmapStorage(S)
    rb = TensorDictReplayBuffer(storage=storage, sampler=sampler)

    for turn in range(100):
        td = TensorDict(
            {
                "obs": torch.randn(100, 3, 4),
                "next": {"obs": torch.randn(100, 3, 4)},
                "td_error": torch.rand(100),
            },
            [100],
        )
        rb.extend(td)
        sample = rb.sample(32)
        rb.update_tensordict_priority(sample)
        assert sample.batch_size == (32,)
        assert sample["next", "obs"].shape == (32, 3, 4)
        assert int(sample["index"].max()) < len(rb) == 100 * (turn + 1)
    priorities = rb.sampler.priorities
    assert torch.equal(priorities, rb[:]["td_error"])  # each was updated to what it had
    assert rb.write_count == 10_000
