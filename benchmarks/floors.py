"""What nothing on this machine can be faster than: copies, gathers of rows, a dispatch, a crossing, a tensordict, a seed.

The cost of an operation is at least its bytes over the bandwidth found here, and the number of its dispatches times the
cost of one. Gathers are of 256 random rows and of as many as make 16 MiB, from a table that no cache holds.
"""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import torch
from tensordict import TensorDict

import fbuf
from interop.data import bridge

MIB = 2**20
ROWS = (4, 128, 1_024, 28_224, MIB)  # bytes: a number, 32 floats, 256 floats, four frames of 84x84, an image in full
LEAVES = (1, 6, 16, 64)


def copies(quick: bool) -> dict[str, float]:
    """GB of memory copied in a second, read and written counted once, by one thread and by two that share the work."""
    values = {}
    for place, size in (("in cache", MIB // 4), ("out of cache", (32 if quick else 256) * MIB)):
        for threads in (1, 2):
            pieces = [(np.ones(size // threads, np.uint8), np.ones(size // threads, np.uint8)) for _ in range(threads)]
            values[f"copy {place}, {threads} threads, GB/s"] = size / _time_of_copying(pieces, quick) / 1e9
    return values


def _time_of_copying(pieces: list[tuple[np.ndarray, np.ndarray]], quick: bool) -> float:
    """Each thread copies its piece over and over, because starting threads takes longer than a small copy."""
    size = pieces[0][0].nbytes
    times = max(1, (64 if quick else 1_024) * MIB // size)

    def copy(source: np.ndarray, target: np.ndarray) -> None:
        for _ in range(times):
            np.copyto(target, source)  # releases the interpreter's lock

    def all_of_them() -> None:
        threads = [threading.Thread(target=copy, args=piece) for piece in pieces]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return min(measure.seconds(all_of_them) for _ in range(5)) / times


def gathers(quick: bool) -> list[measure.Timing]:
    """By NumPy, torch and XLA (`fbuf.storage.read`, which is ours)."""
    timings = []
    for size in ROWS:
        capacity = (64 if quick else 512) * MIB // size
        table = np.random.default_rng(0).integers(0, 255, (capacity, size), np.uint8)
        if size % 4 == 0:
            table = table.view(np.int32)
        timings += [
            measure.compare(f"gather {count} rows of {size} bytes", _gathers(table, count), quick=quick)
            for count in sorted({min(256, capacity), min(65_536, capacity, 16 * MIB // size)})
        ]
    return timings


def _gathers(table: np.ndarray, count: int) -> dict[str, Callable[[], Any]]:
    draws = [np.random.default_rng(seed).integers(0, len(table), count) for seed in range(16)]  # never the same rows
    by_torch, by_jax = torch.from_numpy(table), jnp.asarray(table)
    in_turn = {
        "NumPy": itertools.cycle(draws),
        "torch": itertools.cycle([torch.from_numpy(rows) for rows in draws]),
        measure.OURS: itertools.cycle([jnp.asarray(rows, jnp.int32) for rows in draws]),
    }
    calls: dict[str, Callable[[], Any]] = {
        "NumPy": lambda: table.take(next(in_turn["NumPy"]), axis=0),
        "torch": lambda: by_torch.index_select(0, next(in_turn["torch"])),
    }
    return {measure.OURS: lambda: fbuf.storage.read(by_jax, next(in_turn[measure.OURS])).block_until_ready()} | calls


def dispatches(quick: bool) -> list[measure.Timing]:
    """A jitted program that does next to nothing to so many arrays, its state donated."""
    timings = []
    for leaves in LEAVES:
        step = jax.jit(functools.partial(jax.tree.map, lambda leaf: leaf + 1), donate_argnums=0)
        state = [jnp.zeros(8) for _ in range(leaves)]

        def call(step: Any = step, held: list[Any] = [state]) -> None:  # noqa: B006  # the state, from call to call
            held[0] = jax.block_until_ready(step(held[0]))

        timings.append(measure.compare(f"one jitted call, {leaves} leaves", {measure.OURS: call}, quick=quick))
    return timings


def crossings(quick: bool) -> list[measure.Timing]:
    """Between torch and JAX without a copy, a tensordict by its checked and its unchecked way, and a seed."""
    tensor = torch.zeros(256, 32)
    array = bridge.to_jax(tensor)
    leaves = {str(number): torch.zeros(256, 4) for number in range(6)}
    generator = torch.Generator()
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "one array from torch to JAX": {
            measure.OURS: lambda: bridge.to_jax(tensor, copy=False),
            "from_dlpack": lambda: jax.dlpack.from_dlpack(tensor),
        },
        "one array from JAX to torch": {
            measure.OURS: lambda: bridge.to_torch(array, copy=False),
            "from_dlpack": lambda: torch.from_dlpack(array),
            "by NumPy": lambda: torch.from_numpy(np.asarray(array)),
        },
        "one tensordict of six leaves": {
            measure.OURS: lambda: TensorDict(leaves, [256], device="cpu"),
            "unchecked": lambda: TensorDict._new_unsafe(leaves, batch_size=torch.Size([256])),
        },
        "one seed from torch's generator": {
            measure.OURS: lambda: int(torch.randint(2**62, (), generator=generator)),
        },
        "one key from a seed": {measure.OURS: lambda: jax.random.key(7).block_until_ready()},
    }
    return [measure.compare(name, each, quick=quick) for name, each in calls.items()]


def main() -> None:
    options = measure.arguments("What nothing on this machine can be faster than").parse_args()
    values = copies(options.quick)
    timings = [*gathers(options.quick), *dispatches(options.quick), *crossings(options.quick)]
    title = 'Floors; "ours" is what this library calls, or the only way there is'
    measure.report(title, timings, values, options.json)


if __name__ == "__main__":
    main()
