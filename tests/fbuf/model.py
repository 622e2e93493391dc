"""The same buffer in plain NumPy: one row and one priority at a time, by brute force."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fbuf.priority_tree import PriorityTree

FANOUT = 8


class RingModel:
    """Rows taken one by one, the oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.cursor, self.size, self.written = capacity, 0, 0, 0

    def claim(self) -> int:
        row = self.cursor
        self.cursor = (row + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)
        self.written += 1
        return row


class PrioritiesModel:
    """Priorities as they were given, -1 where no item is, and what the next new item gets."""

    def __init__(self, slots: int, alpha: float, eps: float, new_items: str) -> None:
        self.given = np.full(slots, -1, np.float32)
        self.alpha, self.eps, self.new_items = alpha, eps, new_items
        self.highest, self.holder, self.refused = np.float32(1), -1, 0

    def written(self, slots: np.ndarray) -> None:
        self.given[slots] = self.highest
        if self.new_items == "highest_stored":
            if self.holder in slots:
                self.highest, self.holder = np.float32(1), -1
            elif self.holder < 0:
                self.holder = int(slots[0])

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        settled: dict[int, np.float32] = {}
        for slot, priority in zip(slots, priorities, strict=True):
            if not (np.isfinite(priority) and priority >= 0):
                self.refused += 1
            elif 0 <= slot < len(self.given) and self.given[slot] >= 0:
                settled[int(slot)] = priority
        for slot, priority in settled.items():
            self.given[slot] = priority
        if settled:
            self._raise_highest(settled)

    def values(self) -> np.ndarray:
        """What the items weigh in a draw."""
        return np.where(self.given >= 0, (np.maximum(self.given, 0).astype(float) + self.eps) ** self.alpha, 0)

    def _raise_highest(self, settled: dict[int, np.float32]) -> None:
        top = max(settled, key=lambda slot: settled[slot])
        if self.new_items == "highest_ever":
            self.highest = max(self.highest, settled[top])
            return
        if self.holder in settled:
            self.holder = int(np.argmax(self.given))
        elif self.holder < 0 or settled[top] > self.highest:
            self.holder = top
        else:
            return
        self.highest = self.given[self.holder]


class BufferModel:
    """A ring of rows in NumPy arrays; `priorities` is None for a buffer that keeps none."""

    def __init__(self, capacity: int, lanes: tuple[int, ...], item: Any, priorities: PrioritiesModel | None) -> None:
        self.lanes, self.ring, self.priorities = lanes, RingModel(capacity), priorities
        self.items = jax.tree.map(lambda leaf: np.zeros((capacity, *lanes, *leaf.shape), leaf.dtype), item)

    def extend(self, batch: Any, count: int) -> np.ndarray:
        """The slots that the batch took, as the buffer returns them."""
        per_row = int(np.prod(self.lanes))
        slots = np.zeros((count, *self.lanes), np.int32)
        for i in range(count):
            row = self.ring.claim()
            for kept, new in zip(jax.tree.leaves(self.items), jax.tree.leaves(batch), strict=True):
                kept[row] = new[i]
            slots[i] = row * per_row + np.arange(per_row).reshape(self.lanes)
            if self.priorities is not None:
                self.priorities.written(slots[i].reshape(-1))
        return slots

    def item(self, slots: np.ndarray) -> Any:
        return jax.tree.map(lambda kept: kept.reshape(-1, *kept.shape[1 + len(self.lanes) :])[slots], self.items)


def assert_same(left: Any, right: Any) -> None:
    """Equal structure, equal dtypes, equal bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def reductions(leaves: np.ndarray, combine: Callable[[Any, Any], Any], empty: float = 0) -> list[np.ndarray]:
    """The levels above the leaves up to the root: parents from their children, left to right, by eights."""
    levels, below = [], leaves
    while not levels or len(below) > 1:
        below = np.concatenate([below, np.full(-len(below) % FANOUT, empty, below.dtype)])
        below = functools.reduce(combine, below.reshape(-1, FANOUT).T)
        levels.append(below)
    return levels


def levels_of(tree: PriorityTree, kind: str) -> list[np.ndarray]:
    """The levels that a tree holds, from just above the leaves up to the root."""
    flat, levels, start = getattr(tree, {"sum": "sums", "minimum": "minima", "maximum": "maxima"}[kind]), [], 0
    for level in reductions(np.asarray(tree.leaves), np.add):
        levels.append(np.asarray(flat[start : start + len(level)]))
        start += -(-len(level) // FANOUT) * FANOUT
    return levels


def assert_tree_is_exact(tree: PriorityTree, kinds: Sequence[str] = ("sum", "minimum")) -> None:
    """Every node is what its children give, bit for bit; positive exactly if a child is; nothing beyond the capacity."""
    leaves = np.asarray(tree.leaves)
    assert not leaves[tree.capacity :].any()
    positive = [level > 0 for level in reductions(leaves, np.maximum)]
    for level, expected in zip(levels_of(tree, "sum"), positive, strict=True):
        np.testing.assert_array_equal(level > 0, expected)
    filled = np.where(leaves > 0, leaves, np.inf).astype(leaves.dtype)
    for kind in kinds:
        start = {"sum": (leaves, np.add), "minimum": (filled, np.minimum, np.inf), "maximum": (leaves, np.maximum)}[
            kind
        ]
        for level, expected in zip(levels_of(tree, kind), reductions(*start), strict=True):
            bits = f"uint{leaves.itemsize * 8}"
            np.testing.assert_array_equal(level.view(bits), expected.view(bits))
