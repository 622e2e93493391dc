"""Inside `jax.jit`: is writing steps and drawing slices of trajectories as fast as with flashbax, and does it grow?

Four environments write one step each, then 8 slices of 32 are drawn, as one jitted call with a donated state and as a
`scan` of 100. The rival is flashbax's trajectory buffer: it draws windows regardless of where episodes end, so its answer
is another one; ours never crosses an end. Ours is measured for each law of starts.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import Array
from scans import donated_calls, scanned

import fbuf

SLICES, LENGTH, LANES, STEPS = 8, 32, 4, 100
STARTS = {"uniform": fbuf.Uniform(), "per trajectory": fbuf.PerTrajectory(), "prioritized": fbuf.Prioritized()}
flashbax = measure.rival("flashbax")


def step_of(buffer: fbuf.Buffer) -> Callable[[Any, Array, Any], tuple[Any, Any]]:
    def step(state: Any, key: Array, rows: Any) -> tuple[Any, Any]:
        state, _slots = buffer.extend(state, rows)
        state, items, draw = buffer.sample(state, key, SLICES * LENGTH)
        return state, (items, draw.mask)

    return step


def ours(starts: Any, capacity: int) -> tuple[Any, Any, Any]:
    ends = fbuf.Trajectories(terminated="done")
    buffer = fbuf.Buffer(capacity // LANES, fbuf.Slices(LENGTH, starts), lanes=(LANES,), trajectories=ends)
    state = buffer.init({"obs": jnp.zeros(32), "done": jnp.zeros((), bool)})
    extend = jax.jit(buffer.extend, donate_argnums=0)
    done = np.random.default_rng(0).random((1_000, LANES)) < 1 / 200
    rows = {"obs": jnp.zeros((1_000, LANES, 32)), "done": jnp.asarray(done)}
    for _ in range(capacity // LANES // 1_000 + 1):
        state, _slots = extend(state, rows)
    return state, step_of(buffer), jax.tree.map(lambda leaf: leaf[:1], rows)


def theirs(capacity: int) -> tuple[Any, Any, Any]:
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=LANES,
        sample_batch_size=SLICES,
        sample_sequence_length=LENGTH,
        period=1,
        min_length_time_axis=LENGTH,
        max_length_time_axis=capacity // LANES,
    )
    state = buffer.init({"obs": jnp.zeros(32), "done": jnp.zeros((), bool)})
    add = jax.jit(buffer.add, donate_argnums=0)
    rows = {"obs": jnp.zeros((LANES, 1_000, 32)), "done": jnp.zeros((LANES, 1_000), bool)}
    for _ in range(capacity // LANES // 1_000 + 1):
        state = add(state, rows)

    def step(state: Any, key: Array, rows: Any) -> tuple[Any, Any]:
        state = buffer.add(state, rows)
        return state, buffer.sample(state, key).experience

    return state, step, jax.tree.map(lambda leaf: leaf[:, :1], rows)


def one_scan(state: Any, step: Any, rows: Any) -> Callable[[], None]:
    return donated_calls(state, scanned(step, STEPS), rows)


def main() -> None:
    options = measure.arguments("Inside jit: slices of trajectories").parse_args()
    capacity = 20_000 if options.quick else 1_000_000
    timings, values = [], {}
    for form, build in (("", donated_calls), (", scan", one_scan)):
        for name, starts in STARTS.items():
            calls = {measure.OURS: build(*ours(starts, capacity))}
            if flashbax is not None:
                calls["flashbax"] = build(*theirs(capacity))
            timings.append(measure.compare(f"add 4 + slices, {name}{form}", calls, quick=options.quick))
    sizes = (10**4, 10**5) if options.quick else (10**4, 10**7)
    for name, starts in STARTS.items():
        grown = {str(size) if size > sizes[0] else measure.OURS: donated_calls(*ours(starts, size)) for size in sizes}
        timing = measure.compare(name, grown, quick=options.quick)
        values[f"growth of add 4 + slices, {name}, {sizes[0]} to {sizes[-1]} items"] = timing.ratio[str(sizes[-1])]
    measure.report(f"Inside jit, {SLICES} slices of {LENGTH}, {capacity} items", timings, values, options.json)


if __name__ == "__main__":
    main()
