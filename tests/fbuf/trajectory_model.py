"""Trajectories in a ring by brute force: lists of rows, cut one by one, and every start of a slice written down."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from fbuf import BufferState, TrajectoryState

OPEN, TERMINATED, TRUNCATED, CUT = 0, 1, 2, 3


@dataclasses.dataclass
class Trajectory:
    """All rows of one trajectory that were ever written."""

    lane: int
    id: int | None
    times: list[int] = dataclasses.field(default_factory=list)
    kind: int = OPEN


@dataclasses.dataclass(frozen=True)
class Stored:
    """What is left of a trajectory: slots in the order of writing, and how many rows before them are gone."""

    lane: int
    kind: int
    slots: tuple[int, ...]
    lost: int


class TrajectoriesModel:
    """Each lane's trajectories; the item at time t in lane l is number t * lanes + l, and stands in row t % capacity."""

    def __init__(self, capacity: int, lanes: int) -> None:
        self.capacity, self.lanes = capacity, lanes
        self.clear()

    def clear(self) -> None:
        self.time, self.all = 0, [[] for _ in range(self.lanes)]

    def write(self, ended: np.ndarray, ids: np.ndarray | None = None) -> np.ndarray:
        """Rows of kinds of end [n, lanes]. The numbers of the items, as large."""
        first = self.time
        for row, ends in enumerate(ended):
            for lane, end in enumerate(ends):
                self._write_one(lane, int(end), None if ids is None else int(ids[row, lane]))
            self.time += 1
        return np.arange(first * self.lanes, self.time * self.lanes, dtype=np.int32).reshape(-1, self.lanes)

    def _write_one(self, lane: int, end: int, id_: int | None) -> None:
        known: list[Trajectory] = self.all[lane]
        goes_on = bool(known) and known[-1].kind == OPEN
        if not goes_on or known[-1].id != id_:
            if goes_on:
                known[-1].kind = CUT
            known.append(Trajectory(lane, id_))
        known[-1].times.append(self.time)
        known[-1].kind = end

    def stored(self) -> list[Stored]:
        """What is left of each trajectory of which something is."""
        oldest, found = max(self.time - self.capacity, 0), []
        for trajectory in (each for lane in self.all for each in lane):
            kept = [time for time in trajectory.times if time >= oldest]
            slots = tuple(time % self.capacity * self.lanes + trajectory.lane for time in kept)
            if kept:
                found.append(Stored(trajectory.lane, trajectory.kind, slots, len(trajectory.times) - len(kept)))
        return found

    def numbers(self) -> dict[int, int]:
        """The number of the item in each slot that holds one."""
        times = range(max(self.time - self.capacity, 0), self.time)
        slot = {time: time % self.capacity * self.lanes for time in times}
        return {slot[time] + lane: time * self.lanes + lane for time in times for lane in range(self.lanes)}

    def starts(self, least: int, period: int = 1) -> list[int]:
        """Slots with `least` items from there to the end of what is stored of the trajectory, at multiples of the period."""
        found = []
        for each in self.stored():
            starts = each.slots[: max(len(each.slots) - least + 1, 0)]
            found += [slot for place, slot in enumerate(starts) if (each.lost + place) % period == 0]
        return found

    def chances(self, least: int, weights: np.ndarray | None = None, period: int = 1) -> dict[int, float]:
        """Of each start: alike, or in proportion to the weights of slots."""
        starts = self.starts(least, period)
        mass = np.ones(len(starts)) if weights is None else weights[starts]
        return {slot: float(each / mass.sum()) for slot, each in zip(starts, mass, strict=True) if each > 0}

    def chances_per_trajectory(self, least: int, length: int) -> dict[int, float]:
        """Of each start, where trajectories are alike, and then the starts of whole slices in them; at worst the first."""
        long_enough = [each.slots for each in self.stored() if len(each.slots) >= least]
        choices = [slots[: max(len(slots) - length + 1, 1)] for slots in long_enough]
        return {slot: 1 / len(long_enough) / len(slots) for slots in choices for slot in slots}

    def window(self, start: int, length: int, burn_in: int) -> tuple[list[int], list[bool]]:
        """The numbers of a slice's items, the nearest one where there is none, and where there is one."""
        slots = next(each.slots for each in self.stored() if start in each.slots)
        places = slots.index(start) + np.arange(-burn_in, length)
        numbers, inside = self.numbers(), (places >= 0) & (places < len(slots))
        return [numbers[slots[place]] for place in places.clip(0, len(slots) - 1)], inside.tolist()


ITEM = {"serial": np.int32(0), "terminated": np.bool_(0), "truncated": np.bool_(0), "id": np.int32(0)}


@dataclasses.dataclass(frozen=True)
class Rows:
    """One write: leaves [n, lanes]."""

    terminated: np.ndarray
    truncated: np.ndarray
    id: np.ndarray

    @property
    def ended(self) -> np.ndarray:
        return np.where(self.terminated, TERMINATED, np.where(self.truncated, TRUNCATED, OPEN))

    def batch(self, serials: np.ndarray, lanes: tuple[int, ...]) -> dict[str, np.ndarray]:
        """The rows as items like ITEM."""
        leaves = {
            "serial": serials,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "id": self.id.astype(np.int32),
        }
        return {name: leaf.reshape(-1, *lanes) for name, leaf in leaves.items()}


def rows(codes: Any, before: Any = 0) -> Rows:
    """Rows of what each item says [n, lanes]: . goes on, t terminated, u truncated, b both, i another id, j that and t."""
    codes = np.asarray(codes)
    says = lambda letters: np.isin(codes, list(letters))  # noqa: E731
    return Rows(says("tbj"), says("ub"), np.cumsum(says("ij"), axis=0) + before)


def histories(lanes: int, counts: Sequence[int], most: int = 7) -> st.SearchStrategy[list[Rows | None]]:
    """Writes of so many rows; None stands for clear()."""

    def write(count: int) -> st.SearchStrategy[bytes]:
        return st.binary(min_size=count * lanes, max_size=count * lanes)

    def settled(blocks: list[bytes]) -> list[Rows | None]:
        found: list[Rows | None] = []
        id_ = np.zeros(lanes, int)
        for block in blocks:
            if not block:
                found.append(None)
                continue
            codes = np.asarray(list("........ttuubijj"))[np.frombuffer(block, np.uint8) % 16].reshape(-1, lanes)
            found.append(rows(codes, id_))
            id_ = found[-1].id[-1]
        return found

    each = st.sampled_from([*counts, *counts, *counts, 0])
    return st.lists(each.flatmap(write), min_size=1, max_size=most).map(settled)


def shifted(state: BufferState, by: int) -> BufferState:
    """The state as it would stand had `by` rows more been written before all others."""
    index, low = state.trajectories, jnp.uint32(by % 2**32)
    assert index is not None
    return dataclasses.replace(
        state,
        ring=dataclasses.replace(state.ring, counters=state.ring.counters.at[2].add(low)),
        trajectories=dataclasses.replace(index, spans=index.spans.at[..., :2].add(low)),
    )


def renumbered(index: TrajectoryState, latest: int) -> TrajectoryState:
    """The index with numbers moved, by turns of the capacity, to where the latest is at most this."""
    capacity = index.number.shape[0]
    turn = capacity * ((2**31 - 1) // capacity)
    by = (latest - int(index.latest.max())) // capacity * capacity
    numbers, latests = (((np.asarray(each).astype(np.int64) + by) % turn) for each in (index.number, index.latest))
    return dataclasses.replace(index, number=jnp.asarray(numbers, jnp.int32), latest=jnp.asarray(latests, jnp.int32))


def begun_long_ago(state: BufferState, steps: int) -> BufferState:
    """The state as it would stand had the trajectories that go on begun so many steps before the row to come."""
    index = state.trajectories
    assert index is not None
    spans = index.spans.at[..., 0].set(state.ring.written[0] - jnp.uint32(steps))
    return dataclasses.replace(state, trajectories=dataclasses.replace(index, spans=spans))


CODES = ["..t", ".", "...", "t.u..i.bi.t", "i", "...", "j..", "..........."]  # of rows in one lane, write by write
