"""Through torch, drawing slices of trajectories: is a draw faster than torchrl's, and does it grow with what is stored?

Six leaves, episodes of 200 steps, 8 slices of 32, by the id of the episode and by its end; alone, and after each write.
Prioritized slices are compared with torchrl's way to draw them where its priority trees can be loaded.
"""

from types import ModuleType
from typing import Any

import measure
import torch
from tensordict import TensorDict

import interop

SLICES, LENGTH, EPISODE = 8, 32, 200


def steps(count: int, first: int = 0) -> TensorDict:
    """Consecutive steps of episodes of 200."""
    at = torch.arange(first, first + count)
    done = (at % EPISODE == EPISODE - 1)[:, None]
    draw = torch.Generator().manual_seed(0)
    after = {
        "observation": torch.randn(count, 17, generator=draw),
        "reward": torch.randn(count, 1, generator=draw),
        "done": done,
    }
    return TensorDict(
        {
            "observation": torch.randn(count, 17, generator=draw),
            "action": torch.randn(count, 6, generator=draw),
            "episode": at // EPISODE,
            "next": TensorDict(after, [count]),
        },
        [count],
    )


def buffer_of(data: ModuleType, sampler: Any, capacity: int) -> Any:
    """A full buffer."""
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(capacity), sampler=sampler, batch_size=SLICES * LENGTH
    )
    for first in range(0, capacity, 50_000):
        buffer.extend(steps(min(50_000, capacity - first), first))
    return buffer


def after_a_write(buffer: Any, rows: TensorDict) -> None:
    buffer.extend(rows)
    buffer.sample()


def prioritized(data: ModuleType, capacity: int) -> Any:
    """A full buffer with priorities, or None where the library cannot make one here."""
    try:
        sampler = data.PrioritizedSliceSampler(capacity, 0.7, 0.5, num_slices=SLICES, traj_key="episode")
        buffer = buffer_of(data, sampler, capacity)
        buffer.update_priority(torch.arange(capacity), torch.rand(capacity))
        buffer.sample()
    except Exception as error:  # its extension does not load beside this torch
        print(f"{data.__name__}: no prioritized slices here: {type(error).__name__}")
        return None
    return buffer


def main() -> None:
    options = measure.arguments("Through torch: slices of trajectories").parse_args()
    sides = {measure.OURS: interop}
    if torchrl := measure.rival("torchrl.data"):
        sides["torchrl"] = torchrl
    capacity = 20_000 if options.quick else 500_000
    timings, values = [], {}
    rows = steps(EPISODE, capacity)
    for cached in (False, True):
        for marker in ({"traj_key": "episode"}, {"end_key": ("next", "done")}):
            buffers = {
                name: buffer_of(data, data.SliceSampler(num_slices=SLICES, cache_values=cached, **marker), capacity)
                for name, data in sides.items()
            }
            told = f"{next(iter(marker))}{', cached' if cached else ''}"
            draws = {name: buffer.sample for name, buffer in buffers.items()}
            timings.append(measure.compare(f"slices by {told}", draws, quick=options.quick))
            writes = {name: lambda buffer=buffer: after_a_write(buffer, rows) for name, buffer in buffers.items()}
            timings.append(measure.compare(f"extend 200 + slices by {told}", writes, quick=options.quick))
    weighed = {name: made for name, data in sides.items() if (made := prioritized(data, capacity)) is not None}
    timings.append(
        measure.compare("prioritized slices", {n: b.sample for n, b in weighed.items()}, quick=options.quick)
    )
    del buffers, draws, writes, weighed
    sizes = (10**4, 10**5) if options.quick else (10**4, 10**5, 10**6, 10**7)
    grown = {
        (measure.OURS if size == sizes[0] else str(size)): buffer_of(
            interop, interop.SliceSampler(num_slices=SLICES, end_key=("next", "done")), size
        )
        for size in sizes
    }
    for name, call in (
        ("slices", lambda buffer: buffer.sample()),
        ("extend 200 + slices", lambda buffer: after_a_write(buffer, rows)),
    ):
        timing = measure.compare(
            name,
            {size: lambda buffer=buffer, call=call: call(buffer) for size, buffer in grown.items()},
            quick=options.quick,
        )
        values[f"growth of {name}, {sizes[0]} to {sizes[-1]} rows"] = timing.ratio[str(sizes[-1])]
    measure.report(f"Through torch, {SLICES} slices of {LENGTH} of {capacity} rows", timings, values, options.json)


if __name__ == "__main__":
    main()
