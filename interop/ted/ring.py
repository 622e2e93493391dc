"""Where the rows of a ring buffer go when its trajectories are laid out one after the other."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from interop.ted.row_values import dense, fresh, whole


@dataclass(frozen=True)
class Ring:
    """Rows [time, *lanes] of a ring buffer. Laid out they are [items]: lane after lane, the oldest row first.

    Args:
        shape: the sizes of these dims.
        shift: the row behind the newest one; 0 or all rows where that is the last row.
        is_full: whether every row was written: then the oldest row is at `shift`, otherwise row 0.
    """

    shape: tuple[int, ...]
    shift: int
    is_full: bool

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"there are no rows in data of shape {list(self.shape)}")
        if not 0 <= self.shift <= self.shape[0]:
            raise ValueError(f"shift must be a row of {self.shape[0]}, got {self.shift}")

    @property
    def items(self) -> int:
        """The rows of all lanes."""
        return math.prod(self.shape)

    @property
    def oldest(self) -> int:
        """The oldest row."""
        return self.shift % self.shape[0] if self.is_full else 0

    def lay_out(self, rows: np.ndarray, flat: np.ndarray) -> None:
        """Copy values, one a row in the order of storage, to where they are laid out."""
        _roll(rows.reshape(self.shape[0], -1).T, flat.reshape(-1, self.shape[0]), self.oldest)

    def take_back(self, flat: np.ndarray, rows: np.ndarray) -> None:
        """The inverse of `lay_out`."""
        _roll(flat.reshape(-1, self.shape[0]), rows.reshape(self.shape[0], -1).T, self.shape[0] - self.oldest)

    def taken_back(self, flat: Tensor) -> Tensor:
        """Values that are laid out, [items, ...], as [time, *lanes, ...], in new memory."""
        rows = fresh((*self.shape, *flat.shape[1:]), flat.dtype)
        if rows.numel():
            self.take_back(whole(dense(flat), 1), whole(rows, len(self.shape)))
        return rows


class Order:
    """The places of laid out rows, with one more behind each end of a trajectory, for the observation after it.

    Args:
        ring: the rows.
        done: whether a trajectory ends with a row, [time, *lanes]. The newest row ends one in any case.
    """

    def __init__(self, ring: Ring, done: Tensor) -> None:
        self.ring = ring
        ends = done.numpy().reshape(ring.shape[0], -1).copy()
        ends[(ring.shift - 1) % ring.shape[0]] = True
        self._ends = np.empty(ring.items, np.bool_)
        ring.lay_out(ends, self._ends)
        places = np.ones(ring.items, np.int64)  # of a row: two behind the row before it where that ends a trajectory
        places[0] = 0
        places[1:][self._ends[:-1]] = 2
        np.cumsum(places, out=places)
        self.size = int(places[-1]) + 1 + int(self._ends[-1])
        """How many places there are."""
        self.rows = np.empty_like(places)
        """The place of each row, in the order of storage."""
        ring.take_back(places, self.rows)
        self.stops = np.flatnonzero(ends)
        """The rows with which trajectories end."""
        last = np.arange(ring.items - ends.shape[1], 0 if ring.is_full else ring.items)
        self.unended = last[~ends[-1]] if last.size else last
        """The last rows of lanes that were not written, with which no trajectory ends."""

    def trajectories(self) -> tuple[Tensor, Tensor]:
        """How many rows each trajectory has, and whether it has an end; rows that were not written are one without."""
        stops = self._ends.copy()
        stops.reshape(-1, self.ring.shape[0])[:, -1] = True
        found = np.flatnonzero(stops)
        return torch.from_numpy(np.diff(found, prepend=-1)), torch.from_numpy(self._ends[found])


def _roll(source: np.ndarray, target: np.ndarray, shift: int) -> None:
    """`target[:] = np.roll(source, -shift, 1)` without a copy between."""
    head = source.shape[1] - shift
    target[:, :head], target[:, head:] = source[:, shift:], source[:, :shift]
