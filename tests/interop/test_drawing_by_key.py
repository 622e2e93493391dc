"""A batch depends on its key alone, which the buffer makes: so it is the same with prefetch, and in a copy."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from interop import (
    HERReplayBuffer,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    PromptGroupSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    Sampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)

SIZE = 48


class ByKey(Sampler):
    def draw(self, storage, batch_size, key):
        return torch.from_numpy(np.random.default_rng(key).integers(len(storage), size=batch_size)), {}


class BySample(Sampler):
    def sample(self, storage, batch_size):
        return torch.randint(len(storage), (batch_size,), generator=self._rng), {"note": torch.ones(batch_size)}


class Cursor(Sampler):
    """A draw that depends on the number of draws before it."""

    at = 0

    def sample(self, storage, batch_size):
        self.at += 1
        return (torch.arange(batch_size) * self.at + torch.randint(9, (1,), generator=self._rng)) % len(storage), {}


class InPlace(Sampler):
    """Returns arrays that the next draw changes in place."""

    def __init__(self):
        self.order, self.note = np.arange(SIZE), {"note": torch.zeros(8)}

    def draw(self, storage, batch_size, key):
        np.random.default_rng(key).shuffle(self.order)
        self.note["note"] += 1
        return torch.from_numpy(self.order[:batch_size]), self.note


class Reversed(SliceSampler):
    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)
        return tuple(each.flip(0) for each in index), info


class Shifted(PrioritizedSampler):
    def draw(self, storage, batch_size, key):
        index, info = super().draw(storage, batch_size, key)
        return (index + 1) % len(storage), info


class Halves(SamplerWithoutReplacement):
    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)
        return index // 2, info


SAMPLERS = {
    "uniform": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "slices": lambda: SliceSampler(slice_len=2),
    "slices with span": lambda: SliceSampler(num_slices=4, span=True, strict_length=False),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "prioritized": lambda: PrioritizedSampler(SIZE, 0.7, 0.5),
    "prioritized slices": lambda: PrioritizedSliceSampler(SIZE, 0.7, 0.5, slice_len=2),
    "staleness": lambda: StalenessAwareSampler(version_key="episode"),
    "groups": lambda: PromptGroupSampler(2, group_key="episode"),
    "own by key": ByKey,
    "own by sample": BySample,
    "own cursor": Cursor,
    "own in place": InPlace,
    "reversed slices": lambda: Reversed(slice_len=2),
    "shifted prioritized": lambda: Shifted(SIZE, 0.7, 0.5),
    "halves": Halves,
}


def members(generator, prefetch, kind=SamplerEnsemble):
    """An ensemble of three members: one with epochs, one with a sampler of the user's."""
    own = [RandomSampler(), SamplerWithoutReplacement(), BySample()]
    buffers = [TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=each) for each in own]
    for each in buffers:
        each.extend(steps())
    whole = ReplayBufferEnsemble(*buffers, batch_size=9, prefetch=prefetch, generator=generator)
    whole.sampler.__class__ = kind
    return whole


class OwnChoice(SamplerEnsemble):
    def sample(self, storage, batch_size):
        return super().sample(storage, batch_size)


def steps():
    step = torch.arange(SIZE)
    goals = {"achieved_goal": step[:, None] + 1.0, "done": (step % 6 == 5)[:, None], "reward": torch.zeros(SIZE, 1)}
    return TensorDict({"x": step, "episode": step // 6, "desired_goal": torch.zeros(SIZE, 1), "next": goals}, [SIZE])


def reward_of(rows):
    return rows["x"].float()


def hindsight(generator, prefetch):
    chosen = {"sampler": SamplerWithoutReplacement(), "generator": generator, "prefetch": prefetch}
    return HERReplayBuffer(reward_of, storage=LazyTensorStorage(SIZE), batch_size=8, **chosen)


def flat(make):
    def made(generator, prefetch):
        chosen = {"sampler": make(), "generator": generator, "prefetch": prefetch}
        return TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), batch_size=8, **chosen)

    return made


BUFFERS = {name: flat(make) for name, make in SAMPLERS.items()} | {
    "hindsight": hindsight,
    "ensemble": members,
    "own ensemble": lambda *given: members(*given, kind=OwnChoice),
}


def filled(name, prefetch=None):
    buffer = BUFFERS[name](torch.Generator().manual_seed(3), prefetch)
    if "ensemble" not in name:
        buffer.extend(steps())
    return buffer


@pytest.mark.parametrize("name", BUFFERS)
def test_batches_are_the_same_with_prefetch_and_without(name):
    runs = [[buffer.sample() for _ in range(7)] for buffer in (filled(name), filled(name, 3))]
    assert all((one == other).all() for one, other in zip(*runs, strict=True))
    assert not (runs[0][0]["x"] == runs[0][1]["x"]).all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_copy_draws_what_its_buffer_draws(name, copied):
    buffer = filled(name, 2)
    buffer.sample()
    twin = copied(buffer)
    for _ in range(8):
        assert (buffer.sample() == twin.sample()).all()


@pytest.mark.parametrize("name", [name for name in BUFFERS if "own" not in name and name != "ensemble"])
def test_another_default_device_makes_no_difference(name):
    wanted = filled(name).sample()
    rows = steps()
    torch.set_default_device("meta")
    try:
        buffer = BUFFERS[name](torch.Generator("cpu").manual_seed(3), None)
        buffer.extend(rows)
        found = buffer.sample()
    finally:
        torch.set_default_device(None)
    assert all(leaf.device.type == "cpu" for leaf in found.values(True, True)) and (found == wanted).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_key_determines_a_draw(name):
    drawn = []
    for seed in (1, 2):
        buffer = flat(SAMPLERS[name])(torch.Generator().manual_seed(seed), None)
        buffer.extend(steps())
        before = buffer._rng.get_state(), torch.get_rng_state()
        index, info = buffer.sampler.draw(buffer.storage, 8, np.array([4, 5], np.uint32))
        assert torch.equal(buffer._rng.get_state(), before[0]) and torch.equal(torch.get_rng_state(), before[1])
        drawn.append(torch.stack(index) if isinstance(index, tuple) else index)
        assert isinstance(info, dict)
    assert torch.equal(*drawn)
