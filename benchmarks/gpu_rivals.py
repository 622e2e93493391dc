"""What a node of a CUDA graph and a call cost on the card, and flashbax's buffers beside ours on it."""

import functools
from collections.abc import Callable
from typing import Any

import gpu_parts
import jax
import jax.numpy as jnp
import jit_slices
import measure
import numpy as np
from gpu_parts import ALPHA, STEPS, Part, Place
from jax import Array
from scans import Step, donated_calls, scanned

import fbuf

NODES = 5, 20, 60
flashbax = measure.rival("flashbax")


def nodes(place: Place) -> Part:
    """Microseconds of one more node in a program, and of a call: programs of 5 to 60 small kernels, one after the other."""

    def chain(count: int, held: Array) -> Array:
        for _ in range(count):
            held = jax.lax.optimization_barrier(held * 1.5 + 1)
        return held

    held, timings = jnp.zeros(1_024), []
    for count in NODES:
        run = jax.jit(functools.partial(chain, count))
        timings.append(
            place.compare(f"{count} kernels, a call", {measure.OURS: lambda run=run: run(held).block_until_ready()})
        )
    times = [each.us[measure.OURS] for each in timings]
    slope, call = np.polyfit(NODES, times, 1)
    return timings, {"us a node": float(slope), "us a call without nodes": float(call)}


def measured(place: Place) -> Part:
    """Prioritized cycles of 256 and 65,536, and slices, each in a scan, beside flashbax."""
    capacity, batches = (10_000, (32, 256)) if place.quick else (1_000_000, (256, 65_536))
    timings = []
    for batch in batches:
        rows = jnp.asarray(np.random.default_rng(0).random((batch, 32)), jnp.float32)
        buffer = fbuf.Buffer(capacity, fbuf.Prioritized(alpha=ALPHA, stratified=True))
        calls = {measure.OURS: gpu_parts.scan_of_cycles(buffer, rows)}
        if flashbax is not None:
            calls["flashbax"] = _their_cycles(capacity, rows)
        timings.append(place.compare(f"prioritized cycle of {batch} of {capacity}, in a scan", calls, STEPS))
    for name, starts in jit_slices.STARTS.items():
        calls = {measure.OURS: _scan(*jit_slices.ours(starts, capacity))}
        if flashbax is not None:
            calls["flashbax"] = _scan(*jit_slices.theirs(capacity))
        timings.append(place.compare(f"add 4 + slices, {name}, in a scan", calls, STEPS))
    return timings, {}


def _their_cycles(capacity: int, rows: Array) -> Callable[[], None]:
    """As `gpu_parts.scan_of_cycles`; probabilities are not used, or XLA would copy their tree in each step."""
    batch = len(rows)
    buffer = flashbax.make_prioritised_item_buffer(
        capacity, batch, batch, add_batches=True, priority_exponent=ALPHA, device=jax.default_backend()
    )
    state = buffer.init(rows[0])
    add, update = (jax.jit(each, donate_argnums=0) for each in (buffer.add, buffer.set_priorities))
    for first in range(0, capacity, batch):
        state = add(state, rows)
        slots = (jnp.arange(batch) + first) % capacity
        state = update(state, slots, 10.0 ** jax.random.uniform(jax.random.key(first), (batch,), minval=-3, maxval=0))

    def step(state: Any, key: Array, rows: Array) -> tuple[Any, Any]:
        state = buffer.add(state, rows)
        drawn = buffer.sample(state, key)
        errors = jnp.abs(drawn.experience.reshape(batch, -1)[:, 0]) + 1e-3
        return buffer.set_priorities(state, drawn.indices, errors), drawn.experience

    return _scan(state, step, rows)


def _scan(state: Any, step: Step, rows: Any) -> Callable[[], None]:
    return donated_calls(state, scanned(step, STEPS), rows)
