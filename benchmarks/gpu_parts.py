"""What the GPU benchmark measures: floors of the card, the cycle of replay inside jit, growth, and calls through torch."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import plain
import torch
from jax import Array
from scans import donated_calls, scanned

import fbuf

ALPHA, BETA = 0.6, 0.4
STEPS = 16  # in one scan, and in one chain of calls
Part = tuple[list[measure.Timing], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Place:
    """The device, by torch's name, and whether sizes are small."""

    device: str
    quick: bool

    def wait(self) -> None:
        """Until the device has done all that either library has asked for: JAX and torch each queue in order."""
        (jnp.zeros(()) + 1).block_until_ready()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def compare(self, name: str, contenders: dict[str, Callable[[], Any]], each: int = 1) -> measure.Timing:
        """Time per one of the `each` operations that a call does."""
        timing = measure.compare(name, contenders, quick=self.quick)
        rounds = {who: [us / each for us in times] for who, times in timing.rounds.items()}
        return dataclasses.replace(timing, us={who: us / each for who, us in timing.us.items()}, rounds=rounds)


def floors(place: Place) -> Part:
    """Bandwidth of a copy, and what single operations cost alone and chained."""
    size = (32 if place.quick else 1024) * 2**20
    source = torch.ones(size, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    array = jnp.ones(size // 4)
    copied = jax.jit(lambda x: x + 1)
    by_torch = place.compare(
        "copy, torch", {measure.OURS: functools.partial(_then_wait, place, lambda: target.copy_(source))}
    )
    by_jax = place.compare("copy, JAX", {measure.OURS: lambda: copied(array).block_until_ready()})
    rates = {
        f"{each.name}, GB/s read and written": 2 * size / each.us[measure.OURS] / 1e3 for each in (by_torch, by_jax)
    }
    timings = [by_torch, by_jax]
    count, capacity = (4_096, 100_000) if place.quick else (65_536, 1_000_000)
    draw = np.random.default_rng(0)
    slots = jnp.asarray(draw.integers(0, capacity, (STEPS, count)), jnp.int32)
    values, rows = jnp.asarray(draw.random(capacity, np.float32)), jnp.ones((capacity, 32))
    keys = jax.random.split(jax.random.key(0), STEPS)
    single: dict[str, tuple[Callable[[Any, Any], Any], Any, Any]] = {
        "nothing": (lambda held, _: held + 1, jnp.zeros(8), keys),
        f"gather {count} numbers": (lambda held, at: held.at[at].get(mode="promise_in_bounds"), values, slots),
        f"gather {count} rows of 128 bytes": (lambda held, at: held.at[at].get(mode="promise_in_bounds"), rows, slots),
        f"sort {count} numbers": (lambda held, at: jnp.sort(at), values, slots),
        f"{count} random numbers": (lambda held, key: jax.random.uniform(key, (count,)), values, keys),
        f"running sum of {capacity}": (lambda held, at: jnp.cumsum(held + at[0]), values, slots),
    }
    for name, (work, held, given) in single.items():
        timings.append(place.compare(f"{name}, one call", {measure.OURS: _one(work, held, given)}))
        timings.append(place.compare(f"{name}, in a scan", {measure.OURS: _scanned(work, held, given)}, STEPS))
    step = jax.jit(lambda held: held + 1, donate_argnums=0)
    chained = [jnp.zeros(8)]

    def chain() -> None:
        for _ in range(STEPS):
            chained[0] = step(chained[0])
        chained[0].block_until_ready()

    timings.append(place.compare("nothing, in a chain of calls", {measure.OURS: chain}, STEPS))
    return timings, rates


def _one(work: Callable[[Any, Any], Any], held: Any, given: Any) -> Callable[[], Any]:
    step, first = jax.jit(work), given[0]
    return lambda: step(held, first).block_until_ready()


def _scanned(work: Callable[[Any, Any], Any], held: Any, given: Any) -> Callable[[], Any]:
    @jax.jit
    def steps(held: Any, given: Any) -> Any:
        return jax.lax.scan(lambda _, each: (None, work(held, each)), None, given)[1]

    return lambda: steps(held, given).block_until_ready()


def _then_wait(place: Place, call: Callable[[], Any]) -> None:
    call()
    if place.device == "cuda":
        torch.cuda.synchronize()


def cycle(place: Place, bandwidth: float) -> Part:
    """`extend`, `sample` and update by priority against the time that its bytes take, and against plain torch.

    `bandwidth` in GB/s, what is read and what is written both counted.
    """
    small, large = ((10_000, 512), (500, 32)) if place.quick else ((1_000_000, 65_536), (100_000, 4_096))
    timings, values = [], {}
    for row, dtype, (capacity, batch) in (((32,), "float32", small), ((4, 84, 84), "uint8", large)):
        size = int(np.prod(row)) * np.dtype(dtype).itemsize
        name = f"{capacity} rows of {size} bytes, batch {batch}"
        buffer = fbuf.Buffer(capacity, fbuf.Prioritized(alpha=ALPHA, stratified=True))
        rows = jnp.asarray(np.random.default_rng(0).integers(0, 255, (batch, *row)), dtype)
        calls = {
            measure.OURS: scan_of_cycles(buffer, rows),
            "ours, calls": chain_of_cycles(buffer, rows),
            plain.TORCH: plain_cycles(place, rows, capacity),
        }
        timing = place.compare(f"cycle, {name}", calls, STEPS)
        timings.append(timing)
        # Rows are read and written by `extend` and by `sample`; a priority is written, read, written.
        floor = batch * (4 * size + 3 * 4) / bandwidth / 1e3
        values[f"byte floor of a cycle, us, {name}"] = floor
        values[f"cycle over its byte floor, {name}"] = timing.us[measure.OURS] / floor
        values[f"cycle of calls over its byte floor, {name}"] = timing.us["ours, calls"] / floor
    return timings, values


def filled(buffer: fbuf.Buffer, rows: Any) -> fbuf.BufferState:
    """A full buffer of copies of rows, with log-uniform priorities where it has priorities."""
    state = jax.jit(buffer.init)(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows))
    extend, update = (jax.jit(method, donate_argnums=0) for method in (buffer.extend, buffer.update))
    count = len(jax.tree.leaves(rows)[0])
    for first in range(0, buffer.capacity, count):
        state, _slots = extend(state, rows)
        priorities = 10.0 ** jax.random.uniform(jax.random.key(first), (count,), minval=-3, maxval=0)
        state = update(state, (jnp.arange(count) + first) % buffer.capacity, priorities)
    return state


def one_cycle(buffer: fbuf.Buffer, state: fbuf.BufferState, key: Array, rows: Array) -> tuple[Any, Array]:
    """The new priorities need what was read, as those of a learner do."""
    state, _slots = buffer.extend(state, rows)
    state, batch, draw = buffer.sample(state, key, rows.shape[0])
    errors = jnp.abs(batch.reshape(rows.shape[0], -1)[:, 0].astype(jnp.float32)) + 1e-3
    return buffer.update(state, draw.slots, errors), batch


def cycles(buffer: fbuf.Buffer, state: fbuf.BufferState, key: Array, rows: Array) -> tuple[Any, Array]:
    """In one scan."""
    return scanned(functools.partial(one_cycle, buffer), STEPS)(state, key, rows)


def scan_of_cycles(buffer: fbuf.Buffer, rows: Array) -> Callable[[], None]:
    return donated_calls(filled(buffer, rows), functools.partial(cycles, buffer), rows)


def chain_of_cycles(buffer: fbuf.Buffer, rows: Array) -> Callable[[], None]:
    """As a loop in Python does it, which waits for nothing before its end."""
    step = jax.jit(functools.partial(one_cycle, buffer), donate_argnums=0)
    held, keys = [filled(buffer, rows)], _keys()

    def call() -> None:
        for _ in range(STEPS):
            held[0], batch = step(held[0], next(keys), rows)
        jax.block_until_ready((held[0], batch))

    return call


def plain_cycles(place: Place, rows: Array, capacity: int) -> Callable[[], None]:
    given = {"x": torch.from_numpy(np.array(rows)).to(place.device)}
    ring = plain.PrioritizedTorch(given, capacity, ALPHA, BETA)
    count = len(given["x"])

    def call() -> None:
        for _ in range(STEPS):
            ring.extend(given)
            drawn = ring.sample(count)
            ring.update(drawn["index"], drawn["x"].reshape(count, -1)[:, 0].float().abs() + 1e-3)
        if place.device == "cuda":
            torch.cuda.synchronize()

    return call


def growth(place: Place) -> Part:
    """One prioritized sample of rows of four bytes, by the number of items."""
    sizes = (10**4, 10**5) if place.quick else (10**4, 10**5, 10**6, 10**7, 10**8)
    timings, values = [], {}
    states = {}
    for size in sizes:
        buffer = fbuf.Buffer(size, fbuf.Prioritized(alpha=ALPHA))
        states[size] = buffer, filled(buffer, jnp.zeros(min(size, 10**6)))
    for batch, (form, build, each) in itertools.product(
        (256, 4_096 if place.quick else 65_536), (("", _sample, 1), (f", {STEPS} in a scan", _samples, STEPS))
    ):
        name = f"sample {batch}{form}"
        labels = {size: measure.OURS if size == sizes[0] else str(size) for size in sizes}
        timing = place.compare(name, {labels[size]: build(*states[size], batch) for size in sizes}, each)
        values[f"growth of {name}, {sizes[0]} to {sizes[-1]} items"] = (
            timing.us[labels[sizes[-1]]] / timing.us[measure.OURS]
        )
        for size in sizes:
            taken = {measure.OURS: [us / measure.MICROSECOND for us in timing.rounds[labels[size]]]}
            timings.append(measure.of_rounds(f"{name}, {size} items", taken))
    return timings, values


def _sample(buffer: fbuf.Buffer, state: fbuf.BufferState, batch: int) -> Callable[[], Any]:
    keys = _keys()
    sample = jax.jit(lambda state, key: buffer.sample(state, key, batch)[1:])
    return lambda: jax.block_until_ready(sample(state, next(keys)))


def _samples(buffer: fbuf.Buffer, state: fbuf.BufferState, batch: int) -> Callable[[], Any]:
    keys = _keys()

    @jax.jit
    def samples(state: fbuf.BufferState, key: Array) -> Any:
        def body(nothing: None, key: Array) -> tuple[None, Any]:
            return None, buffer.sample(state, key, batch)[1:]

        return jax.lax.scan(body, None, jax.random.split(key, STEPS))[1]

    return lambda: jax.block_until_ready(samples(state, next(keys)))


def _keys() -> Iterator[Array]:
    return itertools.cycle(jax.random.split(jax.random.key(0), 64))


def torch_calls(place: Place) -> Part:
    """Through torch on the device: when a call returns, and when what it asked for is done."""
    import torch_rows

    import interop

    capacity, batches = (10_000, (256,)) if place.quick else (1_000_000, (256, 4_096, 65_536))
    some = torch_rows.transitions(min(capacity, 50_000)).to(place.device)

    def filled_buffer(data: Any) -> Any:
        storage = data.LazyTensorStorage(capacity, device=place.device)
        buffer = data.TensorDictPrioritizedReplayBuffer(
            alpha=ALPHA, beta=BETA, storage=storage, priority_key="td_error", batch_size=min(batches)
        )
        torch_rows.fill(buffer, some, capacity)
        buffer.sample()
        return buffer

    buffers = {measure.OURS: filled_buffer(interop)}
    if torchrl := measure.rival("torchrl.data"):
        try:
            buffers["torchrl"] = filled_buffer(torchrl)
        except Exception as error:  # its priority trees do not load beside every torch
            print(f"torchrl is left out: {type(error).__name__}: {error}")
    ring = plain.PrioritizedTorch(plain.tensors(some), capacity, ALPHA, BETA)
    timings = []
    for batch in batches:
        rows = torch_rows.transitions(batch).to(place.device)
        errors = torch.rand(batch, device=place.device) + 1e-3
        work = {side: _calls(each, each.update_priority, rows, errors, batch) for side, each in buffers.items()}
        work[plain.TORCH] = _calls(ring, ring.update, plain.tensors(rows), errors, batch)
        for name in work[measure.OURS]:
            calls = {side: each[name] for side, each in work.items()}
            timings += returned_and_done(place, f"{name}, batch {batch}", calls)
    return timings, {}


def _calls(
    buffer: Any, update: Callable[..., Any], rows: Any, errors: torch.Tensor, batch: int
) -> dict[str, Callable[[], Any]]:
    """The operations of a prioritized buffer of any library, or written by hand, by name."""
    index = buffer.sample(batch)["index"]

    def whole() -> None:
        buffer.extend(rows)
        update(buffer.sample(batch)["index"], errors)

    return {
        "extend": functools.partial(buffer.extend, rows),
        "sample": functools.partial(buffer.sample, batch),
        "update_priority": functools.partial(update, index, errors),
        "extend + sample + update_priority": whole,
    }


def returned_and_done(place: Place, name: str, calls: dict[str, Callable[[], Any]]) -> list[measure.Timing]:
    """Two lines: seconds until each call is back, and until the device has done its work. Each starts on an idle device."""
    returned: dict[str, list[float]] = {who: [] for who in calls}
    done: dict[str, list[float]] = {who: [] for who in calls}
    for turn in range(-3, 5 if place.quick else 41):
        for who in list(calls) if turn % 2 else list(calls)[::-1]:
            place.wait()
            start = time.perf_counter()
            calls[who]()
            back = time.perf_counter()
            place.wait()
            if turn >= 0:  # before that: compiling, filling caches
                returned[who].append(back - start)
                done[who].append(time.perf_counter() - start)
    return [measure.of_rounds(f"{name}: returned", returned), measure.of_rounds(f"{name}: done", done)]
