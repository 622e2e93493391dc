"""Steps of environments whose observations are stacks of frames; a storage of frames beside one that keeps them whole."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from interop import LazyFrameStorage, LazyTensorStorage, TensorDictReplayBuffer
from tests.interop.bits import same_bits

OPEN, TERMINATED, TRUNCATED, CUT = range(4)  # how a step ends; with CUT the next one has another id


class Environment:
    """Each frame is a number that no other frame has."""

    def __init__(self, stack: int = 4, zeros: bool = False, dim: int = -3, first: int = 1, entries: int = 1) -> None:
        self.stack, self.zeros, self.dim, self.number, self.id = stack, zeros, dim, first, first
        self.entries = entries  # of a frame along the dim of the stack
        self.reset()

    def _next_number(self) -> int:
        self.number += 1  # no iterator: copies of streams are made, and of iterators they end with Python 3.14
        return self.number - 1

    def _frame(self) -> Tensor:
        return torch.full((2, 2, 2), self._next_number(), dtype=torch.int16).narrow(self.dim, 0, self.entries)

    def reset(self) -> None:
        first = self._frame()
        self.frames = [torch.zeros_like(first) if self.zeros else first] * (self.stack - 1) + [first]

    def step(self, kind: int = OPEN) -> TensorDict:
        td = TensorDict({"pixels": torch.cat(self.frames, self.dim), "action": torch.tensor(self._next_number())})
        td["traj"] = torch.tensor(self.id)
        self.frames = [*self.frames[1:], self._frame()]
        done, truncated = torch.tensor([kind in (TERMINATED, TRUNCATED)]), torch.tensor([kind == TRUNCATED])
        td["next"] = TensorDict({"pixels": torch.cat(self.frames, self.dim), "reward": torch.rand(1), "done": done})
        td["next", "truncated"] = truncated
        if kind != OPEN:
            self.id += 1
            self.reset()
        return td

    def steps(self, kinds: Any) -> TensorDict:
        return torch.stack([self.step(int(kind)) for kind in kinds])


def random_kinds(rng: np.random.Generator, count: int, chance: float, kinds: int = 2) -> np.ndarray:
    return np.where(rng.random(count) < chance, rng.integers(1, 1 + kinds, count), OPEN)


def assert_same(left: TensorDict, right: TensorDict) -> None:
    """Equal keys and bits."""
    keys = set(left.keys(True, True))
    assert keys == set(right.keys(True, True))
    assert left.batch_size == right.batch_size
    for key in keys:
        assert same_bits(left[key], right[key]), key


class Both:
    """The same calls to a buffer of frames and to one that stores everything."""

    def __init__(self, max_size: int, ndim: int = 1, **options: Any) -> None:
        self.frames = TensorDictReplayBuffer(storage=LazyFrameStorage(max_size, ndim=ndim, **options))
        self.whole = TensorDictReplayBuffer(storage=LazyTensorStorage(max_size, ndim=ndim))

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            for buffer in (self.frames, self.whole):
                getattr(buffer, name)(*(each.clone() if isinstance(each, TensorDict) else each for each in args))

        return call

    def check(self) -> None:
        assert len(self.frames) == len(self.whole)
        if len(self.whole):
            assert_same(self.frames[:], self.whole[:])
