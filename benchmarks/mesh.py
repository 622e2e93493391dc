"""A buffer over the devices of a mesh: what does a step cost, and what moves between devices?

A step of training in one jitted call with a donated state: 256 new rows, a batch of 256, its new priorities. By 1, 2, 4
and 8 devices of the CPU, which share the cores of this machine: so more devices cannot be faster here, and the time shows
what the exchange costs. Beside it one `Buffer`. Collectives and their bytes are counted in the compiled program, and the
script fails where they are not what `fbuf.Sharded` says.
"""

import math
import os
import re
from collections.abc import Callable
from typing import Any

DEVICES = (1, 2, 4, 8)
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={max(DEVICES)}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  # the flag counts only before JAX starts
import measure  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import fbuf  # noqa: E402

BATCH, WIDTH = 256, 32
MOST_FILLED = 1 << 16  # rows written at once before the steps
ITEM = np.zeros(WIDTH, np.float32)
COLLECTIVE = re.compile(
    r"= (\w+)\[([\d,]*)\]\S* (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)\("
)


def step(buffer: Any) -> Callable[..., Any]:
    """A step of a `Buffer`, or of a `Sharded` one over a mesh."""

    def stepped(state: Any, rows: Any, key: Any) -> Any:
        state, _ = buffer.extend(state, rows)
        state, batch, draw = buffer.sample(state, key, BATCH)
        state = buffer.update(state, draw.slots, abs(batch[:, 0]) + 1e-3)
        return state, (batch, draw)  # XLA leaves out results that nothing needs

    return jax.jit(stepped, donate_argnums=0)


def call_of(buffer: Any, rows: Any, capacity: int) -> tuple[Callable[[], None], str]:
    """A call of one step on a full buffer, and the text of its program."""
    extend = jax.jit(buffer.extend, donate_argnums=0)
    state, keys, count = buffer.init(ITEM), jax.random.split(jax.random.key(0), 64), 0
    many = np.tile(np.asarray(rows), (min(capacity, MOST_FILLED) // BATCH, 1))
    for _ in range(capacity // len(many)):
        state, _slots = extend(state, many)
    run = step(buffer).lower(state, rows, keys[0]).compile()

    def call() -> None:
        nonlocal state, count
        count += 1
        state, drawn = run(state, rows, keys[count % 64])
        jax.block_until_ready((state, drawn))

    return call, run.as_text()


def moved(text: str, devices: int) -> tuple[int, int]:
    """Collectives of a program and the bytes of the arrays that they reduce or gather."""
    found = []
    for kind, shape, name in COLLECTIVE.findall(text):
        entries = math.prod(int(size) for size in shape.split(",") if size)
        bytes_each = np.dtype({"u32": "u4", "f32": "f4"}[kind]).itemsize
        found.append(entries * bytes_each * (devices if name == "reduce-scatter" else 1))
    return len(found), sum(found)


def expected(law: str, devices: int) -> tuple[int, int]:
    """What the documentation of `fbuf.Sharded` says, of rows of `WIDTH` words and three that say how they were drawn."""
    numbers, gathered = 3 * devices, 2 * BATCH
    if law == "balanced":
        return 2, 4 * (numbers + gathered)
    return 4, 4 * (numbers + BATCH * (WIDTH + 3) + gathered + 1)


def main() -> None:
    options = measure.arguments("What does a step of a buffer over a mesh cost, and what moves?").parse_args()
    capacity = 1 << (13 if options.quick else 20)
    rule = fbuf.Prioritized()
    rows = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype(np.float32)
    timings, values = [], {}
    alone, _ = call_of(fbuf.Buffer(capacity, rule), rows, capacity)
    for law in ("global", "balanced"):
        for devices in DEVICES:
            mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
            given = jax.device_put(rows, NamedSharding(mesh, P("data")))
            on_mesh = fbuf.Sharded(fbuf.Buffer(capacity, rule), law=law).over(mesh)  # type: ignore[arg-type]
            call, text = call_of(on_mesh, given, capacity)
            found = moved(text, devices)
            name = f"{law}, {devices} device{'s' * (devices > 1)}"
            if devices > 1 and found != expected(law, devices):
                raise SystemExit(f"{name}: {found} collectives and bytes, {expected(law, devices)} are written down")
            values |= {f"{name}: collectives": found[0], f"{name}: bytes": found[1]}
            timings.append(measure.compare(name, {measure.OURS: call, "one Buffer": alone}, quick=options.quick))
    title = f"Over a mesh: {BATCH} rows of {4 * WIDTH} bytes written, drawn and updated a step; capacity {capacity}"
    measure.report(title, timings, values, options.json)


if __name__ == "__main__":
    main()
