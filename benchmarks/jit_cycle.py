"""Inside `jax.jit`: is one step of replay faster than with flashbax?

Prioritized: draw a batch, give it new priorities that depend on what was read. Uniform: add rows, draw a batch. Each as
one jitted call with a donated state, and as one jitted `scan` of 100 such steps. The rival is flashbax's item buffer:
like ours it keeps rows that are drawn one by one. Both draw one row per equal share of the total priority. Beside single
calls, what one would write in NumPy (`plain_numpy.py`). No torch: its threads would slow both.
Measured twice: as JAX dispatches by default, and with `jax_cpu_enable_async_dispatch` off, in a process of its own.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import Array
from plain_numpy import NUMPY, Numpy, PrioritizedNumpy
from scans import donated_calls, scanned

import fbuf

BATCH = 256
STEPS = 100  # in one scan
ALPHA = 0.6
flashbax = measure.rival("flashbax")


@dataclasses.dataclass(frozen=True)
class Side:
    """One contender: how to make a full buffer, and one step on it. A step returns what a learner would use."""

    full: Callable[[], Any]  # () -> state
    step: Callable[[Any, Array, Any], tuple[Any, Any]]  # (state, key, new rows) -> state, drawn


def ours_prioritized(capacity: int, rows: Any) -> Side:
    buffer = fbuf.Buffer(capacity, fbuf.Prioritized(alpha=ALPHA, stratified=True))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    update = jax.jit(buffer.update, donate_argnums=0)

    def full() -> Any:
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
        for _ in range(-(-capacity // _length(rows))):
            state, _slots = extend(state, rows)
        return update(state, jnp.arange(capacity), priorities(capacity))

    def step(state: Any, key: Array, new: Any) -> tuple[Any, Any]:
        state, batch, draw = buffer.sample(state, key, BATCH)
        return buffer.update(state, draw.slots, errors(batch)), (batch, draw.probability)

    return Side(full, step)


def flashbax_prioritized(capacity: int, rows: Any) -> Side:
    buffer = flashbax.make_prioritised_item_buffer(
        capacity, BATCH, BATCH, add_batches=True, priority_exponent=ALPHA, device=jax.default_backend()
    )
    extend = jax.jit(buffer.add, donate_argnums=0)
    update = jax.jit(buffer.set_priorities, donate_argnums=0)

    def full() -> Any:
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
        for _ in range(-(-capacity // _length(rows))):
            state = extend(state, rows)
        return update(state, jnp.arange(capacity), priorities(capacity))

    def step(state: Any, key: Array, new: Any) -> tuple[Any, Any]:
        drawn = buffer.sample(state, key)
        state = buffer.set_priorities(state, drawn.indices, errors(drawn.experience))
        return state, (drawn.experience, drawn.probabilities)

    return Side(full, step)


def ours_cycle(capacity: int, rows: Any) -> Side:
    side, buffer = ours_prioritized(capacity, rows), fbuf.Buffer(capacity, fbuf.Prioritized(ALPHA, stratified=True))
    return Side(side.full, lambda state, key, new: side.step(buffer.extend(state, new)[0], key, new))


def flashbax_cycle(capacity: int, rows: Any) -> Side:
    side = flashbax_prioritized(capacity, rows)
    add = flashbax.make_prioritised_item_buffer(capacity, BATCH, BATCH, add_batches=True).add
    return Side(side.full, lambda state, key, new: side.step(add(state, new), key, new))


def without_probabilities(make: Callable[[int, Any], Side]) -> Callable[[int, Any], Side]:
    """Nothing of a step depends on the probabilities. Where they are returned, XLA copies flashbax's tree in each step."""

    def made(capacity: int, rows: Any) -> Side:
        side = make(capacity, rows)

        def step(state: Any, key: Array, new: Any) -> tuple[Any, Any]:
            state, (batch, _probability) = side.step(state, key, new)
            return state, batch

        return Side(side.full, step)

    return made


def ours_uniform(capacity: int, rows: Any) -> Side:
    buffer = fbuf.Buffer(capacity)
    extend = jax.jit(buffer.extend, donate_argnums=0)

    def full() -> Any:
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
        for _ in range(-(-capacity // _length(rows))):
            state, _slots = extend(state, rows)
        return state

    def step(state: Any, key: Array, new: Any) -> tuple[Any, Any]:
        state, _slots = buffer.extend(state, new)
        state, batch, _draw = buffer.sample(state, key, BATCH)
        return state, batch

    return Side(full, step)


def flashbax_uniform(capacity: int, rows: Any) -> Side:
    buffer = flashbax.make_item_buffer(capacity, BATCH, BATCH, add_batches=True)
    extend = jax.jit(buffer.add, donate_argnums=0)

    def full() -> Any:
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
        for _ in range(-(-capacity // _length(rows))):
            state = extend(state, rows)
        return state

    def step(state: Any, key: Array, new: Any) -> tuple[Any, Any]:
        state = buffer.add(state, new)
        return state, buffer.sample(state, key).experience

    return Side(full, step)


CYCLE = {measure.OURS: ours_cycle, "flashbax": flashbax_cycle}


def priorities(count: int) -> Array:
    """Log-uniform from 1e-3 to 1."""
    return jnp.asarray(10.0 ** np.random.default_rng(0).uniform(-3, 0, count), jnp.float32)


def errors(batch: Array) -> Array:
    """A stand-in for a temporal-difference error: it needs what was read, and costs next to nothing."""
    return jnp.abs(batch.reshape(BATCH, -1)[:, 0].astype(jnp.float32)) + 1e-3


def _length(rows: Any) -> int:
    return jax.tree.leaves(rows)[0].shape[0]


def one_call(side: Side, keys: Iterator[Array], new: Any) -> Callable[[], None]:
    return donated_calls(side.full(), side.step, new, keys)


def one_scan(side: Side, keys: Iterator[Array], new: Any) -> Callable[[], None]:
    return one_call(Side(side.full, scanned(side.step, STEPS)), keys, new)


def by_hand(prioritized: bool, capacity: int, rows: Array, new: Array) -> Callable[[], None]:
    """A step in NumPy."""
    kept, added = {"x": np.asarray(rows)}, {"x": np.asarray(new)}
    if not prioritized:
        ring = Numpy(kept, capacity)

        def step() -> None:
            ring.extend(added)
            ring.sample(BATCH)

        return step
    weighed = PrioritizedNumpy(kept, capacity, ALPHA, 0.4)

    def weighed_step() -> None:
        if len(new) == BATCH:
            weighed.extend(added)
        drawn = weighed.sample(BATCH)
        weighed.update(drawn["index"], abs(drawn["x"].reshape(BATCH, -1)[:, 0]) + 1e-3)

    return weighed_step


def capacities(quick: bool) -> dict[str, int]:
    return {"32 floats": 20_000 if quick else 1_000_000, "4x84x84 bytes": 2_000 if quick else 20_000}


def questions(quick: bool) -> Iterator[tuple[str, dict[str, Callable[[int, Any], Side]], int, Any, Any]]:
    """(name, contenders, capacity, rows to fill with, rows to add in a step)."""
    draw = np.random.default_rng(0)
    floats = draw.normal(size=(10_000, 32)).astype(np.float32)
    images = draw.integers(0, 255, (1_000, 4, 84, 84), np.uint8)
    prioritized = {measure.OURS: ours_prioritized, "flashbax": flashbax_prioritized}
    uniform = {measure.OURS: ours_uniform, "flashbax": flashbax_uniform}
    for (name, capacity), rows in zip(capacities(quick).items(), (floats, images), strict=True):
        yield f"prioritized sample + update, {name}", prioritized, capacity, rows, rows[:1]
        if name == "32 floats":
            cycle = f"prioritized add {BATCH} + sample + update"
            yield f"{cycle}, {name}", CYCLE, capacity, rows, rows[:BATCH]
            bare = {contender: without_probabilities(make) for contender, make in CYCLE.items()}
            yield f"{cycle} without probabilities, {name}", bare, capacity, rows, rows[:BATCH]
        for count in (1, 16, 256):
            yield f"add {count} + sample, {name}", uniform, capacity, rows, rows[:count]


def measured(quick: bool) -> list[measure.Timing]:
    timings = []
    for name, makers, capacity, rows, new in questions(quick):
        rows, new = jnp.asarray(rows), jnp.asarray(new)
        sides = {
            contender: make(capacity, rows)
            for contender, make in makers.items()
            if contender == measure.OURS or flashbax is not None
        }
        for form, build in (("", one_call), (", scan", one_scan)):
            keys = itertools.cycle(jax.random.split(jax.random.key(0), 64))
            calls = {contender: build(side, keys, new) for contender, side in sides.items()}
            if build is one_call:  # 100 of a plain prioritized step take so long that fewer rounds are left for all
                calls[NUMPY] = by_hand(name.startswith("prioritized"), capacity, rows, new)
            timings.append(measure.compare(name + form, calls, quick=quick))
    return timings


def both_ways(options: argparse.Namespace) -> list[measure.Timing]:
    """The setting counts only before JAX starts, so each way has its own process."""
    timings = []
    with tempfile.TemporaryDirectory() as folder:
        for way in ("default", "sync"):
            file = pathlib.Path(folder) / f"{way}.json"
            command = [sys.executable, __file__, "--dispatch", way, "--json", str(file)]
            subprocess.run(command + ["--quick"] * options.quick, check=True, stdout=subprocess.DEVNULL)
            rows = json.loads(file.read_text())["timings"]
            timings += [measure.Timing.of(row, f"{row['name']} [{way}]") for row in rows]
    return timings


def main() -> None:
    parser = measure.arguments("Inside jax.jit: is one step of replay faster than with flashbax?")
    parser.add_argument("--dispatch", choices=("default", "sync"), help="only this way, in this process")
    options = parser.parse_args()
    if options.dispatch == "sync":
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    timings = measured(options.quick) if options.dispatch else both_ways(options)
    sizes = ", ".join(f"{capacity} of {name}" for name, capacity in capacities(options.quick).items())
    measure.report(f"Inside jit, batch {BATCH}, a scan is {STEPS} steps; rows: {sizes}", timings, {}, options.json)


if __name__ == "__main__":
    main()
