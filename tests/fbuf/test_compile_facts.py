"""What compiled programs do: one trace, no copy of what is large, memory for one buffer and not two."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import Buffer, BufferState, Prioritized, Uniform, importance_weights
from fbuf.fusion import computed_once

pytestmark = pytest.mark.usefixtures("device")

CAPACITY, BATCH, TURNS = 100_000, 32, 10
ITEM = {"observation": np.zeros(8, np.float32), "reward": np.zeros((), np.float32), "done": np.zeros((), np.bool_)}
BUFFERS = [
    Buffer(CAPACITY),
    Buffer(CAPACITY // 4, lanes=(4,)),
    Buffer(CAPACITY, Prioritized()),
    Buffer(CAPACITY // 4, Prioritized(stratified=True, new_items="highest_stored"), lanes=(4,)),
]


def batch_of(buffer: Buffer, *shape: int) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*shape, *buffer.lanes, *leaf.shape), leaf.dtype), ITEM)


def turn(buffer: Buffer, state: BufferState, batch: Any, key: jax.Array, beta: Any) -> tuple[BufferState, jax.Array]:
    """One turn of a training loop: write, draw, learn, and give what was drawn new priorities."""
    state, _ = buffer.extend(state, batch)
    state, items, draw = buffer.sample(state, key, BATCH)
    loss = jnp.abs(items["reward"] - items["observation"].sum(-1))
    if isinstance(buffer.sampler, Prioritized):
        state = buffer.update(state, draw.slots, loss)
    return state, jnp.sum(loss * importance_weights(draw, beta))


def compiled_extend(buffer: Buffer, rows: int) -> Any:
    """The program of one donated extension."""
    state = jax.eval_shape(lambda: buffer.init(ITEM))
    return jax.jit(buffer.extend, donate_argnums=0).lower(state, batch_of(buffer, rows)).compile()


def compiled_update(buffer: Buffer, rows: int) -> Any:
    """The program of one donated update."""
    state = jax.eval_shape(lambda: buffer.init(ITEM))
    slots, priorities = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32))
    return jax.jit(buffer.update, donate_argnums=0).lower(state, slots, priorities).compile()


def compiled_loop(buffer: Buffer, rows: int) -> Any:
    """The program of a donated scan over turns of a training loop."""
    state = jax.eval_shape(lambda: buffer.init(ITEM))

    def loop(state: BufferState, batches: Any, keys: jax.Array) -> tuple[BufferState, jax.Array]:
        return jax.lax.scan(lambda state, x: turn(buffer, state, *x, 0.4), state, (batches, keys))

    keys = jax.ShapeDtypeStruct((TURNS, 2), np.uint32)
    return jax.jit(loop, donate_argnums=0).lower(state, batch_of(buffer, TURNS, rows), keys).compile()


def bytes_of(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def copied(program: Any) -> list[int]:
    """How many elements each copy in the compiled text moves."""
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* copy(?:-start)?\(", program.as_text())
    return [int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes]


PROGRAMS = [
    *((compiled_extend, buffer) for buffer in BUFFERS),
    *((compiled_update, buffer) for buffer in BUFFERS[2:]),
    # With highest_stored a loop copies the priorities in each turn, as its docstring says.
    *((compiled_loop, buffer) for buffer in BUFFERS if getattr(buffer.sampler, "new_items", "") != "highest_stored"),
]
OFTEN = {*((build, buffer, 1) for build, buffer in PROGRAMS), (compiled_loop, BUFFERS[2], BATCH)}
OFTEN |= {(build, BUFFERS[3], BATCH) for build in (compiled_extend, compiled_update)}


@pytest.mark.parametrize(
    ("build", "buffer", "rows"),
    [
        pytest.param(*each, rows, marks=() if (*each, rows) in OFTEN else pytest.mark.slow)
        for each in PROGRAMS
        for rows in (1, 2, BATCH)
    ],
    ids=lambda what: what.__name__ if callable(what) else str(what),
)
def test_a_donated_buffer_is_written_in_place_and_nothing_that_grows_with_it_is_copied(
    build: Callable[[Buffer, int], Any], buffer: Buffer, rows: int
) -> None:
    program = build(buffer, rows)
    state = bytes_of(jax.eval_shape(lambda: buffer.init(ITEM)))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == pytest.approx(state, rel=1e-3)
    more = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert more < 0.1 * state
    assert max(copied(program), default=0) < CAPACITY // 8  # the lowest level of inner nodes has capacity / 7


def test_copies_are_seen_where_there_are_some() -> None:
    buffer = BUFFERS[0]
    state = jax.eval_shape(lambda: buffer.init(ITEM))
    kept = jax.jit(buffer.extend).lower(state, batch_of(buffer, BATCH)).compile()
    assert max(copied(kept)) >= CAPACITY
    assert kept.memory_analysis().alias_size_in_bytes == 0


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), Prioritized(new_items="highest_stored")], ids=repr)
def test_a_donated_state_is_gone_after_extend_and_update(sampler: Any) -> None:
    buffer = Buffer(6, sampler)
    extend, update = (jax.jit(what, donate_argnums=0) for what in (buffer.extend, buffer.update))
    before = jax.jit(buffer.init)(np.float32(0))
    after, slots = extend(before, np.ones(3, np.float32))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
    if isinstance(sampler, Prioritized):
        last = update(after, slots, np.ones(3, np.float32))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(after))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(last))


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()], ids=repr)
def test_a_state_fresh_from_init_or_clear_may_be_donated(sampler: Any) -> None:
    buffer = Buffer(6, sampler)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    state, _ = extend(buffer.init(np.float32(0)), np.ones(2, np.float32))
    state, _ = extend(buffer.clear(state), np.ones(2, np.float32))
    assert state.ring.size == 2


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized()], ids=repr)
def test_one_trace_serves_every_fill_level_and_every_beta(sampler: Any) -> None:
    buffer, traces = Buffer(20, sampler), []

    @jax.jit
    def counted(state: BufferState, batch: Any, key: jax.Array, beta: Any) -> tuple[BufferState, jax.Array]:
        traces.append(beta)
        return turn(buffer, state, batch, key, beta)

    state, batch = buffer.init(ITEM), jax.tree.map(lambda leaf: np.ones((3, *leaf.shape), leaf.dtype), ITEM)
    for i, beta in enumerate(np.linspace(0.4, 1, 12, dtype=np.float32)):
        state, _ = counted(state, batch, jax.random.key(i), beta)
    assert state.ring.written[0] == 36
    assert len(traces) == 1


def test_one_trace_serves_every_alpha() -> None:
    rule, traces = Prioritized(), []

    @jax.jit
    def counted(state: Any, alpha: Any) -> Any:
        traces.append(alpha)
        return rule.reweight(state, alpha)

    state = rule.init(9)
    for alpha in np.linspace(0, 1, 5, dtype=np.float32):
        state = counted(state, alpha)
        assert state.alpha == alpha
    assert len(traces) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
def test_a_value_computed_once_is_the_same_value(dtype: Any) -> None:
    values = np.asarray([0, 1, 2**31 - 1, 5e8, 77], dtype)
    signed = values if dtype is np.uint32 else np.concatenate([values, -values])
    kept = jax.jit(computed_once)(signed)
    np.testing.assert_array_equal(np.asarray(kept).view(np.uint32), signed.view(np.uint32))


@pytest.mark.parametrize("batch_size", [16, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sampler",
    [Uniform(), pytest.param(Prioritized(), marks=pytest.mark.slow), Prioritized(new_items="highest_stored")],
    ids=repr,
)
def test_outside_of_programs_a_second_call_compiles_nothing(sampler: Any, batch_size: int) -> None:
    buffer = Buffer(5000, sampler, lanes=(2,))
    state, _ = buffer.extend(buffer.init(np.float32(0)), np.zeros((8, 2), np.float32))
    compiled: list[str] = []

    def each_method(state: BufferState) -> None:
        _, _, draw = buffer.sample(state, jax.random.key(0), batch_size)
        buffer.read(state, draw.slots)
        if isinstance(sampler, Prioritized):
            buffer.update(state, draw.slots, jnp.ones(batch_size))

    each_method(state)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **more: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        each_method(state)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled
