"""Laws of all rules: programs work in place, and a step is the same in a loop, a `scan`, a `vmap` and with 64-bit types."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import (
    Buffer,
    Fifo,
    Frames,
    HighestRanked,
    Mixture,
    PerTrajectory,
    Prioritized,
    Shuffled,
    Slices,
    Trajectories,
    importance_weights,
)
from tests.fbuf.compiled import assert_in_place, copied, jit, program
from tests.fbuf.every_pair import items

pytestmark = pytest.mark.usefixtures("device")

ENDS: dict[str, Any] = {"trajectories": Trajectories("done")}
RANKED = HighestRanked("rank")
STORED = Prioritized(new_items="highest_stored", stratified=True)
KINDS: dict[str, Callable[[int], Any]] = {  # of so many items
    "uniform": lambda n: Buffer(n),
    "uniform in lanes": lambda n: Buffer(n // 4, lanes=(2, 2)),
    "prioritized": lambda n: Buffer(n, Prioritized()),
    "prioritized in lanes": lambda n: Buffer(n // 4, Prioritized(stratified=True), lanes=(4,)),
    "highest stored": lambda n: Buffer(n // 4, STORED, lanes=(4,)),
    "shuffled": lambda n: Buffer(n, Shuffled()),
    "drop last": lambda n: Buffer(n, Shuffled(drop_last=True)),
    "fifo": lambda n: Buffer(n // 2, Fifo(), lanes=(2,)),
    "highest ranked": lambda n: Buffer(n, Prioritized(), writer=RANKED),
    "trajectories": lambda n: Buffer(n // 2, lanes=(2,), **ENDS),
    "slices": lambda n: Buffer(n, Slices(2), **ENDS),
    "slices in lanes": lambda n: Buffer(n // 4, Slices(2, least=1), lanes=(4,), **ENDS),
    "slices by priority": lambda n: Buffer(n, Slices(2, Prioritized(), burn_in=1), **ENDS),
    "slices by priority in lanes": lambda n: Buffer(n // 4, Slices(3, Prioritized(), least=2), lanes=(2, 2), **ENDS),
    "slices once an epoch": lambda n: Buffer(n, Slices(2, Shuffled()), **ENDS),
    "slices per trajectory": lambda n: Buffer(n // 4, Slices(2, PerTrajectory(), burn_in=1), lanes=(4,), **ENDS),
    "slices per trajectory once an epoch": lambda n: Buffer(n, Slices(2, PerTrajectory(Shuffled())), **ENDS),
    "frames": lambda n: Buffer(n // 4, Prioritized(), frames=Frames(stack=2), lanes=(4,), **ENDS),
    "mixture": lambda n: Mixture((Buffer(n), Buffer(n, Prioritized())), (1, 2), drawn=True),
}
LARGE, SMALL, BATCH = 100_000, 40, 12


def some(often: tuple[str, ...], names: Any = KINDS) -> Any:
    """All kinds; but for those that are tested often the test is slow."""
    return pytest.mark.parametrize(
        "kind", [name if name in often else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


def rows(rule: Any, first: int, count: int) -> Any:
    """The rows from a time on, [count, *lanes, ...]; for a mixture those of each member."""
    if isinstance(rule, Mixture):
        return tuple(rows(buffer, first, count) for buffer in rule.buffers)
    ids = np.arange(first, first + count)[:, None] + 1000 * np.arange(rule.items_per_row)
    return jax.tree.map(lambda leaf: leaf.reshape(count, *rule.lanes, *leaf.shape[2:]), items(ids))


def step(rule: Any, state: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
    """One step of a training loop: write, draw, and give what was drawn new priorities."""
    if isinstance(rule, Mixture):
        state = tuple(buffer.extend(*each)[0] for buffer, *each in zip(rule.buffers, state, batch, strict=True))
        state, drawn, draw = rule.sample(state, key, BATCH)
        return rule.update(state, draw, 1.0 + drawn["x"] % 3), (drawn, draw)
    state, slots = rule.extend(state, batch)
    state, drawn, draw = rule.sample(state, key, BATCH)
    if rule.sampler.keeps_priorities:
        state = rule.update(
            state, draw.slots if draw.starts is None else draw.starts, importance_weights(draw, 0.4) + 1
        )
    where = rule.place(state, slots) if rule.trajectories else None
    return state, (slots, drawn, draw, where)


def loop(rule: Any, state: Any, batches: Any, keys: jax.Array) -> tuple[Any, Any]:
    return jax.lax.scan(lambda state, x: step(rule, state, *x), state, (batches, keys))


def shapes(rule: Any, count: int, *lead: int) -> tuple[Any, Any, Any]:
    """A state, rows and keys as shapes."""
    one = jax.eval_shape(lambda: rows(rule, 0, 1))
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*lead, count, *leaf.shape[1:]), leaf.dtype), one)
    return jax.eval_shape(lambda: rule.init(items(0))), batch, jax.ShapeDtypeStruct((*lead, 2), np.uint32)


# ------------------------------------------------------------------ what programs do


def assert_loops_are_kernels(text: str) -> None:
    loops = len(re.findall(r" while\(", text))
    assert 0 < loops == text.count('xla_cpu_small_call="true"')


IN_KERNELS = ("uniform", "prioritized", "prioritized in lanes", "slices", "slices by priority", "slices per trajectory")
OFTEN = (*IN_KERNELS, "shuffled", "highest ranked", "frames", "trajectories", "mixture")


@some(OFTEN, [name for name in KINDS if name != "highest stored"])
def test_a_donated_step_works_in_place_and_its_loops_are_one_kernel_each(kind: str, device: Any) -> None:
    rule = KINDS[kind](LARGE)
    for count in (1, 32) if kind in ("highest ranked", "prioritized") else (1,):
        given = shapes(rule, count)
        made = program(functools.partial(step, rule), *given)
        assert_in_place(made, given[0])
        if device.platform == "cpu" and kind in IN_KERNELS and count == 1:
            assert_loops_are_kernels(made.as_text())


# A program that both extends and updates copies the priorities, as the docstring of `Prioritized` says.
@pytest.mark.parametrize("count", [1, 32])
def test_with_the_highest_stored_priority_each_method_works_in_place(count: int) -> None:
    rule = Buffer(LARGE // 4, STORED, lanes=(4,))
    state, batch, _ = shapes(rule, count)
    slots, priorities = (jax.ShapeDtypeStruct((count,), kind) for kind in (np.int32, np.float32))
    assert_in_place(program(rule.extend, state, batch), state)
    assert_in_place(program(rule.update, state, slots, priorities), state)


@pytest.mark.parametrize(
    "count", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(32, marks=pytest.mark.slow)]
)
@some(("prioritized", "fifo", "slices by priority"), [name for name in KINDS if name != "highest stored"])
def test_a_donated_loop_works_in_place(kind: str, count: int) -> None:
    rule = KINDS[kind](LARGE)
    given = shapes(rule, count, 10)
    assert_in_place(program(functools.partial(loop, rule), *given), given[0])


def test_copies_are_seen_where_there_are_some() -> None:
    rule = KINDS["uniform"](LARGE)
    kept = jax.jit(functools.partial(step, rule)).lower(*shapes(rule, 1)).compile()
    assert max(copied(kept)) >= LARGE
    assert kept.memory_analysis().alias_size_in_bytes == 0


@some(("slices by priority",), ("slices", "slices by priority", "slices per trajectory"))
def test_a_hundred_times_the_items_cost_no_more_than_the_levels_of_a_tree(kind: str) -> None:
    small, large = (program(KINDS[kind](n).extend, *shapes(KINDS[kind](n), 16)[:2]) for n in (10_000, 1_000_000))
    levels = 5 / 3 if "priority" in kind else 1  # a fan of eight
    flops = [made.cost_analysis()["flops"] for made in (small, large)]
    assert flops[1] <= flops[0] * levels
    assert large.memory_analysis().temp_size_in_bytes <= small.memory_analysis().temp_size_in_bytes * levels


@pytest.mark.parametrize("count", [1, 256])
def test_a_step_has_so_few_operations_that_it_runs_in_the_thread_that_calls(count: int, device: Any) -> None:
    if device.platform != "cpu":
        pytest.skip("for the CPU")
    rule = Buffer(LARGE, Slices(8), **ENDS) if count == 1 else Buffer(LARGE)
    made = program(lambda state, batch, key: rule.sample(rule.extend(state, batch)[0], key, 256), *shapes(rule, count))
    assert made.cost_analysis()["flops"] < 1000


@some(("prioritized",))
def test_outside_of_programs_a_second_step_compiles_nothing(kind: str) -> None:
    rule = KINDS[kind](SMALL)
    state, key = rule.init(items(0)), jax.random.key(0)
    state, _ = step(rule, state, rows(rule, 0, 3), key)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **more: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        step(rule, state, rows(rule, 3, 3), key)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled


# ------------------------------------------------------------------ the same wherever it runs


def assert_same(left: Any, right: Any) -> None:
    """Equal but for the last bits of chances, which XLA divides in another order."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        if np.issubdtype(a.dtype, np.floating):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)


@some(("prioritized in lanes", "slices per trajectory"))
def test_a_step_is_the_same_alone_in_a_scan_under_vmap_and_with_64_bit_types(kind: str) -> None:
    rule, traces, turns = KINDS[kind](SMALL), 0, 6

    @functools.partial(jit, donate_argnums=0)
    def once(state: Any, batch: Any, key: jax.Array) -> Any:
        nonlocal traces
        traces += 1
        return step(rule, state, batch, key)

    keys = jax.random.split(jax.random.key(0), (2, turns))
    written = [[rows(rule, first + 3 * turn, 3) for turn in range(turns)] for first in (0, 1)]
    batches = jax.tree.map(lambda *leaves: np.stack(leaves), *(batch for each in written for batch in each))
    batches = jax.tree.map(lambda leaf: leaf.reshape(2, turns, *leaf.shape[1:]), batches)
    run = functools.partial(loop, rule)
    many = jit(jax.vmap(run, in_axes=(None, 0, 0)))(rule.init(items(0)), batches, keys)
    for i in range(2):
        state, seen = rule.init(items(0)), []
        for batch, key in zip(written[i], keys[i], strict=True):
            before = state
            state, out = once(state, batch, key)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(getattr(before, "items", before)))
            seen.append(out)
        looped = state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *seen)
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], many), looped)
    with jax.enable_x64(True):  # and keys that are not typed
        wide = jit(run)(rule.init(items(0)), jax.tree.map(lambda leaf: leaf[1], batches), jax.random.key_data(keys[1]))
    assert_same(wide, looped)
    if isinstance(rule, Buffer):  # and what is cleared may be donated
        state, _ = once(rule.clear(jax.tree.map(jnp.copy, looped[0])), written[0][0], keys[0, 0])
        assert rule.size(state) == 3 * rule.items_per_row
    assert traces == 1
