"""Any scale: rows of 4 bytes to 1 MB, 1 to 64 leaves, batches to 262,144, 10^8 items, against a model of NumPy."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tensordict import TensorDict

import fbuf
from interop import LazyMemmapStorage, LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from tests.scale_rows import Kind, Ring, need, uniform_frequencies

ALPHA, BETA, EPS = 0.7, 0.5, 1e-3
SIZES, LEAVES, BATCHES = (4, 64, 4096, 1 << 20), (1, 7, 64), (1, 256, 4096, 262_144)
LARGE, MOST = 10**8, 3 << 30  # items; bytes of a buffer


QUICK = {(64, 7, 256), (1 << 20, 1, 1)}  # the others are slow tests
CELLS = [
    pytest.param(size, leaves, batch, marks=[] if (size, leaves, batch) in QUICK else pytest.mark.slow)
    for size, leaves, batch in itertools.product(SIZES, LEAVES, BATCHES)
    if (size >= 8 * leaves or leaves == 1) and 2 * size * batch <= MOST
]


class InJit:
    """A buffer of `fbuf`, in programs that take its state over."""

    def __init__(self, kind: Kind, capacity: int) -> None:
        self.buffer = fbuf.Buffer(capacity, fbuf.Prioritized(ALPHA, EPS))
        item = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in kind.rows(np.zeros(1)).items()}
        self.state = jax.jit(self.buffer.init)(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), item))
        self.run = {
            name: functools.partial(jax.jit, static_argnums=static, donate_argnums=0)(getattr(self.buffer, name))
            for name, static in (("extend", ()), ("update", ()), ("sample", 2))
        }
        self.keys = iter(jax.random.split(jax.random.key(0), 64))

    def extend(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        self.state, slots = self.run["extend"](self.state, rows)
        return np.asarray(slots)

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.state = self.run["update"](self.state, slots.astype(np.int32), priorities)

    def sample(self, batch: int) -> tuple[np.ndarray, Any, np.ndarray]:
        self.state, rows, draw = self.run["sample"](self.state, next(self.keys), batch)
        assert bool(draw.valid.all())
        return np.asarray(draw.slots), rows, np.asarray(fbuf.importance_weights(draw, BETA))

    def read(self, slots: np.ndarray) -> Any:
        return self.buffer.read(self.state, slots)


class ThroughTorch:
    """A buffer of `interop`."""

    def __init__(self, kind: Kind, capacity: int, storage: Any = LazyTensorStorage) -> None:
        self.buffer = TensorDictReplayBuffer(
            storage=storage(capacity), sampler=PrioritizedSampler(capacity, ALPHA, BETA, EPS), priority_key="p"
        )

    def extend(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        leaves = {name: torch.from_numpy(leaf) for name, leaf in rows.items()}
        return self.buffer.extend(TensorDict(leaves, [len(next(iter(rows.values())))])).numpy()

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.buffer.update_priority(torch.from_numpy(slots), torch.from_numpy(priorities))

    def sample(self, batch: int) -> tuple[np.ndarray, Any, np.ndarray]:
        found = self.buffer.sample(batch)
        slots, weights = found.pop("index"), found.pop("priority_weight")
        return slots.numpy(), dict(found.items()), weights.numpy()

    def read(self, slots: np.ndarray) -> Any:
        found = self.buffer[torch.from_numpy(slots)]
        return {name: leaf for name, leaf in found.items() if name != "index"}


DOORS = [
    pytest.param(InJit, id="jit"),
    pytest.param(ThroughTorch, id="torch"),
    pytest.param(functools.partial(ThroughTorch, storage=LazyMemmapStorage), id="memmap"),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("size", "leaves", "batch"), CELLS)
def test_what_was_written_is_read_and_drawn_by_its_priority(door, size, leaves, batch) -> None:
    kind, rng = Kind(size, leaves), np.random.default_rng(batch)
    capacity = 2 * batch - batch // 3  # the second batch goes around the end
    need(8 * size * batch)
    buffer, ring = door(kind, capacity), Ring(capacity)
    priorities, highest = np.zeros(capacity, np.float32), 1.0
    for _ in range(3):
        ids, slots = ring.extend(batch)
        np.testing.assert_array_equal(buffer.extend(kind.rows(ids)), slots)
        priorities[slots] = highest
        given = rng.integers(ring.size, size=batch)
        values = rng.choice(np.float32([0.25, 0.5, 1, 2]), size=batch)
        buffer.update(given, values)
        priorities[given] = values  # of equal ones the last
        highest = max(highest, float(values.max()))
        slots, rows, weights = buffer.sample(batch)
        assert slots.min() >= 0 and slots.max() < ring.size
        kind.check(rows, ring.held[slots])
        mass = (priorities[: ring.size] + np.float32(EPS)) ** ALPHA
        np.testing.assert_allclose(weights, (mass[slots] / mass.min()) ** -BETA, rtol=2e-4)
    some = np.unique(np.concatenate([[0, ring.size - 1], rng.integers(ring.size, size=min(batch, 64))]))
    kind.check(buffer.read(some), ring.held[some])


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS[:2])
def test_a_hundred_million_items(door) -> None:
    need(6 * 10**9)
    kind, ring, rng = Kind(4), Ring(LARGE), np.random.default_rng(1)
    buffer = door(kind, LARGE)
    for count in (*(10**7,) * 10, 262_144):
        ids, slots = ring.extend(count)
        np.testing.assert_array_equal(buffer.extend(kind.rows(ids)), slots)
    slots, rows, weights = buffer.sample(262_144)  # all alike
    kind.check(rows, ring.held[slots])
    np.testing.assert_allclose(weights, 1, rtol=1e-5)
    uniform_frequencies(np.bincount(slots // (LARGE // 64), minlength=64), np.full(64, 1 / 64))

    # A thousand of them, at both ends and in between, have almost all of the mass.
    chosen = np.unique(np.concatenate([[0, LARGE - 1], rng.integers(LARGE, size=1000)]))
    values = rng.choice(np.float32([1e6, 2e6, 4e6]), size=chosen.size)
    for start in range(0, LARGE, 1 << 23):
        part = np.arange(start, min(start + (1 << 23), LARGE))
        buffer.update(part, np.zeros(part.size, np.float32))
    again = np.concatenate([rng.permutation(np.repeat(chosen, 2)), chosen])  # equal ones: the last counts
    buffer.update(again, np.concatenate([np.ones(2 * chosen.size, np.float32), values]))
    slots, rows, _ = buffer.sample(262_144)
    kind.check(rows, ring.held[slots])
    mass = values.astype(np.float64) ** ALPHA
    rest = (LARGE - chosen.size) * EPS**ALPHA
    place = np.minimum(np.searchsorted(chosen, slots), chosen.size - 1)
    hit = chosen[place] == slots
    chances = np.append(mass, rest) / (mass.sum() + rest)
    counts = np.append(np.bincount(place[hit], minlength=chosen.size), (~hit).sum())
    uniform_frequencies(counts, chances)
