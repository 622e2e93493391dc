"""Inside `jax.jit`: how do time, memory and traces grow?

Time of a prioritized sample from 10^4 to 10^7 items; peak memory of steps that write in place; traces over many calls.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import Array

import fbuf

BATCH = 256
RULE = fbuf.Prioritized(alpha=0.6)


def full(capacity: int) -> tuple[fbuf.Buffer, fbuf.BufferState]:
    """A full buffer of 4-byte rows with log-uniform priorities."""
    buffer = fbuf.Buffer(capacity, RULE)
    state = buffer.init(jnp.zeros(()))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for _ in range(10):
        state, _slots = extend(state, jnp.zeros(capacity // 10))
    values = 10.0 ** np.random.default_rng(0).uniform(-3, 0, capacity)
    priorities = jnp.asarray(values, jnp.float32)
    for some in jnp.split(jnp.arange(capacity), 10):
        state = jax.jit(buffer.update, donate_argnums=0)(state, some, priorities[some])
    return buffer, state


def one_sample(buffer: fbuf.Buffer, state: fbuf.BufferState) -> Callable[[], Any]:
    keys = itertools.cycle(jax.random.split(jax.random.key(0), 64))
    sample = jax.jit(lambda state, key: buffer.sample(state, key, BATCH)[1:])
    return lambda: jax.block_until_ready(sample(state, next(keys)))


def many_samples(buffer: fbuf.Buffer, state: fbuf.BufferState) -> Callable[[], Any]:
    """100 in one call, so that the cost of a call does not hide the growth."""
    keys = itertools.cycle(jax.random.split(jax.random.key(0), 64))

    @jax.jit
    def samples(state: fbuf.BufferState, key: Array) -> Any:
        def body(nothing: None, key: Array) -> tuple[None, Any]:
            return None, buffer.sample(state, key, BATCH)[1:]

        return jax.lax.scan(body, None, jax.random.split(key, 100))[1]

    return lambda: jax.block_until_ready(samples(state, next(keys)))


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


def extend_sample(buffer: fbuf.Buffer, state: fbuf.BufferState, key: Array, rows: Array) -> Any:
    state, _slots = buffer.extend(state, rows)
    return buffer.sample(state, key, BATCH)


def sample_extend(buffer: fbuf.Buffer, state: fbuf.BufferState, key: Array, rows: Array) -> Any:
    state, batch, draw = buffer.sample(state, key, BATCH)
    return buffer.extend(state, rows), batch, draw


def extend_sample_update(buffer: fbuf.Buffer, state: fbuf.BufferState, key: Array, rows: Array) -> Any:
    state, _slots = buffer.extend(state, rows)
    state, batch, draw = buffer.sample(state, key, BATCH)
    return buffer.update(state, draw.slots, jnp.abs(batch[:, 0])), batch, draw


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
    options = measure.arguments("Inside jit: growth with capacity, memory of a write, number of traces").parse_args()
    sizes = (10**4, 10**5) if options.quick else (10**4, 10**5, 10**6, 10**7)
    buffers = {size: full(size) for size in sizes}
    timings, values = [], {}
    for name, build in ((f"sample {BATCH}", one_sample), (f"sample {BATCH}, 100 in a scan", many_samples)):
        # the smallest stands where a rival's opponent would: ratios are growth
        labels = {size: measure.OURS if size == sizes[0] else str(size) for size in sizes}
        calls = {labels[size]: build(*buffers[size]) for size in sizes}
        timing = measure.compare(name, calls, quick=options.quick)
        values[f"growth of {name}, {sizes[0]} to {sizes[-1]} items"] = timing.ratio[labels[sizes[-1]]]
        timings += [
            measure.Timing(f"{name}, {size} items", {measure.OURS: timing.us[labels[size]]}, {}) for size in sizes
        ]
    for label, rule in (("uniform", fbuf.Uniform()), ("prioritized", RULE)):
        values[f"peak memory / state, {label} extend"] = peak_memory(extend, rule)
        values[f"peak memory / state, {label} extend, sample"] = peak_memory(extend_sample, rule)
        values[f"peak memory / state, {label} sample, extend"] = peak_memory(sample_extend, rule)
    values["peak memory / state, prioritized extend, sample, update"] = peak_memory(extend_sample_update, RULE)
    values["traces"] = traces(20 if options.quick else 200)
    measure.report("Growth, memory and traces inside jit", timings, values, options.json)


if __name__ == "__main__":
    main()
