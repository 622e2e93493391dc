"""The stored rows from the oldest to the newest, and their trajectories: NumPy arrays on the host."""

import dataclasses

import numpy as np

from fbuf.trajectories import TrajectoryState
from fbuf.writers import RingState


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Rows of a ring in the order of writing.

    Attributes:
        rows: int64 [rows]: the row of the ring.
        capacity: rows of the ring.
        lanes: the number of items in a row.
        written: how many rows were ever written.
    """

    rows: np.ndarray
    capacity: int
    lanes: int
    written: int

    @classmethod
    def of(cls, ring: RingState, capacity: int, lanes: int) -> "Timeline":
        """The timeline of a ring whose counters have values. Waits for them. O(capacity)."""
        cursor, size, low, high = np.asarray(ring.counters).tolist()
        return cls((cursor - size + np.arange(size)) % capacity, capacity, lanes, (high << 32) | low)

    @property
    def slots(self) -> np.ndarray:
        """int64 [rows, lanes]: the slots."""
        return self.rows[:, None] * self.lanes + np.arange(self.lanes)

    @property
    def ages(self) -> np.ndarray:
        """int64 [rows]: how many rows were written after each row."""
        return np.arange(self.rows.size)[::-1]

    def positions(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions in the timeline, and lanes, of slots in use."""
        oldest = int(self.rows[0]) if self.rows.size else 0
        return (slots // self.lanes - oldest) % self.capacity, slots % self.lanes


@dataclasses.dataclass(frozen=True)
class TrajectoryTimeline(Timeline):
    """A timeline with the place of each item in its trajectory. Tables are [rows, lanes].

    Attributes:
        number: int64: the number of the trajectory in its lane.
        step: int64: how many rows of the trajectory came before, stored or not.
        before: int64: how many of them are stored.
        after: int64: how many stored rows of the trajectory follow.
        kind: uint8: how the trajectory ended, as in `fbuf.trajectories`.
        spans: uint32 [rows, lanes, 3]: the span of the trajectory, as in `TrajectoryState`.
    """

    number: np.ndarray
    step: np.ndarray
    before: np.ndarray
    after: np.ndarray
    kind: np.ndarray
    spans: np.ndarray

    @classmethod
    def of_index(cls, ring: RingState, index: TrajectoryState) -> "TrajectoryTimeline":
        """The timeline of a ring and the index of its trajectories. Waits for their values. O(capacity)."""
        capacity, lanes = index.number.shape
        line = Timeline.of(ring, capacity, lanes)
        size = line.rows.size
        number = np.asarray(index.number)[line.rows].astype(np.int64)
        spans = np.asarray(index.spans)[number % capacity, np.arange(lanes)]
        # Times count modulo 2^32, and so do differences of arrays.
        time = np.arange(size, dtype=np.uint32)[:, None] + np.uint32((line.written - size) % 2**32)
        step = (time - spans[..., 0]).astype(np.int64)
        return cls(
            rows=line.rows,
            capacity=capacity,
            lanes=lanes,
            written=line.written,
            number=number,
            step=step,
            before=np.minimum(step, np.arange(size)[:, None]),
            after=(spans[..., 1] - time).astype(np.int64),
            kind=spans[..., 2].astype(np.uint8),
            spans=spans,
        )

    @property
    def stored(self) -> np.ndarray:
        """int64: how many rows of the trajectory of an item are stored."""
        return self.before + self.after + 1
