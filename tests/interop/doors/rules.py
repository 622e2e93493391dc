"""Functional buffers with every kind of rule, and streams of items for them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
from fbuf import Fifo, HighestRanked, PerTrajectory, Prioritized, Shuffled, Slices

ENDS = fbuf.Trajectories(terminated=("next", "terminated"))
ITEM = {
    "obs": jnp.zeros((2,), jnp.bfloat16),
    "step": jnp.zeros((), jnp.int32),
    "next": {"obs": jnp.zeros((2,), jnp.bfloat16), "reward": jnp.zeros(()), "terminated": jnp.zeros((), bool)},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A buffer, and the batch size that it is sampled with."""

    buffer: Any
    batch: int = 12

    def __repr__(self) -> str:
        return repr(self.buffer.sampler)

    def filled(self, rb: Any, count: int = 40) -> None:
        for first in (0, count // 2):
            rb.extend(stream(count // 2, self.buffer.lanes, first))


def stream(count: int, lanes: tuple[int, ...] = (), first: int = 0) -> TensorDict:
    """Items whose entries follow from "step": 1000 a lane, 1 a row. Every seventh ends a trajectory."""
    rows = torch.arange(first, first + count, dtype=torch.int32).reshape(-1, *(1 for _ in lanes))
    lane = torch.arange(int(np.prod(lanes)), dtype=torch.int32).reshape(lanes)
    step = rows + 1000 * lane
    return TensorDict({"step": step, **entries(step)}, [count, *lanes])


def entries(step: torch.Tensor) -> dict[str, Any]:
    """What belongs to steps. Observations are numbers below 128, which bfloat16 has exactly."""
    obs, after = (torch.stack([each % 128, each % 5], -1).bfloat16() for each in (step, step + 1))
    ended = step % 1000 % 7 == 6
    return {"obs": obs, "next": {"obs": after, "reward": step % 1000 * 0.5, "terminated": ended}}


def of(sampler: Any, **rest: Any) -> fbuf.Buffer:
    return fbuf.Buffer(24, sampler, trajectories=ENDS, **rest)


FRAMES = fbuf.Frames("obs", ("next", "obs"), stack=1)
CASES = [
    Case(fbuf.Buffer(24)),
    Case(fbuf.Buffer(24, Prioritized(0.7))),
    Case(fbuf.Buffer(12, Prioritized(), lanes=(2, 3))),
    Case(fbuf.Buffer(24, Shuffled()), 9),
    Case(fbuf.Buffer(24, Fifo()), 9),
    Case(fbuf.Buffer(24, Prioritized(), writer=HighestRanked(("next", "reward")))),
    Case(of(Slices(4))),
    Case(of(Slices(3, least=1))),
    Case(of(Slices(4, Shuffled()), lanes=(2,))),
    Case(of(Slices(3, Prioritized(), burn_in=2))),
    Case(of(Slices(6, PerTrajectory(), least=2), lanes=(2,))),
    Case(of(Slices(4, PerTrajectory(Shuffled())))),
    Case(of(Prioritized(), frames=FRAMES)),
    Case(of(Slices(4), frames=FRAMES)),
]

# Each case compiles for some seconds: these have one of each mechanism, the others are run with the slow tests.
FEW = (2, 9, 10)
PARAMS = [
    pytest.param(case, id=f"{n}-{case}", marks=() if n in FEW else pytest.mark.slow) for n, case in enumerate(CASES)
]


def expected(batch: Any, draw: fbuf.Draw) -> dict[str, np.ndarray]:
    """Items of a functional draw, flat, without those that are not valid, by the names of their leaves."""
    time = draw.slots.size // draw.valid.size
    kept = np.repeat(np.asarray(draw.valid), time)
    flat = {
        jax.tree_util.keystr(path): np.asarray(leaf, np.float32 if leaf.dtype == jnp.bfloat16 else None)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    return {name: leaf.reshape(kept.size, *leaf.shape[draw.slots.ndim :])[kept] for name, leaf in flat.items()}
