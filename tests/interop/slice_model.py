"""Slices by brute force: every trajectory a list of items, and every slice that may be drawn written down with its share."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from scipy import stats
from tensordict import TensorDict

Slices = list[tuple[int, ...]]


class SliceModel:
    """What was written to a ring of `capacity` rows. The item of time t in lane l is number t * lanes + l."""

    def __init__(self, capacity: int, lanes: tuple[int, ...] = (), by_turns: bool = False) -> None:
        self.capacity, self.shape, self.lanes, self.by_turns = capacity, lanes, math.prod(lanes), by_turns
        self.random = np.random.default_rng(0)
        self.going_ids = list(range(self.lanes))
        self.clear()

    def clear(self) -> None:
        """The buffer was emptied."""
        self.ends: list[list[bool]] = []  # by time and lane
        self.ids: list[list[int]] = []

    def write(self, ends: np.ndarray, ids: np.ndarray) -> TensorDict:
        """Rows of ends and ids, [n, lanes], of which ids are for those who read them. The rows as data for `extend`."""
        first = len(self.ends)
        self.ends += ends.tolist()
        self.ids += ids.tolist()
        return self.data(np.arange(first, first + len(ends)))

    def write_some(self, count: int, chance: float) -> TensorDict:
        """Rows whose trajectories end with a chance; a new one has a new id."""
        ends = self.random.random((count, self.lanes)) < chance
        ids = np.empty((count, self.lanes), np.int64)
        for row, lane in np.ndindex(*ends.shape):
            ids[row, lane] = self.going_ids[lane]
            if ends[row, lane]:
                self.going_ids[lane] = max(self.going_ids) + 1
        return self.write(ends, ids)

    def data(self, times: np.ndarray) -> TensorDict:
        """The rows of some times in the layout of the user: [*lanes, T] with the first and the last lane exchanged."""

        def laid_out(values: Any) -> torch.Tensor:
            array = np.asarray(values).reshape(len(times), *self.shape)
            return torch.from_numpy(np.ascontiguousarray(array.swapaxes(0, -1)))

        numbers = times[:, None] * self.lanes + np.arange(self.lanes)
        item = laid_out(numbers)
        done = laid_out([self.ends[time] for time in times]).unsqueeze(-1)
        ids = laid_out([self.ids[time] for time in times])
        return TensorDict({"x": item, "id": ids, "next": TensorDict({"done": done}, item.shape)}, item.shape)

    def trajectories(self) -> Slices:
        """The stored items of each trajectory of which something is stored."""
        oldest = max(0, len(self.ends) - self.capacity)
        found: dict[Any, list[int]] = {}
        runs = [0] * self.lanes
        for time in range(oldest, len(self.ends)):
            for lane in range(self.lanes):
                key = self.ids[time][lane] if self.by_turns else (lane, runs[lane])
                found.setdefault(key, []).append(time * self.lanes + lane)
                runs[lane] += self.ends[time][lane]
        return sorted(map(tuple, found.values()))

    def numbers(self) -> list[int]:
        """The numbers of stored items by flat slot; for one that is written from its first row on."""
        by_slot = {}
        for time in range(max(0, len(self.ends) - self.capacity), len(self.ends)):
            for lane in range(self.lanes):
                by_slot[time % self.capacity * self.lanes + lane] = time * self.lanes + lane
        return [by_slot[slot] for slot in range(len(by_slot))]


def shares(
    trajectories: Slices, length: int, strict: bool = True, left: int = 0, right: int = 0
) -> dict[tuple[int, ...], float]:
    """Every slice that may be drawn and how often: trajectories equally often, and starts in each.

    `left` and `right` say how many items of a slice may be missing before the first and behind the last of a trajectory.
    """
    found: Counter[tuple[int, ...]] = Counter()
    taking_part = [each for each in trajectories if not strict or len(each) >= length]
    for each in taking_part:
        last = min(max(len(each) - length, 0) + right, len(each) - 1)
        starts = range(-left, last + 1)
        for start in starts:
            found[each[max(start, 0) : start + length]] += 1 / len(taking_part) / len(starts)
    return dict(found)


def starts(
    trajectories: Slices, length: int, strict: bool = True, need: int | None = None
) -> dict[int, tuple[int, ...]]:
    """The slices by first item that are drawn by the priority of it; `need` items are left from there at least."""
    need = length if need is None else need
    return {
        item: each[place : place + length]
        for each in trajectories
        for place, item in enumerate(each)
        if (len(each) - place >= need and (not strict or len(each) >= length)) or (not strict and place == 0)
    }


def drawn(buffer: Any, *size: int) -> Slices:
    """A batch cut into its slices, where the sampler says they end."""
    batch, info = buffer.sample(*size, return_info=True)
    key = buffer.sampler.truncated_key
    return cut(batch.get("x").reshape(-1).tolist(), info[key].reshape(-1).tolist())


def cut(items: Iterable[int], ends: Iterable[bool]) -> Slices:
    """Items in a row, cut behind those that are marked."""
    found, going = [], []
    for item, end in zip(items, ends, strict=True):
        going.append(item)
        if end:
            found.append(tuple(going))
            going = []
    assert not going, "the last slice of a batch has no end"
    return found


def check_law(seen: Iterable[Any], wanted: dict[Any, float]) -> None:
    """Nothing but what is wanted was seen, all of it, and as often; a chance of one in ten thousand to fail wrongly."""
    counts = Counter(seen)
    assert set(counts) == set(wanted)
    total = counts.total()
    expected = {key: share * total / math.fsum(wanted.values()) for key, share in wanted.items()}
    assert min(expected.values()) >= 5, "too few draws to tell"
    if len(wanted) > 1:
        keys = list(wanted)
        assert stats.chisquare([counts[key] for key in keys], [expected[key] for key in keys]).pvalue > 1e-4
