"""Buffers of torchrl are saved by it, converted and loaded here: they hold the same, and go on at the same slots."""

import random
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import interop as ours

theirs = pytest.importorskip("torchrl.data.replay_buffers")


def rows(count: int, start: int, lanes: int, episode: int) -> TensorDict:
    """Steps of episodes, each lane for itself; a lane of 0 is no dim of its own."""
    at = torch.arange(start, start + count)
    at = at[:, None] + 1000 * torch.arange(lanes) if lanes else at
    done = (at % episode == episode - 1)[..., None]
    no = torch.zeros_like(done)
    after = {"obs": at[..., None] + 1 + done * 500_000, "reward": at[..., None] * 0.5, "done": done, "terminated": done}
    root = {"obs": at[..., None], "action": (at % 3).to(torch.int8), "done": no, "terminated": no}
    return TensorDict({**root, "next": TensorDict(after, at.shape)}, at.shape)


def pair(kind: str, lanes: int, capacity: int) -> list[Any]:
    """A buffer of each library, built alike."""
    made = []
    for library in (theirs, ours):
        storage = getattr(library, "LazyMemmapStorage" if kind == "memmap" else "LazyTensorStorage")
        given: dict[str, Any] = {"ndim": 2} if lanes else {}
        storage = storage(capacity * max(lanes, 1), **given)
        extra = {"dim_extend": 0} if lanes else {}
        buffer = library.TensorDictReplayBuffer(storage=storage, batch_size=4, **extra)
        made.append(buffer)
    return made


def same(one: TensorDict, other: TensorDict) -> bool:
    one, other = one.exclude("index"), other.exclude("index")
    keys = set(one.keys(True, True))
    return keys == set(other.keys(True, True)) and all(torch.equal(one[key], other[key]) for key in keys)


@pytest.mark.parametrize("kind", ["tensor", "memmap"])
@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_saved_buffer_goes_on_here(kind, lanes, seed, tmp_path):
    chance = random.Random(f"{kind} {lanes} {seed}")
    capacity, episode = chance.randint(3, 12), chance.randint(2, 5)
    there, here = pair(kind, lanes, capacity)
    start = 0
    for _ in range(chance.randint(1, 6)):
        count = chance.randint(1, min(capacity, 5))
        there.extend(rows(count, start, lanes, episode))
        start += count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there.dumps(tmp_path / "dump")
    ours.convert_torchrl(tmp_path / "dump", tmp_path / "ours")
    here.loads(tmp_path / "ours")
    assert len(here) == len(there)
    assert same(here[:], there[:])
    assert (here._writer._cursor, here._writer.write_count) == (there._writer._cursor, there._writer._write_count)
    for _ in range(4):
        count = chance.randint(1, min(capacity, 5))
        more = rows(count, start, lanes, episode)
        start += count
        assert torch.equal(here.extend(more.clone()).cpu(), torch.as_tensor(there.extend(more.clone())))
        assert same(here[:], there[:])
