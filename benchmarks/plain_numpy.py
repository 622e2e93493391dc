"""What one would write in NumPy; apart from torch, whose threads slow what JAX does in the same process."""

import numpy as np

NUMPY = "NumPy"


class Numpy:
    """A ring of rows in a dict of arrays."""

    def __init__(self, rows: dict[str, np.ndarray], capacity: int) -> None:
        """Full of copies of `rows`."""
        self._capacity, self._cursor = capacity, 0
        self._draw = np.random.default_rng(0)
        source = np.arange(capacity) % len(next(iter(rows.values())))
        self._kept = {name: leaf.take(source, axis=0) for name, leaf in rows.items()}

    def extend(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """The slots taken."""
        slots = (np.arange(len(next(iter(rows.values())))) + self._cursor) % self._capacity
        for name, leaf in rows.items():
            self._kept[name][slots] = leaf
        self._cursor = (self._cursor + len(slots)) % self._capacity
        return slots

    def add(self, row: dict[str, np.ndarray]) -> int:
        """The slot taken by a single row, without a batch dimension."""
        slot = self._cursor
        for name, leaf in row.items():
            self._kept[name][slot] = leaf
        self._cursor = (slot + 1) % self._capacity
        return slot

    def sample(self, count: int) -> dict[str, np.ndarray]:
        return self._read(self._draw.integers(0, self._capacity, count))

    def _read(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        return {name: leaf.take(slots, axis=0) for name, leaf in self._kept.items()}


class PrioritizedNumpy(Numpy):
    def __init__(self, rows: dict[str, np.ndarray], capacity: int, alpha: float, beta: float) -> None:
        super().__init__(rows, capacity)
        self._alpha, self._beta = np.float32(alpha), np.float32(beta)
        self._weighed = self._draw.random(capacity, np.float32) + np.float32(1e-3)
        self._highest = np.float32(1)

    def extend(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        slots = super().extend(rows)
        self._weighed[slots] = self._highest**self._alpha
        return slots

    def sample(self, count: int) -> dict[str, np.ndarray]:
        running = self._weighed.cumsum()
        masses = self._draw.random(count, np.float32) * running[-1]
        slots = np.minimum(np.searchsorted(running, masses), self._capacity - 1)
        weights = (self._weighed[slots] / self._weighed.min()) ** -self._beta
        return self._read(slots) | {"index": slots, "weight": weights}

    def update(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._weighed[slots] = priorities**self._alpha
        self._highest = max(self._highest, priorities.max())
