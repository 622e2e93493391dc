"""The priority tree against brute force over its leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf import priority_tree
from fbuf.priority_tree import PriorityTree
from tests.fbuf.compiled import fill_tree, find, update_tree
from tests.fbuf.model import assert_same
from tests.fbuf.model import assert_tree_is_exact as assert_nodes_are_exact

pytestmark = pytest.mark.usefixtures("device")

CAPACITIES = [1, 13, *(pytest.param(capacity, marks=pytest.mark.slow) for capacity in (7, 40))]
EDGES = [1, 8, 65, 1000, *(pytest.param(capacity, marks=pytest.mark.slow) for capacity in (7, 9, 63, 64))]
BATCHES = [1, 20]
PASSED_OVER = [-1.0, float("nan"), float("-inf")]


def tree_of(values: Any) -> PriorityTree:
    """A tree whose slots hold these values, set in one batch."""
    values = np.asarray(values, np.float32)
    return update_tree(priority_tree.init(len(values), maxima=True), np.arange(len(values)), values)


def assert_tree_is_exact(tree: PriorityTree) -> None:
    assert_nodes_are_exact(tree, ["sum", "minimum", "maximum"])


def masses(*values: float) -> np.ndarray:
    return np.asarray(values, np.float32)


@st.composite
def rounds(draw: st.DrawFn, capacity: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of slots, some equal and some out of range, with values, some of them not to be taken."""
    value = st.floats(0, 1e6, width=32, allow_subnormal=False) | st.sampled_from([0.0, *PASSED_OVER])
    batches = []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.sampled_from(BATCHES))
        slots = draw(st.lists(st.integers(-3, capacity + 9), min_size=count, max_size=count))
        values = draw(st.lists(value, min_size=count, max_size=count))
        batches.append((np.asarray(slots, np.int32), np.asarray(values, np.float32)))
    return batches


@pytest.mark.parametrize("capacity", CAPACITIES)
@given(data=st.data())
def test_updates_are_those_of_a_list_and_find_stays_where_the_mass_is(capacity: int, data: st.DataObject) -> None:
    tree, values = priority_tree.init(capacity, maxima=True), np.zeros(capacity, np.float32)
    for slots, new in data.draw(rounds(capacity)):
        tree = update_tree(tree, slots, new)
        for slot, value in zip(slots, new, strict=True):
            if 0 <= slot < capacity and value >= 0:
                values[slot] = value
    np.testing.assert_array_equal(tree.leaves[:capacity], values)
    assert_tree_is_exact(tree)
    asked = np.arange(-3, capacity + 9)
    held = [values[slot] if 0 <= slot < capacity else 0 for slot in asked]
    np.testing.assert_array_equal(priority_tree.get(tree, jnp.asarray(asked)), held)
    assert priority_tree.largest(tree) == values.argmax()
    assert priority_tree.minimum(tree) == min(values[values > 0], default=np.inf)
    total, exact = float(priority_tree.total(tree)), values.sum(dtype=float)
    assert total == pytest.approx(exact, rel=1e-6)
    if total == 0:
        return
    mass = np.linspace(0, total, 33).astype(np.float32)
    slots = np.asarray(find(tree, mass))
    assert (values[slots] > 0).all()
    ends, slack = np.cumsum(values, dtype=float), 2e-6 * total
    assert (mass >= ends[slots] - values[slots] - slack).all()
    assert (mass <= ends[slots] + slack).all()


@pytest.mark.parametrize("capacity", EDGES)
def test_every_slot_is_found_at_its_first_and_last_mass(capacity: int) -> None:
    values = np.random.default_rng(capacity).integers(1, 50, capacity).astype(np.float32)
    tree = tree_of(values)
    assert_tree_is_exact(tree)
    ends = np.cumsum(values)
    np.testing.assert_array_equal(find(tree, ends - values), np.arange(capacity))
    np.testing.assert_array_equal(find(tree, np.nextafter(ends, np.float32(0))), np.arange(capacity))
    assert find(tree, masses(3e38))[0] == capacity - 1


def test_the_low_part_of_a_mass_decides_at_a_boundary() -> None:
    big = 2.0**24
    tree = tree_of([big, 2, 2, big])
    high, low = masses(big, big, big, big, big + 2, big + 2), masses(-0.5, 0, 1, 2, -0.25, 0)
    np.testing.assert_array_equal(find(tree, high, low), [0, 1, 1, 2, 1, 2])


def test_an_infinite_value_is_ignored() -> None:
    tree = tree_of([1, 2, 3])
    assert_same(update_tree(tree, np.asarray([1, 1], np.int32), masses(5, np.inf)), tree_of([1, 5, 3]))
    assert_same(fill_tree(tree, masses(1, np.inf, 3)), tree_of([1, 0, 3]))


def test_whole_levels_and_single_nodes_give_the_same_bits() -> None:
    rng, capacity = np.random.default_rng(5), 1000
    slots = rng.integers(-2, capacity + 3, 600).astype(np.int32)
    values = np.exp(rng.uniform(-9, 9, 600)).astype(np.float32)
    start = fill_tree(priority_tree.init(capacity, maxima=True), rng.uniform(0, 9, capacity).astype(np.float32))
    at_once = update_tree(start, slots, values)
    assert_tree_is_exact(at_once)
    for batch in (1, 20):
        parts = slots.reshape(-1, batch), values.reshape(-1, batch)
        tree = jax.lax.scan(lambda tree, part: (priority_tree.update(tree, *part), None), start, parts)[0]
        assert_same(tree, at_once)
    assert_same(fill_tree(start, at_once.leaves[:capacity]), at_once)


@pytest.mark.parametrize("capacity", [1, 65, 1000, pytest.param(7, marks=pytest.mark.slow)])
def test_the_total_of_huge_values_is_finite(capacity: int) -> None:
    tree = tree_of(np.full(capacity, 3e38))
    assert_tree_is_exact(tree)
    assert np.isfinite(priority_tree.total(tree))
    assert (np.asarray(tree.leaves[:capacity]) == tree.leaves[priority_tree.largest(tree)]).all()
    np.testing.assert_array_equal(find(tree, masses(0, 3e38)), [0, capacity - 1])


def test_an_empty_tree_has_no_mass_and_no_minimum() -> None:
    tree = priority_tree.init(20, maxima=True)
    assert_tree_is_exact(tree)
    assert priority_tree.total(tree) == 0
    assert priority_tree.minimum(tree) == np.inf
    assert ((found := find(tree, masses(0, 1, 3e38))) >= 0).all()
    assert (found < 20).all()


def test_double_precision_holds_what_single_cannot() -> None:
    with jax.enable_x64(True):
        values = np.asarray([1.0, 1e-12, 0.0, 1.0])
        tree = priority_tree.update(priority_tree.init(4, dtype="float64", maxima=True), jnp.arange(4), values)
        assert_tree_is_exact(tree)
        assert priority_tree.total(tree) == 2 + 1e-12
        np.testing.assert_array_equal(find(tree, np.asarray([1.0, 1 + 2e-12])), [1, 3])


def test_more_slots_than_single_precision_can_number_are_refused() -> None:
    slots = jax.ShapeDtypeStruct((2**24,), np.int32)
    with pytest.raises(ValueError, match="at most 16777215 slots in one update, got 16777216"):
        jax.eval_shape(
            priority_tree.update, priority_tree.init(4), slots, jax.ShapeDtypeStruct(slots.shape, np.float32)
        )


def test_few_and_many_draws_choose_alike() -> None:
    rng = np.random.default_rng(0)
    values = (rng.uniform(0, 1, 3000) ** 8 * rng.integers(0, 2, 3000)).astype(np.float32)
    tree = tree_of(values)
    mass = (rng.uniform(-0.01, 1.01, 4096) * float(priority_tree.total(tree))).astype(np.float32)
    low = (rng.uniform(-1, 1, 4096) * 1e-9).astype(np.float32)
    many = find(tree, mass, low)
    few = np.concatenate([find(tree, mass[i : i + 256], low[i : i + 256]) for i in range(0, 4096, 256)])
    np.testing.assert_array_equal(many, few)


def test_the_low_part_of_a_mass_counts_at_the_total_too() -> None:
    tree = fill_tree(priority_tree.init(16), jnp.asarray([2.0**26, *[0] * 7, *[1] * 8], jnp.float32))
    mass = jnp.full(4, priority_tree.total(tree))
    low = jnp.asarray([-3.5, -2.5, -1.5, -0.5], jnp.float32)
    np.testing.assert_array_equal(find(tree, mass, low), [12, 13, 14, 15])


@pytest.mark.parametrize("mass", [1e8, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("few", [True, False])
def test_a_mass_beyond_the_total_finds_the_last_slot_whatever_is_absorbed(mass: float, few: bool) -> None:
    values = np.zeros(600, np.float32)
    values[0], values[8:14], values[512:515] = 1e8, 0.5, 0.25
    tree = fill_tree(priority_tree.init(600), jnp.asarray(values))
    count = 4 if few else 4096
    mass = jnp.full(count, max(mass, float(priority_tree.total(tree))) if mass == mass else mass, jnp.float32)
    assert (np.asarray(find(tree, mass)) == 514).all()
