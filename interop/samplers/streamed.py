"""Windows of trajectories that were written since the last draw, each drawn once."""

from typing import Any, NamedTuple

import numpy as np

from interop.host.trajectories import Trajectories
from interop.samplers.item_values import ItemValues
from interop.samplers.slice_draws import SliceDraws, SliceShape
from interop.samplers.slice_info import DrawnSlices
from interop.samplers.trajectory_source import TrajectorySource
from interop.shared.processes import OneProcess
from interop.storages import Storage
from interop.storages.all_or_nothing import Undoable

_ONE_PROCESS = (
    "a StreamingSliceSampler cannot draw in another process, which would not know which windows were drawn: sample in the "
    "process that made it; other processes may write"
)


class Streamed(NamedTuple):
    """Which windows wait to be drawn. Rows have numbers here: how many rows were written around the ring before.

    Attributes:
        length: rows of a window.
        seen: the number of the first row that was not looked at.
        pending: int64 [lanes], where the next window of the newest trajectory of each lane begins.
        queue: int64 [n, 2], the first row and the lane of each window, in the order of their last rows.
    """

    length: int
    seen: int
    pending: np.ndarray
    queue: np.ndarray

    def after(self, index: Trajectories, offset: int) -> "Streamed":
        """With the windows of rows behind `seen`. `offset` is the number of the row of time 0. O(new trajectories)."""
        length = self.length
        seen = max(self.seen - offset, index.oldest)
        queue = self.queue[self.queue[:, 0] >= index.oldest + offset]  # the others were overwritten
        if seen == index.now:
            return self._replace(queue=queue)
        stored = index.stored()
        stored = stored[stored[:, 2] >= seen]
        lane, first, last = stored[:, 0], index.first_stored(stored), stored[:, 2]
        start = np.where(first < seen, self.pending[lane] - offset, first)
        start += -(-np.maximum(index.oldest - start, 0) // length) * length
        count = np.maximum((last - start + 1) // length, 0)
        begins = np.repeat(start - length * (count.cumsum() - count), count) + length * np.arange(count.sum())
        new = np.stack((begins + offset, np.repeat(lane, count)), 1)
        newest = last == index.now - 1
        pending = self.pending.copy()
        pending[lane[newest]] = (start + length * count)[newest] + offset
        return Streamed(length, index.now + offset, pending, np.concatenate((queue, new[np.lexsort(new.T[::-1])])))

    def valid(self, index: Trajectories, offset: int, most: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Time and lane of the first windows that lie within a trajectory, and how far in the queue they reach."""
        found = [np.zeros((0, 2), np.int64)]
        at = count = 0
        while count < most and at < len(self.queue):
            part = self.queue[at : at + most - count]
            times = part[:, 0] - offset
            lane = part[:, 1] if index.lanes > 1 else None
            _, first, last = index.located(index.rows_at(times), lane)
            part = part[(first <= times) & (times + self.length - 1 <= last)]  # markers may have been edited since
            at += min(most - count, len(self.queue) - at)
            count += len(part)
            found.append(part)
        windows = np.concatenate(found)
        return windows[:, 0] - offset, windows[:, 1], at


class StreamedWindows(ItemValues):
    """The windows of one storage that wait to be drawn.

    Attributes:
        state: None before the first draw: all stored rows are new.
    """

    def __init__(self) -> None:
        self.state: Streamed | None = None
        self._process = OneProcess(_ONE_PROCESS)

    def clear(self) -> None:
        self.state = None

    def take_over(self, storage: Storage) -> None:
        self.state = None

    def refuse_forked_child(self) -> None:
        self._process.check()

    def before_write(self) -> dict[str, Any]:
        return {"state": self.state}

    def put_back(self, before: dict[str, Any]) -> None:
        self.state = before["state"]

    def now(self, index: Trajectories, written: int, length: int) -> tuple[Streamed, int]:
        """The windows of all rows, and the number of the row of time 0. Changes nothing."""
        offset = written - index.now
        state = self.state
        if state is None or state.seen > written or state.pending.size != index.lanes:
            oldest = index.oldest + offset
            state = Streamed(length, oldest, np.full(index.lanes, oldest), np.zeros((0, 2), np.int64))
        elif state.length != length:
            state = Streamed(length, state.seen, state.pending, state.queue[:0])
        return state.after(index, offset), offset


class StreamedDraws(SliceDraws):
    """Draws windows that were written since, the oldest first, and beyond these slices as `SliceDraws`."""

    has_state = True

    def __init__(self, source: TrajectorySource, shape: SliceShape, windows: StreamedWindows) -> None:
        super().__init__(source, shape)
        self._windows = windows

    @property
    def undoable(self) -> Undoable | None:
        return self._windows

    def _slices(self, storage: Storage, count: int, length: int, key: np.ndarray) -> DrawnSlices:
        windows = self._windows
        windows.refuse_forked_child()
        index = self.source.of(storage)
        if index.is_interleaved:
            raise RuntimeError(
                "a StreamingSliceSampler needs trajectories whose rows lie side by side: give each environment a lane, "
                "ndim=2, or a buffer of its own"
            )
        state, offset = windows.now(index, storage.ring.written, length)
        times, lane, taken = state.valid(index, offset, count)
        drawn = None
        if times.size:
            slots, begins = index.windows(times, lane, length)
            drawn = DrawnSlices(slots.reshape(-1), length, begins)
        if drawn is None or times.size < count:
            others = super()._slices(storage, count - times.size, length, key)
            drawn = others if drawn is None else _joined(drawn, others)
        windows.state = state._replace(queue=state.queue[taken:])  # last: an error takes no window
        return drawn

    def share(self, storage: Storage, batch_size: int) -> None:
        """None: no part of a batch over several buffers."""


def _joined(full: DrawnSlices, others: DrawnSlices) -> DrawnSlices:
    """Slices of full length and others behind them."""
    slots = np.concatenate((full.slots, others.slots))
    count = full.slots.size // full.length
    if others.lengths is None:
        rows = None if full.begins is None or others.begins is None else np.concatenate((full.begins, others.begins))
        return DrawnSlices(slots, full.length, rows)
    lengths = np.concatenate((np.full(count, full.length), others.lengths))
    mask = None if others.mask is None else np.concatenate((np.ones(full.slots.size, np.bool_), others.mask))
    return DrawnSlices(slots, full.length, None, lengths, mask)
