"""Maps from keys to tensordicts: what do reading and writing some of a million keys cost, beside torchrl's?

    python benchmarks/maps.py [--quick] [--json FILE]

Keys are rows of four floats, values rows of eight, all different in a batch, drawn at random
among those that are stored. A forest is filled by rollouts of one step each, of a tree whose vertices have four children.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import measure
import torch
from tensordict import TensorDict

import interop
import interop.maps
import interop.storages

KEYS = 1_000_000
QUICK_KEYS = 10_000
STEPS = 1_000
QUICK_STEPS = 100
BATCHES = 50  # different ones in turn: one alone would stay in the caches


class Ours:
    """The names of this library in one place, as torchrl has them."""

    TensorDictMap, QueryModule = interop.maps.TensorDictMap, interop.maps.QueryModule
    LazyTensorStorage = interop.storages.LazyTensorStorage
    MCTSForest = interop.MCTSForest


def filled(library: Any, keys: torch.Tensor) -> Any:
    """A map with all keys."""
    made = library.TensorDictMap(
        query_module=library.QueryModule(in_keys=["key"], index_key="_index"),
        storage=library.LazyTensorStorage(2 * len(keys)),
    )
    for some in keys.split(100_000):
        made[rows(some)] = values(len(some))
    return made


def rows(keys: torch.Tensor) -> TensorDict:
    return TensorDict({"key": keys}, [len(keys)])


def values(count: int) -> TensorDict:
    return TensorDict({"value": torch.rand(count, 8)}, [count])


def map_calls(library: Any, keys: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Every operation on maps of one library."""
    held = filled(library, keys)
    calls: dict[str, Callable[[], Any]] = {}
    for size in (1, 64, 4096):
        turns: Iterator[Any] = itertools.cycle(
            [(keys[torch.randperm(len(keys))[:size]], values(size)) for _ in range(BATCHES)]
        )

        def read(turns: Iterator[Any] = turns) -> Any:
            return held[rows(next(turns)[0])]

        def write(turns: Iterator[Any] = turns) -> None:
            some, new = next(turns)
            held[rows(some)] = new

        def contains(turns: Iterator[Any] = turns) -> Any:
            return held.contains(rows(next(turns)[0]))

        calls |= {f"map, read {size}": read, f"map, write {size}": write, f"map, contains {size}": contains}
    return calls


def forest_calls(library: Any, keys: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Every operation on forests of one library."""
    steps = STEPS if len(keys) == KEYS else QUICK_STEPS
    number = torch.arange(steps)[:, None]
    zeros, root = torch.zeros(1, 1), TensorDict({"observation": torch.tensor(0)})
    rollouts = [
        TensorDict({"observation": at // 4, "action": at % 4, "next": {"observation": at + 1, "reward": zeros}}, [1])
        for at in number
    ]

    def extended() -> Any:
        forest = library.MCTSForest(max_size=steps)
        for rollout in rollouts:
            forest.extend(rollout)
        return forest

    filled = extended()
    return {
        f"forest, {steps} rollouts of one step": extended,
        f"forest, tree of {steps} vertices": lambda: filled.get_tree(root),
        f"forest, both for {steps} steps": lambda: extended().get_tree(root),
    }


def main() -> int:
    options = measure.arguments("Maps from keys to tensordicts, beside torchrl's").parse_args()
    libraries: dict[str, Any] = {measure.OURS: Ours}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchrl: ModuleType | None = measure.rival("torchrl.data")
        if torchrl:
            libraries["torchrl"] = torchrl
    keys = torch.rand(QUICK_KEYS if options.quick else KEYS, 4)
    timings = []
    for made in (map_calls, forest_calls):
        sides = {side: made(library, keys) for side, library in libraries.items()}
        timings += [
            measure.compare(work, {side: each[work] for side, each in sides.items()}, quick=options.quick)
            for work in sides[measure.OURS]
        ]
    measure.report(f"maps of {len(keys):,} keys", timings, {}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
