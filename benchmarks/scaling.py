"""How do time, memory and traces grow with items, leaves, rows and batches, inside `jax.jit` and through torch?

Times of a prioritized sample and update from 10^4 to 10^8 items of 4 bytes; of 1 to 64 leaves in rows of 1 KiB; of batches
to 262,144; of rows of 4 bytes to 1 MiB. Peak memory of steps that write in place; traces over many calls. A size for which
there is no memory is left out, and said to be.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import torch
from jax import Array
from tensordict import TensorDict

import fbuf
import interop

BATCH = 256
RULE = fbuf.Prioritized(alpha=0.6)
A_SLOT = 24  # bytes that an item of 4 bytes and its priorities take, of one buffer
ROOM = 2 << 30  # bytes that are left to others
ITEMS = (10**4, 10**5, 10**6, 10**7, 10**8)
LEAVES = (1, 4, 16, 64)
BATCHES = (256, 4_096, 65_536, 262_144)
ROWS = (4, 64, 1_024, 16_384, 1 << 20)  # bytes

Calls = dict[str, Callable[[], Any]]

# ------------------------------------------------------------------ buffers, and what is done with them


def priorities(count: int) -> np.ndarray:
    """Log-uniform over three decades."""
    return (10.0 ** np.random.default_rng(0).uniform(-3, 0, count)).astype(np.float32)


def in_jit(capacity: int) -> Calls:
    """A full buffer of 4-byte rows."""
    buffer = fbuf.Buffer(capacity, RULE)
    state = buffer.init(jnp.zeros(()))
    extend, update = (jax.jit(method, donate_argnums=0) for method in (buffer.extend, buffer.update))
    for slots in np.array_split(np.arange(capacity, dtype=np.int32), 10):
        state, _ = extend(state, jnp.zeros(slots.size))
    for slots in np.array_split(np.arange(capacity, dtype=np.int32), 10):
        state = update(state, slots, priorities(slots.size))
    held, keys = [state], itertools.cycle(jax.random.split(jax.random.key(0), 64))
    batches = itertools.cycle(np.random.default_rng(1).integers(capacity, size=(64, BATCH)).astype(np.int32))
    values = priorities(BATCH)
    sample = jax.jit(lambda state, key: buffer.sample(state, key, BATCH)[1:])

    @jax.jit
    def samples(state: fbuf.BufferState, key: Array) -> Any:  # so that the cost of a call does not hide the growth
        def body(nothing: None, key: Array) -> tuple[None, Any]:
            return None, buffer.sample(state, key, BATCH)[1:]

        return jax.lax.scan(body, None, jax.random.split(key, 100))[1]

    def updated() -> None:
        held[0] = jax.block_until_ready(update(held[0], next(batches), values))

    return {
        f"sample {BATCH}": lambda: jax.block_until_ready(sample(held[0], next(keys))),
        f"sample {BATCH}, 100 in a scan": lambda: jax.block_until_ready(samples(held[0], next(keys))),
        f"update {BATCH}": updated,
    }


def through_torch(capacity: int) -> Calls:
    """The same through torch."""
    storage, sampler = interop.LazyTensorStorage(capacity), interop.PrioritizedSampler(capacity, 0.6, 0.4)
    buffer = interop.ReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)
    for slots in np.array_split(np.arange(capacity), 10):
        buffer.extend(torch.zeros(slots.size))
    for slots in np.array_split(np.arange(capacity), 10):
        buffer.update_priority(torch.from_numpy(slots), torch.from_numpy(priorities(slots.size)))
    buffer.sample()
    drawn = torch.from_numpy(np.random.default_rng(1).integers(capacity, size=(64, BATCH)))
    batches, values = itertools.cycle(drawn), torch.from_numpy(priorities(BATCH))
    even = interop.ReplayBuffer(storage=storage, batch_size=BATCH)

    def cycle() -> None:
        buffer.update_priority(next(batches), values)
        buffer.sample()

    return {
        f"torch: sample {BATCH}": buffer.sample,
        f"torch: update {BATCH} and sample": cycle,  # an update alone may only be noted down
        f"torch: sample {BATCH} evenly": even.sample,
    }


def of_rows(door: str, size: int, leaves: int, batch: int, capacity: int) -> Calls:
    """Writes and even draws of rows of so many bytes in so many float32 leaves."""
    width = max(size // (4 * leaves), 1)
    rows = {f"{leaf}": np.ones((batch, width), np.float32) for leaf in range(leaves)}
    if door == "torch":
        tensors = TensorDict({name: torch.from_numpy(leaf) for name, leaf in rows.items()}, [batch])
        kept = interop.TensorDictReplayBuffer(storage=interop.LazyTensorStorage(capacity), batch_size=batch)
        for _ in range(-(-capacity // batch)):
            kept.extend(tensors)
        return {"torch: extend": lambda: kept.extend(tensors), "torch: sample": kept.sample}
    buffer, keys = fbuf.Buffer(capacity), itertools.cycle(jax.random.split(jax.random.key(0), 64))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    sample = jax.jit(lambda state, key: buffer.sample(state, key, batch)[1])  # not the state, which would be copied
    held, given = [buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))], jax.device_put(rows)
    for _ in range(-(-capacity // batch)):
        held[0] = extend(held[0], given)[0]

    def extended() -> None:
        held[0] = jax.block_until_ready(extend(held[0], given)[0])

    return {
        "extend": extended,
        "sample": lambda: jax.block_until_ready(sample(held[0], next(keys))),
    }


# ------------------------------------------------------------------ growth


def compared(
    sizes: Sequence[int], unit: str, build: Callable[[int], Calls], quick: bool
) -> tuple[list[measure.Timing], dict[str, float]]:
    """Each call at all sizes, taking turns; the smallest stands where ours would, so that ratios are growth."""
    made = {size: build(size) for size in sizes}
    timings, values = [], {}
    for name in made[sizes[0]]:
        labels = {size: measure.OURS if size == sizes[0] else str(size) for size in sizes}
        timing = measure.compare(name, {labels[size]: made[size][name] for size in sizes}, quick=quick)
        if len(sizes) > 1:
            values[f"growth of {name}, {sizes[0]} to {sizes[-1]} {unit}"] = timing.ratio[labels[sizes[-1]]]
        for size in sizes:
            line = {measure.OURS: timing.us[labels[size]]}
            rounds = {measure.OURS: timing.rounds.get(labels[size], [])}
            timings.append(measure.Timing(f"{name}, {size} {unit}", line, {}, rounds))
    return timings, values


def that_fit(sizes: Sequence[int], needed: Callable[[int], int]) -> list[int]:
    """The sizes for which there is memory."""
    free = fbuf.free_memory.of_machine()
    fit = [size for size in sizes if free is None or needed(size) + ROOM < free]
    for size in sizes:
        if size not in fit:
            print(f"left out: {size} would need {fbuf.memory_plan.size_text(needed(size))}")
    return fit


def growth(quick: bool) -> tuple[list[measure.Timing], dict[str, float]]:
    """Over items, leaves, batches and bytes of a row."""
    timings: list[measure.Timing] = []
    values: dict[str, float] = {}

    def add(sizes: Sequence[int], unit: str, build: Callable[[int], Calls]) -> None:
        lines, found = compared(sizes, unit, build, quick)
        timings.extend(lines)
        values.update(found)

    items = that_fit(ITEMS[:2] if quick else ITEMS, lambda size: 3 * A_SLOT * size)
    for build in (in_jit, through_torch):
        add(items, "items", build)
    for door in ("jit", "torch"):
        leaves = LEAVES[::3] if quick else LEAVES
        add(leaves, "leaves", lambda count: of_rows(door, 1_024, count, BATCH, 4_096))  # noqa: B023
        batches = that_fit(BATCHES[:2] if quick else BATCHES, lambda size: 2_048 * size)
        add(batches, "rows", lambda batch: of_rows(door, 64, 4, batch, 2 * max(BATCHES[:2] if quick else BATCHES)))  # noqa: B023
        sizes = that_fit(ROWS[:4] if quick else ROWS, lambda size: 4 * 512 * size)
        add(sizes, "bytes a row", lambda size: of_rows(door, size, 1, 64, 512))  # noqa: B023
    return timings, values


def above_the_gather(quick: bool) -> tuple[list[measure.Timing], dict[str, float]]:
    """What a whole step inside jit costs a row beyond reading it, in microseconds, at 4,096 rows of 32 floats."""
    capacity, batch = (100_000 if quick else 1_000_000), 4_096
    rows = jnp.asarray(np.random.default_rng(0).random((batch, 32), np.float32))
    gather = jax.jit(lambda items, slots: items.at[slots].get(mode="promise_in_bounds"))
    slots = jnp.asarray(np.random.default_rng(1).integers(capacity, size=batch, dtype=np.int32))
    timings, values = [], {}
    for name, rule, take in (("uniform", fbuf.Uniform(), extend_sample), ("prioritized", RULE, extend_sample_update)):
        buffer, keys = fbuf.Buffer(capacity, rule), itertools.cycle(jax.random.split(jax.random.key(0), 64))
        write = jax.jit(buffer.extend, donate_argnums=0)
        step = jax.jit(lambda *given: take(buffer, *given, batch), donate_argnums=0)  # noqa: B023
        held = [buffer.init(rows[0])]
        for _ in range(-(-capacity // batch)):
            held[0] = write(held[0], rows)[0]

        def stepped() -> None:
            held[0], *drawn = step(held[0], next(keys), rows)  # noqa: B023
            jax.block_until_ready((held[0], drawn))  # noqa: B023

        calls = {measure.OURS: stepped, "gather": lambda: jax.block_until_ready(gather(held[0].items, slots))}  # noqa: B023
        timings.append(measure.compare(f"{name} step, 4096 rows", calls, quick=quick))
        us = timings[-1].us
        values[f"us a row above the gather, {name} step, 4096 rows"] = (us[measure.OURS] - us["gather"]) / batch
    return timings, values


# ------------------------------------------------------------------ memory and traces inside jit


def peak_memory(step: Callable[[fbuf.Buffer, fbuf.BufferState, Array, Array], Any], rule: Any) -> float:
    """Peak memory of a jitted step with a donated state, over that of the state: 1 is in place, 2 holds a copy.

    As the compiler states it: nothing is run.
    """
    buffer = fbuf.Buffer(1_000_000, rule)
    state = jax.eval_shape(buffer.init, jax.ShapeDtypeStruct((32,), jnp.float32))
    rows = jax.ShapeDtypeStruct((BATCH, 32), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = jax.jit(lambda *given: step(buffer, *given), donate_argnums=0).lower(state, key, rows).compile()
    memory = compiled.memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return (used - memory.alias_size_in_bytes) / held


def extend(buffer: fbuf.Buffer, state: fbuf.BufferState, key: Array, rows: Array) -> Any:
    return buffer.extend(state, rows)


def extend_sample(buffer: fbuf.Buffer, state: fbuf.BufferState, key: Array, rows: Array, batch: int = BATCH) -> Any:
    state, _slots = buffer.extend(state, rows)
    return buffer.sample(state, key, batch)


def sample_extend(buffer: fbuf.Buffer, state: fbuf.BufferState, key: Array, rows: Array) -> Any:
    state, batch, draw = buffer.sample(state, key, BATCH)
    return buffer.extend(state, rows), batch, draw


def extend_sample_update(
    buffer: fbuf.Buffer, state: fbuf.BufferState, key: Array, rows: Array, batch: int = BATCH
) -> Any:
    state, _slots = buffer.extend(state, rows)
    state, read, draw = buffer.sample(state, key, batch)
    return buffer.update(state, draw.slots, jnp.abs(read[:, 0])), read, draw


def traces(calls: int) -> int:
    """How often a whole step is traced over many calls, from an empty buffer past a full one, with beta annealed."""
    buffer = fbuf.Buffer(1_000, RULE)
    count = 0

    def step(state: fbuf.BufferState, key: Array, beta: Array, rows: Array) -> Any:
        nonlocal count
        count += 1
        state, _slots = buffer.extend(state, rows)
        state, batch, draw = buffer.sample(state, key, BATCH)
        return buffer.update(state, draw.slots, jnp.abs(batch)), fbuf.importance_weights(draw, beta)

    jitted = jax.jit(step, donate_argnums=0)
    state = jax.jit(buffer.init)(jnp.zeros(()))
    for turn, key in enumerate(jax.random.split(jax.random.key(0), calls)):
        state, _weights = jitted(state, key, jnp.float32(0.4 + 0.6 * turn / calls), jnp.full(16, turn, jnp.float32))
    assert int(state.ring.size) == min(1_000, 16 * calls)
    return count


def main() -> None:
    options = measure.arguments("Growth with items, leaves, rows and batches; memory of a write; traces").parse_args()
    timings, values = growth(options.quick)
    more, above = above_the_gather(options.quick)
    timings, values = timings + more, values | above
    for label, rule in (("uniform", fbuf.Uniform()), ("prioritized", RULE)):
        values[f"peak memory / state, {label} extend"] = peak_memory(extend, rule)
        values[f"peak memory / state, {label} extend, sample"] = peak_memory(extend_sample, rule)
        values[f"peak memory / state, {label} sample, extend"] = peak_memory(sample_extend, rule)
    values["peak memory / state, prioritized extend, sample, update"] = peak_memory(extend_sample_update, RULE)
    values["traces"] = traces(20 if options.quick else 200)
    measure.report("Growth, memory and traces, inside jit and through torch", timings, values, options.json)


if __name__ == "__main__":
    main()
