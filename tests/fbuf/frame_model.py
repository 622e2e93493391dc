"""Streams of items whose observations are stacks of frames, and what a buffer of frames makes of them, by brute force."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf import Buffer, BufferState, Frames, Trajectories
from fbuf.trajectories import OPEN, TERMINATED, TRUNCATED
from tests.fbuf.compiled import init, jit


def whole(buffer: Buffer, state: BufferState) -> Any:
    """What is read at all slots, and where that is intact."""
    slots = jnp.arange(buffer.capacity * buffer.items_per_row, dtype=jnp.int32)
    return buffer.read(state, slots), buffer.intact(state, slots)


@functools.partial(jit, static_argnums=0)
def extended(buffer: Buffer, state: BufferState, batch: Any) -> tuple[BufferState, Any]:
    """The buffer after one more batch, and the whole of it."""
    state, _ = buffer.extend(state, batch)
    return state, whole(buffer, state)


@functools.partial(jit, static_argnums=(0, 3))
def played(buffer: Buffer, state: BufferState, batch: Any, draws: int = 0) -> tuple[BufferState, Any, Any]:
    """The buffer after the rows of a batch, one by one; the whole of it; and a sample."""

    def step(state: BufferState, row: Any) -> tuple[BufferState, None]:
        return buffer.extend(state, jax.tree.map(lambda leaf: leaf[None], row))[0], None

    state, _ = jax.lax.scan(step, state, batch)
    return state, whole(buffer, state), buffer.sample(state, jax.random.key(1), draws)[1:] if draws else None


CUT, UNRELATED = 3, 4  # beside the kinds of ends: the id changes; the next observation is another one
ENDS = Trajectories(terminated="terminated", truncated="truncated", id="id")
EPISODES = Trajectories(terminated="terminated", truncated="truncated")
Item = dict[str, Any]


def made(rule: Frames, frames: list[np.ndarray]) -> np.ndarray:
    """An observation: frames side by side if along the first axis, of which they have one of their own otherwise."""
    if rule.stack == 1:
        return frames[-1]
    return np.concatenate(frames) if rule.axis == 0 else np.stack(frames, rule.axis)


class Environment:
    """One lane's stream of items. Each frame is a number that no other frame has."""

    def __init__(self, rule: Frames, first: int, frame: tuple[int, ...] = (2,)) -> None:
        self.rule, self.shape, self.numbers, self.id = rule, frame, itertools.count(first), 0
        self.reset()

    def frame(self) -> np.ndarray:
        return np.full(self.shape, next(self.numbers), np.int16)

    def reset(self) -> None:
        first = self.frame()
        padding = first if self.rule.padding == "first" else np.zeros_like(first)
        self.frames = [padding] * (self.rule.stack - 1) + [first]

    def obs(self) -> np.ndarray:
        return made(self.rule, self.frames)

    def step(self, kind: int) -> Item:
        item = {"obs": self.obs(), "id": np.int32(self.id), "reward": np.float32(next(self.numbers))}
        self.frames = [*self.frames[1:], self.frame()]
        item["next_obs"] = self.obs()
        item["terminated"], item["truncated"] = np.bool_(kind == TERMINATED), np.bool_(kind == TRUNCATED)
        if kind != OPEN:
            self.id += kind in (CUT, TRUNCATED)
            self.reset()
        return item


class Model:
    """All that was written, and what the frames of it make, by brute force."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.lanes = buffer, buffer.items_per_row
        assert isinstance(buffer.frames, tuple)
        self.rule = buffer.frames[0]
        self.rows: list[list[Item]] = []
        self.final: dict[tuple[int, int], int] = {}  # (row, lane): number of the end
        self.begun, self.open = [0] * self.lanes, [False] * self.lanes
        self.start: list[list[int]] = []
        self.origin = self.ends = self.unlike = 0

    def newest(self, obs: np.ndarray) -> np.ndarray:
        if self.rule.stack == 1:
            return obs
        return obs[-len(obs) // self.rule.stack :] if self.rule.axis == 0 else np.take(obs, -1, self.rule.axis)

    def extend(self, batch: list[list[Item]]) -> None:
        """Write rows one by one; ends are noticed with the row that shows them, those of rows that do not stay never."""
        first, capacity = len(self.rows), self.buffer.capacity
        for time, row in enumerate(batch, first):
            cut = [
                self.open[lane]
                and self._is_cut(self.rows[-1][lane], item)
                and time - 1 >= first + len(batch) - capacity
                for lane, item in enumerate(row)
            ]
            for lane in np.flatnonzero(cut):
                self._ended(time - 1, int(lane))
            starts = []
            for lane, item in enumerate(row):
                if not self.open[lane] or item["id"] != self.rows[-1][lane]["id"]:
                    self.begun[lane] = time
                starts.append(self.begun[lane])
                self.open[lane] = not (item["terminated"] or item["truncated"])
            self.rows.append(row)
            self.start.append(starts)
            for lane in range(self.lanes):
                if not self.open[lane] and time >= first + len(batch) - capacity:
                    self._ended(time, lane)
        for time in range(max(first, len(self.rows) - capacity), len(self.rows)):
            self.unlike += sum(not self.is_like(time, lane) for lane in range(self.lanes))

    def _is_cut(self, before: Item, item: Item) -> bool:
        follows = np.array_equal(self.newest(before["next_obs"]), self.newest(item["obs"]))
        return bool(before["id"] != item["id"]) or not follows

    def _ended(self, time: int, lane: int) -> None:
        self.final[time, lane] = self.ends
        self.ends += 1

    def clear(self) -> None:
        self.origin, self.open, self.unlike = len(self.rows), [False] * self.lanes, 0

    def is_like(self, time: int, lane: int) -> bool:
        """Whether an item's stacks are made of the frames of its trajectory."""
        start = self.start[time][lane]
        frames = [
            self.newest(self.rows[max(start, at)][lane]["obs"]) * (at >= start or self.rule.padding == "first")
            for at in range(time - self.rule.stack + 1, time + 1)
        ]
        frames.append(self.newest(self.rows[time][lane]["next_obs"]))
        if self.rule.stack == 1:
            return True
        parts = {"obs": made(self.rule, frames[:-1]), "next_obs": made(self.rule, frames[1:])}
        return all(np.array_equal(part, self.rows[time][lane][key]) for key, part in parts.items())

    def is_intact(self, time: int, lane: int) -> bool:
        room = self.rule.entries(self.buffer.capacity * self.lanes)
        return self.is_like(time, lane) and self.final.get((time, lane), self.ends) >= self.ends - room

    def stored(self) -> list[tuple[int, int, int]]:
        """Slot, time and lane of each item."""
        capacity, times = self.buffer.capacity, range(self.origin, len(self.rows))
        return [
            ((time - self.origin) % capacity * self.lanes + lane, time, lane)
            for time in times[-capacity:]
            for lane in range(self.lanes)
        ]


def batch_of(rows: list[list[Item]], lanes: tuple[int, ...]) -> Any:
    """Rows of items as arrays [n, *lanes, ...]."""
    return {
        key: np.stack([np.stack([item[key] for item in row]) for row in rows]).reshape(
            len(rows), *lanes, *np.shape(rows[0][0][key])
        )
        for key in rows[0][0]
    }


def environments(buffer: Buffer, **others: Any) -> list[Environment]:
    assert isinstance(buffer.frames, tuple)
    return [Environment(buffer.frames[0], 1 + 8000 * lane, **others) for lane in range(buffer.items_per_row)]


def check(buffer: Buffer, state: BufferState, found: Any, model: Model) -> None:
    """Every stored item is read as it was written, or is not intact because it must be."""
    assert state.frames[0].unlike == model.unlike
    items, is_intact = jax.tree.map(np.asarray, found)
    for slot, time, lane in model.stored():
        assert is_intact[slot] == model.is_intact(time, lane)
        for key, value in model.rows[time][lane].items():
            expected = value if is_intact[slot] or key not in ("obs", "next_obs") else np.zeros_like(value)
            np.testing.assert_array_equal(items[key][slot], expected)
            assert items[key].dtype == value.dtype


def rows_of(buffer: Buffer, kinds: Any) -> tuple[list[list[Item]], BufferState]:
    """Rows that end so, [n, lanes], and an empty buffer."""
    streams = environments(buffer)
    rows = [[stream.step(int(kind)) for stream, kind in zip(streams, row, strict=True)] for row in kinds]
    return rows, init(buffer, rows[0][0])


def random_kinds(rows: int, lanes: int, chance: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.where(rng.random((rows, lanes)) < chance, rng.integers(1, 3, (rows, lanes)), OPEN)
