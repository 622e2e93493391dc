"""Rows of any size and number of leaves in which every leaf tells the id of its row, at its beginning and at its end."""

from typing import Any

import numpy as np
import pytest
import torch

from fbuf import free_memory

_ROOM = 1 << 30  # bytes that are left to others


def need(count: int) -> None:
    """Skip the test where so many bytes are not free."""
    free = free_memory.of_machine()
    if free is not None and free < count + _ROOM:
        pytest.skip(f"needs {count >> 20} MiB of memory, {free >> 20} MiB are free")


def uniform_frequencies(counts: np.ndarray, chances: np.ndarray) -> None:
    """Fail where counts of independent draws are further from their chances than once in 10^9 runs."""
    from scipy import stats

    expected = chances * counts.sum()
    assert stats.chisquare(counts, expected).pvalue > 1e-9


class Kind:
    """Rows of `size` bytes in all, in `leaves` leaves of uint8, 8 bytes at least each; or one of 4 bytes."""

    def __init__(self, size: int, leaves: int = 1) -> None:
        self.size, self.leaves = size, leaves
        self.width = size // leaves
        assert self.width in (4,) or self.width >= 8

    def rows(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of these ids."""
        return {f"leaf {leaf}": self._leaf(ids, leaf) for leaf in range(self.leaves)}

    def _leaf(self, ids: np.ndarray, leaf: int) -> np.ndarray:
        made = np.zeros((len(ids), self.width), np.uint8)
        marks = _marks(ids, leaf)
        made[:, :4] = marks
        made[:, -4:] = marks
        if self.width > 8:
            made[:, self.width // 2] = leaf + 1
        return made

    def check(self, rows: Any, ids: np.ndarray) -> None:
        """Fail unless these are the rows of the ids."""
        assert len(rows) == self.leaves
        for leaf in range(self.leaves):
            found = _on_host(rows[f"leaf {leaf}"])
            assert found.shape == (len(ids), self.width) and found.dtype == np.uint8
            marks = _marks(ids, leaf)
            np.testing.assert_array_equal(found[:, :4], marks)
            np.testing.assert_array_equal(found[:, -4:], marks)
            if self.width > 8:
                assert (found[:, self.width // 2] == leaf + 1).all()

    def ids(self, rows: Any) -> np.ndarray:
        """The ids that rows tell."""
        first = np.ascontiguousarray(_on_host(rows["leaf 0"])[:, :4])
        return first.view("<u4")[:, 0].astype(np.int64)


def _on_host(leaf: Any) -> np.ndarray:
    return np.asarray(leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)


def _marks(ids: np.ndarray, leaf: int) -> np.ndarray:
    mixed = (np.asarray(ids, np.int64) + leaf * 7919).astype("<u4")
    return mixed.view(np.uint8).reshape(-1, 4)


class Ring:
    """Which id is at each slot of a ring: the model."""

    def __init__(self, capacity: int) -> None:
        self.held = np.full(capacity, -1, np.int64)
        self.written = 0

    def extend(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the next rows, and the slots they take."""
        ids = np.arange(self.written, self.written + count)
        slots = ids % len(self.held)
        self.held[slots[-len(self.held) :]] = ids[-len(self.held) :]
        self.written += count
        return ids, slots

    @property
    def size(self) -> int:
        return min(self.written, len(self.held))
