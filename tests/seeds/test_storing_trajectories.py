"""Trajectories stored one after the other, and slices of them."""

import importlib.util
import itertools

import pytest
import torch

from interop import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.seeds.stream import cart_pole

LIMIT = 30  # steps, so that there are short trajectories and long ones


def check_slices(batch, length=8):
    """Slices of one trajectory each, with steps one after the other; the slices."""
    ids, steps = batch["collector", "traj_ids"], batch["step_count"].reshape(-1)
    goes_on = (ids[1:] == ids[:-1]) & (steps[1:] == steps[:-1] + 1)
    starts = [0, *((~goes_on).nonzero().reshape(-1) + 1).tolist()]
    slices = list(zip(starts, [*starts[1:], len(ids)], strict=True))
    for first, stop in slices:
        assert ids[first:stop].unique().numel() == 1
        assert (steps[first:stop].diff() == 1).all()
        assert torch.equal(batch["next", "observation"][first : stop - 1], batch["observation"][first + 1 : stop])
        assert not batch["next", "done"].reshape(-1)[first : stop - 1].any()
    assert torch.equal(batch["next", "step_count"], batch["step_count"] + 1)
    assert all(stop - first <= 2 * length for first, stop in slices)  # two of one trajectory may follow each other
    return slices


def one_environment():
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(num_slices=8, traj_key=("collector", "traj_ids"), truncated_key=None, strict_length=False),
        batch_size=64,
    )
    for i, data in enumerate(cart_pole(frames=10, most_steps=LIMIT)):
        rb.extend(data)
        if i == 10:
            break
    return rb


def test_one_environment():
    rb = one_environment()
    assert len(rb) == 100, len(rb)
    assert rb[:]["next", "step_count"].shape == (100, 1)
    for _ in range(20):
        batch, info = rb.sample(return_info=True)
        check_slices(batch)
        assert len(batch) <= 64 and set(info) == {"index"}
        age = (info["index"][0] - 10) % 100  # the cursor is at row 10
        for first, stop in check_slices(batch):
            assert (age[first:stop].diff() == 1).all()


def two_environments(**choices):
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100, ndim=2),
        sampler=SliceSampler(num_slices=8, traj_key=("collector", "traj_ids"), truncated_key=None, strict_length=False),
        batch_size=64,
        **choices,
    )
    for i, data in enumerate(cart_pole(frames=2, envs=2, most_steps=LIMIT)):  # a step of each
        rb.extend(data)
        if i == 100:
            break
    return rb


def test_two_environments():
    rb = two_environments()
    assert len(rb) == 100, len(rb)
    assert rb[:]["next", "step_count"].squeeze().shape == (2, 50)
    for _ in range(20):
        batch, info = rb.sample(return_info=True)
        rows, lanes = info["index"]
        for first, stop in check_slices(batch):
            assert lanes[first:stop].unique().numel() == 1
            assert ((rows[first:stop] - 101) % 50).diff().eq(1).all()


@pytest.mark.parametrize("frames", [2, 10])
def test_two_environments_flattened(frames):
    """`data.reshape(-1)` puts the trajectories one after the other, or by turns where there is a step of each."""
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100),
        sampler=SliceSampler(num_slices=8, traj_key=("collector", "traj_ids"), truncated_key=None, strict_length=False),
        batch_size=64,
    )
    for data in itertools.islice(cart_pole(frames=frames, envs=2, most_steps=LIMIT), 100):
        rb.extend(data.reshape(-1))
    for _ in range(20):
        check_slices(rb.sample())
    assert rb.sample()["step_count"].max() > 0


@pytest.mark.parametrize("envs", [None, 2])
@pytest.mark.parametrize("kind", ["epochs", "priorities"])
def test_other_slices(envs, kind):
    choices = {"slice_len": 4, "traj_key": ("collector", "traj_ids")}
    sampler = (
        SliceSamplerWithoutReplacement(**choices)
        if kind == "epochs"
        else PrioritizedSliceSampler(100, 0.7, 0.9, **choices)
    )
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100, ndim=1 if envs is None else 2), sampler=sampler, batch_size=16
    )
    for data in itertools.islice(cart_pole(frames=10, envs=envs, most_steps=LIMIT), 25):
        rb.extend(data)
        batch = rb.sample()
        ends = batch["next", "truncated"].reshape(-1)
        assert ends[3::4].all() and int(ends.sum()) == len(batch) // 4
        batch["next", "done"] &= False
        check_slices(batch)
        if kind == "priorities":
            rb.update_tensordict_priority(batch.set("td_error", torch.rand(len(batch))))
            assert batch["priority_weight"].shape == (16,)


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="TorchRL is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("envs", [1, 2])
def test_a_collector_of_torchrl(envs):
    from torchrl import collectors
    from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv
    from torchrl.modules import RandomPolicy

    if envs == 1:
        env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    else:
        env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), StepCounter())
    frames, last = (10, 10) if envs == 1 else (1, 100)
    of_one_process = collectors.Collector if hasattr(collectors, "Collector") else collectors.SyncDataCollector
    collector = of_one_process(env, RandomPolicy(env.action_spec), frames_per_batch=frames, total_frames=-1)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(100, ndim=envs),
        sampler=SliceSampler(num_slices=8, traj_key=("collector", "traj_ids"), truncated_key=None, strict_length=False),
        batch_size=64,
    )
    for i, data in enumerate(collector):
        rb.extend(data)
        if i == last:
            break
    collector.shutdown()
    assert len(rb) == 100, len(rb)
    for _ in range(20):
        check_slices(rb.sample())
