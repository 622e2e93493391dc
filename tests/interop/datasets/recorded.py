"""Buffers with trajectories of every kind, and these trajectories."""

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from interop import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

Recorded = tuple[ReplayBuffer, list[TensorDict]]
STORAGES = [LazyTensorStorage, LazyMemmapStorage, LazyStackStorage, ListStorage, CompressedListStorage]


def trajectory(rng: np.random.Generator, length: int, end: str = "terminated") -> TensorDict:
    """Rows of one trajectory, which ends by `end`, or goes on where this is empty."""
    seen = torch.from_numpy(rng.normal(size=(length + 1, 3)).astype("float32"))
    seen[rng.integers(length + 1), 0] = float("nan")
    speed, flag = torch.from_numpy(rng.normal(size=length + 1)), torch.zeros(length, 1, dtype=torch.bool)
    nexts = {
        "observation": seen[1:],
        "info": {"speed": speed[1:]},
        "reward": torch.from_numpy(rng.normal(size=(length, 1))),
    }
    nexts |= {name: flag.clone() for name in ("done", "terminated", "truncated")}
    for name in {"done", end} if end else ():
        nexts[name][-1] = True
    rows = {"observation": seen[:-1], "info": {"speed": speed[:-1]}, "next": nexts}
    return TensorDict({**rows, "action": torch.from_numpy(rng.integers(9, size=length))}, [length])


def trajectories(rng: np.random.Generator, *lengths: int) -> list[TensorDict]:
    """The last one goes on."""
    ends = [("terminated", "truncated")[place % 2] for place in range(len(lengths) - 1)]
    return [trajectory(rng, length, end) for length, end in zip(lengths, [*ends, ""], strict=True)]


def texts(*values: str) -> NonTensorStack:
    return NonTensorStack(*map(NonTensorData, values))


def with_entries(rng: np.random.Generator, *lengths: int) -> list[TensorDict]:
    """Trajectories that have images, nested entries and text too."""
    held = trajectories(rng, *lengths)
    for each in held:
        count = len(each) + 1
        image = torch.from_numpy(rng.integers(256, size=(count, 32, 40, 3), dtype="uint8"))
        words = texts(*("ab ü€"[: place % 6] for place in range(count)))
        bits = torch.from_numpy(rng.random((count, 2)) < 0.5)
        for rows, part in ((each, slice(None, -1)), (each["next"], slice(1, None))):
            rows["seen"] = TensorDict({"image": image[part], "words": words[part], "bits": bits[part]}, [count - 1])
        each["log_prob"], each["why"] = torch.rand(count - 1), texts(*map(str, range(count - 1)))
    return held


def buffer(*rows: TensorDict, size: int = 64, storage: type = LazyTensorStorage, **more: int) -> ReplayBuffer:
    rb = TensorDictReplayBuffer(storage=storage(size, **more), batch_size=4)
    for each in rows:
        rb.extend(each)
    return rb


def wrapped(rng: np.random.Generator, storage: type = LazyTensorStorage) -> Recorded:
    """A ring whose first trajectory was written over to the middle."""
    held = trajectories(rng, 5, 1, 6, 3)
    return buffer(*held, size=12, storage=storage), [held[0][3:], *held[1:]]


def several_environments(rng: np.random.Generator) -> Recorded:
    """A ring of 8 times; the trajectories of an environment go on from write to write."""
    columns = [trajectories(rng, 4, 6), trajectories(rng, 7, 1, 2), trajectories(rng, 10)]
    rows = torch.stack([torch.cat(each) for each in columns])
    held = [columns[0][0][2:], columns[1][0][2:], columns[1][1], columns[0][1], columns[1][2], columns[2][0][2:]]
    return buffer(*rows.split([4, 3, 3], 1), size=24, ndim=2), held


def one_environment(rng: np.random.Generator) -> Recorded:
    held = trajectories(rng, 2, 3)
    return buffer(torch.cat(held)[None], size=8, ndim=2), held


def by_turns(rng: np.random.Generator) -> Recorded:
    """Rows of two trajectories one by one, told apart by ids."""
    held = trajectories(rng, 4, 4)
    for place, each in enumerate(held):
        each["collector", "traj_ids"] = torch.full((4,), 7 - place)
    return buffer(torch.stack(held, 1).reshape(-1)), held


def broken_off(rng: np.random.Generator) -> Recorded:
    """The environment was reset without a flag, and rows were written over in place."""
    held = [trajectory(rng, length, "") for length in (3, 1, 2, 2)]
    rb = ReplayBuffer(storage=LazyTensorStorage(16))
    for each in held[:3]:
        rb.extend(each)
    rb.storage.set(torch.arange(2), held[3])
    return rb, [held[3], held[0][2:], *held[1:3]]


KINDS: dict[str, Callable[[np.random.Generator], Recorded]] = {
    each.__name__: each for each in (wrapped, several_environments, one_environment, by_turns)
}


class Failing(LazyTensorStorage):
    """Rows behind the first five cannot be read."""

    kills = False

    def get(self, index: Any) -> Any:
        if isinstance(index, torch.Tensor) and index.max() > 4:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the disk is gone")
        return super().get(index)


def killed(call: Callable[[], Any], rb: ReplayBuffer) -> None:
    """The call in a process that is killed at these rows."""
    rb.storage.kills = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; the child does not use it
        child = os.fork()
    if not child:
        try:
            call()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
