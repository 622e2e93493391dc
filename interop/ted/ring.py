"""Where the rows of a ring go when its trajectories are laid one after the other, lane by lane, oldest row first."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


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
    def oldest(self) -> int:
        """The row that comes first."""
        return self.shift % self.shape[0] if self.is_full else 0

    @property
    def newest(self) -> int:
        """The row that was written last, counted from the oldest one."""
        return self.shape[0] - 1 if self.is_full else (self.shift - 1) % self.shape[0]

    def by_time(self, flat: Tensor) -> Tensor:
        """A view of rows laid out, [items, ...], as [time, *lanes, ...] with the oldest first."""
        return flat.unflatten(0, (*self.shape[1:], self.shape[0])).movedim(len(self.shape) - 1, 0)

    def lay_out(self, rows: Tensor, flat: Tensor) -> None:
        """Copy [time, *lanes, ...] to [items, ...]."""
        view, head = self.by_time(flat), self.shape[0] - self.oldest
        view[:head] = rows[self.oldest :]
        if self.oldest:
            view[head:] = rows[: self.oldest]

    def take_back(self, flat: Tensor, rows: Tensor) -> None:
        """Copy [items, ...] to [time, *lanes, ...]."""
        view, head = self.by_time(flat), self.shape[0] - self.oldest
        rows[self.oldest :] = view[:head]
        if self.oldest:
            rows[: self.oldest] = view[head:]

    def taken_back(self, flat: Tensor) -> Tensor:
        """The same, in memory of its own."""
        rows = flat.new_empty((*self.shape, *flat.shape[1:]))
        self.take_back(flat, rows)
        return rows


class Order:
    """Rows laid out, and between them, behind each end, one place for what came after it.

    Args:
        ring: the rows.
        done: whether a trajectory ends with a row, [items] as laid out. The row that was written last ends one in any case.
        closed: whether the last row of a lane ends one too, where that is another row.
    """

    def __init__(self, ring: Ring, done: Tensor, closed: bool = False) -> None:
        self.ring = ring
        self.closed = closed
        self.ends = done.clone()
        lanes = self.ends.view(-1, ring.shape[0])
        lanes[:, [ring.newest, -1] if closed else ring.newest] = True
        before = self.ends.to(torch.int64).cumsum(0)
        self.size = ring.items + int(before[-1])
        """Places there are."""
        self.roots = torch.arange(ring.items, device="cpu") + before - self.ends.to(torch.int64)
        """The place of each row, [items]."""
        self.after = self.roots + 1
        """The place of what came after each row; of a lane's last row its own place, if no trajectory ends there."""
        self.after.view(-1, ring.shape[0])[:, -1] -= (~lanes[:, -1]).to(torch.int64)

    def trajectories(self) -> tuple[Tensor, Tensor]:
        """How many rows each trajectory has, [trajectories], and whether it has an end.

        Rows of a lane behind the last end are one more, without an end: they were never written.
        """
        stops = self.ends.clone()
        stops.view(-1, self.ring.shape[0])[:, -1] = True
        (stops,) = stops.nonzero(as_tuple=True)
        return stops.diff(prepend=stops.new_full((1,), -1)), self.ends[stops]
