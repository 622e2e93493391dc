"""What compiled programs of slices do: one trace, the same under scan and vmap, no copies, no cost of size."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import (
    Buffer,
    BufferState,
    Draw,
    PerTrajectory,
    Prioritized,
    Shuffled,
    Slices,
    Trajectories,
    importance_weights,
)
from tests.fbuf.test_compile_facts import bytes_of, copied
from tests.fbuf.trajectory_model import ITEM, rows

pytestmark = pytest.mark.usefixtures("device")

WHERE = Trajectories("terminated", "truncated", "id")
WIDE = {**ITEM, "observation": np.zeros(8, np.float32)}
BUFFERS = [
    Buffer(100_000, Slices(8), trajectories=WHERE),
    Buffer(25_000, Slices(8, PerTrajectory(), burn_in=2), trajectories=WHERE, lanes=(4,)),
    Buffer(100_000, Slices(8, Prioritized(), least=3), trajectories=WHERE),
]
MORE = [
    Buffer(25_000, Slices(8), trajectories=WHERE, lanes=(4,)),
    Buffer(100_000, Slices(8, least=1), trajectories=WHERE),
    Buffer(100_000, Slices(8, PerTrajectory()), trajectories=WHERE),
    Buffer(25_000, Slices(8, Prioritized()), trajectories=WHERE, lanes=(4,)),
    Buffer(25_000, Slices(8, Prioritized(), least=1), trajectories=WHERE, lanes=(4,)),
    Buffer(100_000, Slices(8, Shuffled()), trajectories=WHERE),
    Buffer(100_000, Slices(8, PerTrajectory(Shuffled())), trajectories=WHERE),
]


def turn(buffer: Buffer, state: BufferState, batch: Any, key: jax.Array) -> tuple[BufferState, tuple[Any, Draw]]:
    """One turn of a training loop."""
    state, _ = buffer.extend(state, batch)
    state, items, draw = buffer.sample(state, key, 64)
    if isinstance(buffer.sampler, Slices) and isinstance(buffer.sampler.starts, Prioritized):
        state = buffer.update(state, draw.starts, importance_weights(draw, 0.5) + 1)
    return state, (items, draw)


def shapes(buffer: Buffer, *lead: int) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*lead, *buffer.lanes, *leaf.shape), leaf.dtype), WIDE)


def extension(buffer: Buffer, count: int) -> Any:
    """The program of one donated extension."""
    state = jax.eval_shape(lambda: buffer.init(WIDE))
    return jax.jit(buffer.extend, donate_argnums=0).lower(state, shapes(buffer, count)).compile()


def loop(buffer: Buffer, count: int) -> Any:
    """The program of a donated scan over turns of a training loop."""

    def step(state: BufferState, x: Any) -> tuple[BufferState, Any]:
        state, (items, draw) = turn(buffer, state, *x)
        return state, jnp.sum(items["observation"] * draw.mask[..., None])

    state, keys = jax.eval_shape(lambda: buffer.init(WIDE)), jax.ShapeDtypeStruct((10, 2), np.uint32)
    run = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs), donate_argnums=0)
    return run.lower(state, (shapes(buffer, 10, count), keys)).compile()


FEW: list[Any] = [
    *((loop, buffer, 1) for buffer in BUFFERS[1:]),
    (extension, BUFFERS[0], 1),
    (extension, Buffer(100_000, trajectories=WHERE), 1),
]
MANY = [(build, buffer, count) for build in (extension, loop) for buffer in BUFFERS + MORE for count in (1, 2, 32)]


@pytest.mark.parametrize(
    ("build", "buffer", "count"),
    [*FEW, *(pytest.param(*each, marks=pytest.mark.slow) for each in MANY if each not in FEW)],
    ids=lambda what: getattr(what, "__name__", str(getattr(what, "sampler", what))),
)
def test_a_donated_buffer_is_written_in_place_and_nothing_that_grows_with_it_is_copied(
    build: Any, buffer: Buffer, count: int
) -> None:
    program, state = build(buffer, count), bytes_of(jax.eval_shape(lambda: buffer.init(WIDE)))
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == pytest.approx(state, rel=1e-3)
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.01 * state
    assert max(copied(program), default=0) < 10_000


@pytest.mark.parametrize(
    "starts", [pytest.param(None, marks=pytest.mark.slow), PerTrajectory(), Prioritized()], ids=str
)
def test_a_hundred_times_the_capacity_costs_no_more_than_the_levels_of_its_tree(starts: Any) -> None:
    rule = Slices(8) if starts is None else Slices(8, starts)
    small, large = (extension(Buffer(capacity, rule, trajectories=WHERE), 16) for capacity in (10_000, 1_000_000))
    levels = 5 / 3 if isinstance(starts, Prioritized) else 1  # a fan of eight
    flops = [program.cost_analysis()["flops"] for program in (small, large)]
    assert flops[1] <= flops[0] * levels
    assert large.memory_analysis().temp_size_in_bytes <= small.memory_analysis().temp_size_in_bytes * levels


RULES = [Slices(4), Slices(4, PerTrajectory(), least=2, burn_in=1), Slices(4, Prioritized(), least=3)]


def batches(seed: int, turns: int) -> Any:
    """Some writes of three rows in two lanes, stacked."""
    random = np.random.default_rng(seed)
    each = [rows(random.choice(list("....tui"), (3, 2))).batch(np.zeros((3, 2), np.int32), (2,)) for _ in range(turns)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


@pytest.mark.parametrize(
    "rule", [RULES[0], *(pytest.param(rule, marks=pytest.mark.slow) for rule in RULES[1:])], ids=str
)
def test_one_trace_serves_every_fill_level_and_scan_and_vmap_give_the_same(rule: Slices) -> None:
    buffer, traces = Buffer(8, rule, trajectories=WHERE, lanes=(2,)), []

    def counted(state: BufferState, x: Any) -> tuple[BufferState, Draw]:
        traces.append(0)
        state, (_, draw) = turn(buffer, state, *x)
        return state, draw

    keys = jax.random.split(jax.random.key(0), (3, 7))
    histories = jax.tree.map(lambda *leaves: np.stack(leaves), *(batches(seed, 7) for seed in range(3)))
    together = jax.jit(jax.vmap(lambda xs: jax.lax.scan(counted, buffer.init(ITEM), xs)[1]))((histories, keys))
    traces.clear()
    alone = jax.jit(counted)
    for i in range(3):
        state = buffer.init(ITEM)
        for j in range(7):
            state, draw = alone(state, (jax.tree.map(lambda leaf, i=i, j=j: leaf[i, j], histories), keys[i, j]))
            for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(draw), strict=True):
                np.testing.assert_allclose(a[i, j], b, rtol=1e-6)
    assert len(traces) == 1


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_fresh_or_cleared_state_may_be_donated(rule: Slices) -> None:
    buffer = Buffer(8, rule, trajectories=WHERE)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    batch = rows([["."]] * 3).batch(np.zeros(3, np.int32), ())
    before = buffer.init(ITEM)
    after, _ = extend(before, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.items, before.trajectories)))
    again, _ = extend(buffer.clear(after), batch)
    assert buffer.size(again) == 3
