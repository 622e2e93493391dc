"""Programs of every public operation, for counting what a GPU would run. Arrays are described, none is made."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

import fbuf

CAPACITY, LENGTH, LANES, STEPS = 1_000_000, 32, 64, 1_000
BATCHES = 256, 65_536


@dataclass(frozen=True)
class Program:
    """A function and the shapes that it is compiled for.

    Attributes:
        name: the operation.
        batch: entries of a call.
        function: of `operands`; its first one is donated if `writes`.
    """

    name: str
    batch: int
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    writes: bool = True

    def __str__(self) -> str:
        return f"{self.name}, {self.batch:,}"

    def lowered(self, place: Callable[[Any], Any] = lambda each: each) -> Any:
        """Lowered for CUDA; `place` puts the shapes on a device."""
        program = jax.jit(self.function, donate_argnums=(0,) if self.writes else ())
        return program.trace(*jax.tree.map(place, self.operands)).lower(lowering_platforms=("cuda",))


SAMPLERS: dict[str, Any] = {
    "Uniform": fbuf.Uniform(),
    "Prioritized": fbuf.Prioritized(stratified=True),
    "Shuffled": fbuf.Shuffled(),
    "Fifo": fbuf.Fifo(),
    "Slices": fbuf.Slices(LENGTH),
    "Slices(Shuffled)": fbuf.Slices(LENGTH, fbuf.Shuffled()),
    "Slices(Prioritized)": fbuf.Slices(LENGTH, fbuf.Prioritized(stratified=True)),
    "Slices(PerTrajectory)": fbuf.Slices(LENGTH, fbuf.PerTrajectory()),
}
_KEY = jax.eval_shape(lambda: jax.random.key(0))
_MARKS = fbuf.Trajectories(terminated="done", first="first")


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _items(*lead: int) -> dict[str, Any]:
    return {"x": _array(*lead, 32), "done": _array(*lead, dtype=jnp.bool_), "first": _array(*lead, dtype=jnp.bool_)}


def _of_buffer(name: str, buffer: fbuf.Buffer, batch: int, items: Callable[..., Any] = _items) -> Iterator[Program]:
    state, rows = jax.eval_shape(buffer.init, items()), items(batch)
    sampled = functools.partial(_sampled, buffer, batch)
    yield Program(f"{name}: extend", batch, lambda state, rows: buffer.extend(state, rows)[0], (state, rows))
    yield Program(f"{name}: sample", batch, sampled, (state, _KEY))
    if buffer.sampler.keeps_priorities:
        slots, priorities = _array(batch, dtype=jnp.int32), _array(batch)
        yield Program(f"{name}: update", batch, buffer.update, (state, slots, priorities))
    cycle = functools.partial(_cycle, buffer, batch)
    yield Program(f"{name}: cycle", batch, cycle, (state, _KEY, rows))
    yield Program(f"{name}: scan of cycles", batch, functools.partial(_scan, cycle), (state, _KEY, rows))


def _of_sharded(name: str, sampler: Any, batch: int) -> Iterator[Program]:
    """A buffer over a mesh axis of one device: what each device of a larger one runs besides its communication."""
    sharded, parts, whole = fbuf.Sharded(fbuf.Buffer(CAPACITY, sampler)), PartitionSpec("data"), PartitionSpec()

    def over(function: Callable[..., Any], *given: PartitionSpec) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=AbstractMesh((1,), ("data",)), in_specs=given, out_specs=parts)

    def cycle(state: Any, key: Any, rows: Any) -> Any:
        state, _slots = sharded.extend(state, rows)
        state, items, draw = sharded.sample(state, key, batch)
        if sampler.keeps_priorities:
            state = sharded.update(state, draw.slots, jnp.abs(items["x"][..., 0]) + 1e-3)
        return state, items

    def sampled(state: Any, key: Any) -> Any:
        return sharded.sample(state, key, batch)[:2]

    state, rows = jax.eval_shape(over(lambda: sharded.init(_items()))), _items(batch)
    yield Program(f"{name}: extend", batch, over(lambda *each: sharded.extend(*each)[0], parts, parts), (state, rows))
    yield Program(f"{name}: sample", batch, over(sampled, parts, whole), (state, _KEY))
    yield Program(f"{name}: cycle", batch, over(cycle, parts, whole, parts), (state, _KEY, rows))


def _sampled(buffer: fbuf.Buffer, batch: int, state: Any, key: Any) -> Any:
    return buffer.sample(state, key, batch)


def _cycle(buffer: fbuf.Buffer, batch: int, state: Any, key: Any, rows: Any) -> Any:
    state, _slots = buffer.extend(state, rows)
    state, items, draw = buffer.sample(state, key, batch)
    if buffer.sampler.keeps_priorities:
        slots, first = draw.slots, jnp.abs(items["x"][..., 0]) + 1e-3
        if draw.mask is not None:
            assert draw.starts is not None
            slots, first = draw.starts, first[:, 0]
        state = buffer.update(state, slots, first)
    return state, items


def _scan(cycle: Callable[..., Any], state: Any, key: Any, rows: Any) -> Any:
    items = jax.eval_shape(cycle, state, key, rows)[1]

    def step(carry: Any, key: Any) -> Any:
        return cycle(carry[0], key, rows), None

    first = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), items)
    return jax.lax.scan(step, (state, first), jax.random.split(key, 16))[0]


def _ranked(*lead: int) -> dict[str, Any]:
    return {"x": _array(*lead, 32), "rank": _array(*lead)}


def _images(*lead: int) -> dict[str, Any]:
    frame = _array(*lead, 84, 84, 4, dtype=jnp.uint8)
    return {"obs": frame, "next_obs": frame, "done": _array(*lead, dtype=jnp.bool_)}


def _others(batch: int) -> Iterator[Program]:
    one = fbuf.Buffer(CAPACITY, SAMPLERS["Prioritized"])
    state = jax.eval_shape(one.init, _items())
    yield Program("Prioritized: add", batch, lambda state, item: one.add(state, item)[0], (state, _items()))
    yield Program("Prioritized: reweight", batch, one.sampler.reweight, (state.sampler, _array()))
    ranked = fbuf.Buffer(CAPACITY, writer=fbuf.HighestRanked("rank"))
    state = jax.eval_shape(ranked.init, _ranked())
    yield Program("HighestRanked: extend", batch, lambda *each: ranked.extend(*each)[0], (state, _ranked(batch)))
    mixture = fbuf.Mixture((fbuf.Buffer(CAPACITY), one), shares=(0.5, 0.5))
    states = jax.eval_shape(mixture.init, _items())

    def mixed(states: Any, key: Any) -> Any:
        return mixture.sample(states, key, batch)[1:]

    yield Program("Mixture: sample", batch, mixed, (states, _KEY), writes=False)
    table = fbuf.HashTable(CAPACITY)
    keys, values = _array(4, dtype=jnp.int32), _array(8)
    held = jax.eval_shape(table.init, keys, values)
    keys, values = _array(batch, 4, dtype=jnp.int32), _array(batch, 8)
    yield Program("HashTable: insert", batch, table.insert, (held, keys, values))
    yield Program("HashTable: update", batch, table.update, (held, keys, values))
    yield Program("HashTable: find", batch, table.find, (held, keys), writes=False)
    rewards, over = _array(STEPS, batch), _array(STEPS, batch, dtype=jnp.bool_)

    def n_step(rewards: Any, over: Any) -> Any:
        return fbuf.n_step(rewards, over, 0.99, 5, axis=0)

    def to_go(rewards: Any, over: Any) -> Any:
        return fbuf.returns_to_go(rewards, over, 0.99, axis=0)

    yield Program(f"n_step of {STEPS:,} steps", batch, n_step, (rewards, over), writes=False)
    yield Program(f"returns_to_go of {STEPS:,} steps", batch, to_go, (rewards, over), writes=False)


def programs(batch: int) -> list[Program]:
    """Those of each operation with so many entries a call."""
    found: list[Program] = []
    for name, sampler in SAMPLERS.items():
        ordered = isinstance(sampler, fbuf.Slices)
        buffer = fbuf.Buffer(CAPACITY, sampler, trajectories=_MARKS if ordered else None)
        found += _of_buffer(name, buffer, batch)
    if batch == min(BATCHES):
        pixels = fbuf.Buffer(100_000, trajectories=fbuf.Trajectories(terminated="done"), frames=fbuf.Frames(stack=4))
        found += _of_buffer("Frames", pixels, batch, _images)
    for name in ("Uniform", "Prioritized"):
        found += _of_sharded(f"Sharded({name})", SAMPLERS[name], batch)
    return [*found, *_others(batch)]
