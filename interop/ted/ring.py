"""Where the rows of a ring go when its trajectories are laid one after the other, lane by lane, oldest row first."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from interop.ted.places import places
from interop.ted.row_values import dense, fresh, whole


@dataclass(frozen=True)
class Ring:
    """Rows [time, *lanes] that were written around a ring.

    Args:
        shape: the sizes of these dims.
        shift: the row behind the one that was written last; 0 or all rows where that was the last row.
        is_full: whether every row was written, so that the ring begins at `shift`; otherwise it begins at row 0.
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
        """How many rows all lanes have together."""
        return math.prod(self.shape)

    @property
    def lanes(self) -> int:
        """How many lanes there are."""
        return self.items // self.shape[0]

    @property
    def oldest(self) -> int:
        """The row that comes first."""
        return self.shift % self.shape[0] if self.is_full else 0

    @property
    def newest(self) -> int:
        """The row that was written last."""
        return (self.shift - 1) % self.shape[0]

    def lay_out(self, rows: np.ndarray, flat: np.ndarray) -> None:
        """Copy values of rows, [rows], to [items]."""
        held, by_lane = rows.reshape(self.shape[0], -1).T, flat.reshape(-1, self.shape[0])
        head = self.shape[0] - self.oldest
        by_lane[:, :head] = held[:, self.oldest :]
        by_lane[:, head:] = held[:, : self.oldest]

    def take_back(self, flat: np.ndarray, rows: np.ndarray) -> None:
        """Copy values of rows, [items] as laid out, to [rows]."""
        held, by_time = flat.reshape(-1, self.shape[0]).T, rows.reshape(self.shape[0], -1)
        head = self.shape[0] - self.oldest
        by_time[self.oldest :] = held[:head]
        by_time[: self.oldest] = held[head:]

    def taken_back(self, flat: Tensor) -> Tensor:
        """Rows laid out, [items, ...], as [time, *lanes, ...], in memory of their own."""
        rows = fresh((*self.shape, *flat.shape[1:]), flat.dtype)
        if rows.numel():
            self.take_back(whole(dense(flat), 1), whole(rows, len(self.shape)))
        return rows


class Order:
    """The places of rows that are laid out, and between them, behind each end, of what came after it.

    Args:
        ring: the rows.
        done: whether a trajectory ends with a row, [time, *lanes]. The row that was written last ends one in any case.
        closed: whether the last row of a lane ends one too, where that is another row.
    """

    def __init__(self, ring: Ring, done: Tensor, closed: bool = False) -> None:
        self.ring = ring
        self.closed = closed
        self.ends = done.numpy().reshape(ring.shape[0], -1).copy()
        """Whether a trajectory ends with a row, [time, lanes]."""
        self.ends[[ring.newest, -1] if closed and not ring.is_full else ring.newest] = True
        ends = np.ascontiguousarray(self.ends.T)
        found = places(ends.reshape(-1)).reshape(ends.shape)
        self.size = int(found[-1, -1]) + 1 + int(ends[-1, -1])
        """How many places there are."""
        if ring.oldest:  # the same circle of places, turned
            begin = found[:, ring.oldest, None] - found[:, :1]
            size = found[:, -1:] + 1 + ends[:, -1:] - found[:, :1]
            found[:, ring.oldest :] -= begin
            found[:, : ring.oldest] += size - begin
        self.rows = np.ascontiguousarray(found.T).reshape(-1)
        """The place of each row, [rows]."""
        self.stops = np.flatnonzero(self.ends)
        """The rows with which trajectories end; what came after one has the place behind it."""
        self.unended = (
            np.array([], np.int64) if ring.is_full else np.flatnonzero(~self.ends[-1]) + ring.items - ring.lanes
        )
        """The last rows of lanes with which none ends: they have no place behind them."""

    def trajectories(self) -> tuple[Tensor, Tensor]:
        """How many rows each trajectory has, [trajectories], and whether it has an end.

        Rows of a lane behind the last end are one more, without an end: they were never written.
        """
        ends = np.empty(self.ring.items, np.bool_)
        self.ring.lay_out(self.ends, ends)
        stops = ends.copy()
        stops.reshape(-1, self.ring.shape[0])[:, -1] = True
        (found,) = stops.nonzero()
        return torch.from_numpy(np.diff(found, prepend=-1)), torch.from_numpy(ends[found])
