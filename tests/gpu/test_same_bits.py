"""The forms for accelerators give the bits of those for the CPU.

Under `jax.disable_jit` the forms for accelerators run, operation by operation: compiled for the CPU they would lose their
barriers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf import Buffer, HashTable, Prioritized, Slices, Trajectories, priority_tree, returns
from tests.fbuf.every_pair import BATCH, CHUNK, ROWS, SAMPLERS, WRITERS, items

_TURNS = 3


def histories(buffer: Buffer) -> list[Any]:
    """The state and what was drawn, after each of some turns that go around the ring."""
    state, found = buffer.init(items(0)), []
    keeps = buffer.sampler.keeps_priorities
    random = np.random.default_rng(0)
    for turn in range(_TURNS):
        ids = np.arange(CHUNK * turn, CHUNK * (turn + 1))[:, None] + 1000 * np.arange(buffer.items_per_row)
        rows = jax.tree.map(lambda leaf: leaf.reshape(CHUNK, *buffer.lanes, *leaf.shape[2:]), items(ids))
        state, _slots = buffer.extend(state, rows)
        if keeps:
            slots = random.integers(-1, ROWS + 1, 20).astype(np.int32)
            priorities = random.choice([0, -1, np.nan, 0.5, 3, 1e3], 20).astype(np.float32)
            state = buffer.update(state, slots, priorities)
        state, got, draw = buffer.sample(state, jax.random.key(turn), BATCH)
        found.append((state, got, draw))
    return found


def of(name: str, writer: str = "RoundRobin", lanes: tuple[int, ...] = ()) -> Buffer:
    known = Trajectories(terminated="done") if name.startswith("Slices") else None
    return Buffer(ROWS, SAMPLERS[name], writer=WRITERS[writer], lanes=lanes, trajectories=known)


KINDS = [
    *((name, "RoundRobin", ()) for name in SAMPLERS),
    ("Prioritized", "HighestRanked", ()),
    ("Slices(starts=Prioritized)", "RoundRobin", (2,)),
]


def assert_same(one: Any, other: Any) -> None:
    """Equal bits; probabilities and what follows from them within units in the last place."""

    def same(path: Any, a: Any, b: Any) -> None:
        name = jax.tree_util.keystr(path)
        if "probability" in name or "smallest" in name:
            np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)

    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree_util.tree_map_with_path(same, one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "writer", "lanes"), KINDS, ids=str)
def test_buffers(name: str, writer: str, lanes: tuple[int, ...]) -> None:
    buffer = of(name, writer, lanes)
    on_cpu = histories(buffer)
    with jax.disable_jit():
        on_accelerator = histories(buffer)
    assert_same(on_cpu, on_accelerator)


@pytest.mark.parametrize("name", ["Prioritized"])
def test_buffers_in_short(name: str) -> None:
    test_buffers(name, "RoundRobin", ())


def trees(capacity: int, batch: int) -> Any:
    """A tree of three reductions after updates of equal, bad and ordinary slots, and what is found in it."""
    tree = priority_tree.init(capacity, maxima=True)
    random = np.random.default_rng(capacity)
    values = np.where(random.random(capacity) < 0.3, 0, 10 ** random.uniform(-4, 4, capacity)).astype(np.float32)
    tree = priority_tree.fill(tree, jnp.asarray(values))
    slots = random.integers(-2, capacity + 2, batch).astype(np.int32)
    given = random.choice(np.array([0, -1, np.nan, np.inf, 0.5, 3], np.float32), batch)
    tree = priority_tree.update(tree, jnp.asarray(slots), jnp.asarray(given))
    masses = random.uniform(0, values.sum(dtype=np.float64), 40).astype(np.float32)
    return tree, priority_tree.find(tree, jnp.asarray(masses), jnp.asarray(masses * 1e-9))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("capacity", "batch"), [(1, 1), (8, 2), (65, 70), (5000, 1500)])
def test_trees(capacity: int, batch: int, sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where large levels are recomputed above the slots only, which needs 2^18 nodes by default."""
    on_cpu = trees(capacity, batch)
    if sparse:
        monkeypatch.setattr(priority_tree, "_SMALL", 9)
        monkeypatch.setattr(priority_tree, "_DENSE", 2)
    with jax.disable_jit():
        on_accelerator = trees(capacity, batch)
    assert_same(on_cpu, on_accelerator)


def test_new_items_of_the_highest_stored_priority() -> None:
    rule = Prioritized(new_items="highest_stored")

    def run() -> Any:
        state = rule.init(ROWS)
        for turn in range(3):
            state = rule.written(state, jnp.arange(4 * turn, 4 * turn + 4) % ROWS)
            state = rule.update(state, jnp.asarray([1, 5, 1]), jnp.asarray([3.0 - turn, 2.0, 2.5]))
        return state

    on_cpu = run()
    with jax.disable_jit():
        on_accelerator = run()
    assert_same(on_cpu, on_accelerator)


def test_tables_of_keys() -> None:
    table = HashTable(50)

    def run() -> Any:
        state = table.init(np.int32(0), np.float32(0))
        found = []
        for turn in range(3):
            keys = (np.arange(20, dtype=np.int32) * (turn + 3)) % 41
            state, *rest = table.insert(state, keys, keys.astype(np.float32) + turn)
            found.append((rest, table.find(state, keys)))
        return state, found

    on_cpu = run()
    with jax.disable_jit():
        on_accelerator = run()
    assert_same(on_cpu, on_accelerator)


@pytest.mark.parametrize("gamma", [0.0, 0.99, 1.0])
def test_returns_to_go_within_rounding(gamma: float) -> None:
    random = np.random.default_rng(1)
    earned, stops = random.normal(size=(3, 100)).astype(np.float32), random.random((3, 100)) < 0.05
    one, other = (
        form(jnp.asarray(earned), jnp.float32(gamma), jnp.asarray(stops))
        for form in (returns._one_by_one, returns._by_halves)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_every_start_of_slices_is_among_the_buffers() -> None:
    starts = {type(each.starts) for each in SAMPLERS.values() if isinstance(each, Slices)}
    assert len(starts) == 4
