"""Loops that are one kernel on the CPU: they are one, and they compute what operations on whole arrays do."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf import Buffer, PerTrajectory, Prioritized, Slices, Trajectories, priority_tree
from fbuf.trajectories import TrajectoryState
from tests.fbuf.compiled import fill_tree, jit
from tests.fbuf.trajectory_model import rows

pytestmark = pytest.mark.usefixtures("device")


@functools.cache
def both(function: Any, *rule: Any) -> tuple[Any, Any]:
    """The loop, and what `vmap` makes of it: operations on whole arrays."""
    return jit(lambda *operands: function(*rule, *operands)), jit(
        jax.vmap(lambda *operands: function(*rule, *operands))
    )


def assert_alike(functions: tuple[Any, Any], *operands: Any) -> None:
    loop, whole = functions
    many = whole(*jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], operands))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[0]), loop(*operands), many)


def drawn(buffer: Buffer, state: Any, key: jax.Array) -> Any:
    return buffer.sample(state, key, 12)


@given(data=st.data())
def test_trees_are_updated_and_searched_alike(data: st.DataObject) -> None:
    # Searches are made four at a time.
    capacity, count = data.draw(st.sampled_from([(7, 19), (65, 6), (5000, 1)]))
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    tree = priority_tree.init(capacity, maxima=True)
    values = np.where(random.random(capacity) < 0.3, 0, 10 ** random.uniform(-4, 4, capacity)).astype(np.float32)
    tree = fill_tree(tree, values)
    slots = random.integers(-2, capacity + 2, 20).astype(np.int32)
    given_values = random.choice([0, -1, np.nan, np.inf, 0.5, 3], 20).astype(np.float32)
    assert_alike(both(priority_tree.update), tree, slots, given_values)
    edges = np.cumsum(values, dtype=np.float32)[random.integers(0, capacity, 10)]
    masses = np.concatenate([[np.inf, np.nan], edges, random.uniform(0, edges[-1], 8)]).astype(np.float32)
    low = random.uniform(-1e-5, 1e-5, 20).astype(np.float32)
    assert_alike(both(priority_tree.find), tree, masses[-count:], low[:count])


@pytest.mark.parametrize("first", [0, 5, 63, 4968, 4979, 4990])
def test_priorities_of_new_rows_are_set_alike(first: int) -> None:
    tree = priority_tree.fill(priority_tree.init(5000), jnp.arange(5000.0))
    slots = np.arange(first, first + 32, dtype=np.int32)
    broken, shuffled = slots.copy(), slots[::-1]
    broken[-2] = 77
    for each in (slots, slots % 5000, broken, shuffled):
        assert_alike(both(priority_tree.update), tree, each, np.linspace(0, 9, 32, dtype=np.float32))


@given(data=st.data())
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(Slices(3), marks=pytest.mark.slow),
        pytest.param(Slices(3, PerTrajectory(), least=2), marks=pytest.mark.slow),
        Slices(4, Prioritized()),
    ],
    ids=str,
)
def test_small_writes_and_draws_of_slices_are_alike(rule: Slices, data: st.DataObject) -> None:
    buffer = Buffer(11, rule, trajectories=Trajectories("terminated", "truncated", "id"), lanes=(2,))
    random, state = np.random.default_rng(data.draw(st.integers(0, 999))), None
    for _ in range(data.draw(st.integers(1, 6))):
        ends = random.choice(list("....tui"), (data.draw(st.sampled_from([1, 5])), 2))
        batch = rows(ends).batch(np.zeros(ends.shape, np.int32), (2,))
        if state is None:
            state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], batch))
        assert_alike(both(Buffer.extend, buffer), state, batch)
        state = both(Buffer.extend, buffer)[0](state, batch)[0]
        assert isinstance(state.trajectories, TrajectoryState)
        assert_alike(both(drawn, buffer), state, jax.random.PRNGKey(1))
