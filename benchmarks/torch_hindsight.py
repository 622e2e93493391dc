"""Through torch, batches with other goals: is a draw faster than torchrl's, and does it grow with what is stored?

Ten leaves, batches of 256 of which 0.8 are relabelled, episodes of 200 steps and, for the strategy "final", of 10,000.
"""

from functools import partial
from types import ModuleType
from typing import Any

import measure
import torch
from tensordict import TensorDict, TensorDictBase

import interop

BATCH = 256


def steps(count: int, first: int, episode: int) -> TensorDict:
    """Consecutive steps of episodes."""
    draw = torch.Generator().manual_seed(0)

    def numbers(width: int) -> torch.Tensor:
        return torch.randn(count, width, generator=draw)

    done = (torch.arange(first, first + count) % episode == episode - 1)[:, None]
    after = {
        "observation": numbers(10),
        "achieved_goal": numbers(3),
        "desired_goal": numbers(3),
        "reward": numbers(1),
        "done": done,
        "terminated": torch.zeros_like(done),
    }
    before = {"observation": numbers(10), "achieved_goal": numbers(3), "desired_goal": numbers(3), "action": numbers(4)}
    return TensorDict({**before, "next": TensorDict(after, [count])}, [count])


def reward_fn(batch: TensorDictBase) -> torch.Tensor:
    apart = batch["next", "achieved_goal"] - batch["next", "desired_goal"]
    return (apart.norm(dim=-1, keepdim=True) < 0.05).float()


def buffer_of(data: ModuleType, strategy: str, capacity: int, episode: int) -> Any:
    """A full buffer whose last write was of one row: between draws torchrl's takes no others."""
    buffer = data.HERReplayBuffer(
        reward_fn, strategy=strategy, storage=data.LazyTensorStorage(capacity), batch_size=BATCH
    )
    for first in range(0, capacity, 50_000):
        buffer.extend(steps(min(50_000, capacity - first), first, episode))
    buffer.add(steps(1, capacity, episode)[0])
    return buffer


def after_a_write(buffer: Any, row: TensorDict) -> None:
    buffer.add(row)
    buffer.sample()


def main() -> None:
    options = measure.arguments("Through torch: batches with goals that were reached").parse_args()
    sides = {measure.OURS: interop}
    torchrl = measure.rival("torchrl.data")
    if hasattr(torchrl, "HERReplayBuffer"):
        sides["torchrl"] = torchrl
    sizes = (10**4, 10**5) if options.quick else (10**4, 10**5, 10**6)
    timings = []
    for strategy, episode in (("future", 200), ("final", 10_000)):
        buffers = {name: buffer_of(data, strategy, sizes[-1], episode) for name, data in sides.items()}
        row = steps(1, sizes[-1], episode)[0]
        draws = {name: buffer.sample for name, buffer in buffers.items()}
        timings.append(measure.compare(f"{strategy}, episodes of {episode}", draws, quick=options.quick))
        writes = {name: partial(after_a_write, buffer, row) for name, buffer in buffers.items()}
        timings.append(measure.compare(f"add + {strategy}, episodes of {episode}", writes, quick=options.quick))
        del buffers, draws, writes
    grown = {
        (measure.OURS if size == sizes[0] else str(size)): buffer_of(interop, "future", size, 200).sample
        for size in sizes
    }
    ratios = measure.compare("future", grown, quick=options.quick).ratio
    growth = {f"growth of a draw, {sizes[0]} to {sizes[-1]} rows": ratios[str(sizes[-1])]}
    measure.report(f"Through torch, {BATCH} of {sizes[-1]} rows relabelled", timings, growth, options.json)


if __name__ == "__main__":
    main()
