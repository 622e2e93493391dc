"""The law of the next draw by brute force: every start and every window written down, for each rule."""

from typing import Any

import jax
import numpy as np

import fbuf
from fbuf import Buffer, Fifo, PerTrajectory, Prioritized, Shuffled, Slices
from tests.fbuf.compiled import clear, extend, sample, update
from tests.fbuf.model import PrioritiesModel
from tests.fbuf.trajectory_model import ITEM, Rows, TrajectoriesModel, rows

CODES = list("........ttuubijj")


class ChanceModel:
    """A buffer, and the law of its next draw in plain Python: lists of items, and sets of what was drawn."""

    def __init__(self, buffer: Buffer, seed: int) -> None:
        self.buffer, self.random, self.state = buffer, np.random.default_rng(seed), buffer.init(ITEM)
        self.rule: Any = buffer.sampler.starts if isinstance(buffer.sampler, Slices) else buffer.sampler
        self.epochs = self.rule.trajectories if isinstance(self.rule, PerTrajectory) else self.rule
        self.lanes, self.id = buffer.items_per_row, np.zeros(buffer.items_per_row, int)
        self.clear()

    def clear(self) -> None:
        """Empty the buffer."""
        self.state = clear(self.buffer, self.state)
        self.forget()

    def forget(self) -> None:
        """An empty model."""
        self.model = TrajectoriesModel(self.buffer.capacity, self.lanes)
        self.drawn: set[Any] = set()  # of this epoch: slots, starts or trajectories
        self.priorities = None
        self.unread: list[int] = []
        if isinstance(self.rule, Prioritized):
            slots = self.buffer.capacity * self.lanes
            self.priorities = PrioritiesModel(slots, self.rule.alpha, self.rule.eps, self.rule.new_items)

    def write(self, new: Rows) -> None:
        """Write rows."""
        before = len(self.model.numbers())
        serials = self.model.write(new.ended, new.id if self.buffer.trajectories.id else None)  # type: ignore[union-attr]
        self.state, slots = extend(self.buffer, self.state, new.batch(serials, self.buffer.lanes))
        kept = np.asarray(slots)[-self.buffer.capacity :].reshape(-1)
        if self.priorities is not None:
            self.priorities.written(kept)
        self.unread = (self.unread + np.asarray(slots).reshape(-1).tolist())[-self.buffer.capacity * self.lanes :]
        if isinstance(self.buffer.sampler, Slices) or len(self.model.numbers()) != before:
            self.drawn = set()

    def write_some(self, count: int) -> None:
        """Write rows of random ends and ids."""
        new = rows(self.random.choice(CODES, (count, self.lanes)), self.id)
        self.id = new.id[-1]
        self.write(new)

    def update(self) -> None:
        """Give some slots priorities, zero among them."""
        if self.priorities is None:
            return
        count = self.buffer.capacity * self.lanes
        slots = self.random.integers(-1, count + 1, 6).astype(np.int32)
        given = self.random.choice([0.0, 0.0, 0.25, 0.5, 1, 2, 4, np.nan], 6).astype(np.float32)
        self.state = update(self.buffer, self.state, slots, given)
        self.priorities.update(slots, given)

    def draw(self, count: int) -> Any:
        """Draw that many items or slices, which counts in epochs."""
        key = jax.random.key(int(self.random.integers(2**31)))
        unit = self.buffer.sampler.length if isinstance(self.buffer.sampler, Slices) else 1
        if isinstance(self.epochs, Shuffled) and len(self.left()) < (count if self.epochs.drop_last else 1):
            self.drawn = set()
        self.state, _, draw = sample(self.buffer, self.state, key, count * unit)
        draw = jax.tree.map(np.asarray, draw)
        first = (draw.slots if draw.starts is None else draw.starts)[draw.valid].tolist()
        if isinstance(self.epochs, Shuffled):
            self.drawn |= {self.unit_of(slot) for slot in first}
        self.unread = [slot for slot in self.unread if slot not in first]
        return draw

    def unit_of(self, slot: int) -> Any:
        """What an epoch returns once: the slot, or its trajectory."""
        if not isinstance(self.rule, PerTrajectory):
            return slot
        return next(each.slots for each in self.model.stored() if slot in each.slots)

    def left(self) -> list[Any]:
        """What is left of the epoch."""
        rule = self.buffer.sampler
        if isinstance(self.rule, PerTrajectory):
            assert isinstance(rule, Slices)
            units = [each.slots for each in self.model.stored() if len(each.slots) >= rule.shortest]
        else:
            units = self.model.starts(rule.shortest) if isinstance(rule, Slices) else [*self.model.numbers()]
        return [each for each in units if each not in self.drawn]

    def chances_of_starts(self) -> dict[int, float]:
        """The chance of each start, or of each slot."""
        rule = self.buffer.sampler
        if isinstance(self.epochs, Shuffled):
            left = self.left()
            if not left:
                self.drawn = set()
                left = self.left()
            if isinstance(self.rule, PerTrajectory):
                assert isinstance(rule, Slices)
                choices = [slots[: max(len(slots) - rule.length + 1, 1)] for slots in left]
                return {slot: 1 / len(left) / len(slots) for slots in choices for slot in slots}
            return {slot: 1 / len(left) for slot in left}
        if isinstance(self.rule, Fifo):
            return dict.fromkeys(self.unread[:1], 1.0)
        if isinstance(self.rule, PerTrajectory):
            assert isinstance(rule, Slices)
            return self.model.chances_per_trajectory(rule.shortest, rule.length)
        least = rule.shortest if isinstance(rule, Slices) else 1
        return self.model.chances(least, None if self.priorities is None else self.priorities.values())

    def windows(self) -> dict[int, list[int]]:
        """The slots that a slice from each start has; of single items the slot."""
        rule = self.buffer.sampler
        starts = self.model.starts(1)
        if not isinstance(rule, Slices):
            return {slot: [slot] for slot in starts}
        slot_of = {number: slot for slot, number in self.model.numbers().items()}
        found = {}
        for start in starts:
            numbers, inside = self.model.window(start, rule.length, rule.burn_in)
            found[start] = [slot_of[number] for number, there in zip(numbers, inside, strict=True) if there]
        return found

    def chances(self) -> np.ndarray:
        """The chance of each slot, float64."""
        found, windows = np.zeros(self.buffer.capacity * self.lanes), self.windows()
        for start, chance in self.chances_of_starts().items():
            found[windows[start]] += chance
        return found

    def assert_same(self) -> None:
        """The buffer says the same."""
        law, expected, starts = self.buffer.chances(self.state), self.chances(), self.chances_of_starts()
        assert law.probability is not None
        np.testing.assert_allclose(law.probability, expected, rtol=2e-5, atol=0)
        stored = sorted(self.model.numbers())
        assert sorted(np.flatnonzero(law.reason != 1)) == stored
        np.testing.assert_array_equal(law.reason == 0, expected > 0)
        rows = sum(chance * len(self.windows()[start]) for start, chance in starts.items())
        np.testing.assert_allclose(law.probability.sum(), rows, rtol=2e-5)
        if isinstance(self.buffer.sampler, Slices):
            assert law.starts is not None
            np.testing.assert_allclose(law.starts[list(starts)], list(starts.values()), rtol=2e-5)
            assert law.starts.sum() == (1 if starts else 0) or abs(law.starts.sum() - 1) < 1e-9

    def resize(self, capacity: int) -> None:
        """Give the buffer another capacity, and the model: row 0 is the oldest one that stays."""
        old, before = self.buffer.capacity, self.model
        kept = min(before.time, old, capacity)
        first = before.time - kept
        self.buffer, self.state = fbuf.resize(self.buffer, self.state, capacity)
        moved = {
            time % old * self.lanes + lane: (time - first) * self.lanes + lane
            for time in range(first, before.time)
            for lane in range(self.lanes)
        }
        after = TrajectoriesModel(capacity, self.lanes)
        after.all, after.time = before.all, kept
        for trajectory in (each for lane in after.all for each in lane):
            trajectory.times = [time - first for time in trajectory.times]
        self.model = after
        if isinstance(self.rule, PerTrajectory):
            last = {moved[unit[-1]] for unit in self.drawn if unit[-1] in moved}
            self.drawn = {each.slots for each in after.stored() if each.slots[-1] in last}
        else:
            self.drawn = {moved[slot] for slot in self.drawn if slot in moved}
        self.unread = [moved[slot] for slot in self.unread if slot in moved]
        if self.priorities is not None:
            given = np.full(capacity * self.lanes, -1, np.float32)
            given[list(moved.values())] = self.priorities.given[list(moved)]
            self.priorities.given = given
            if self.priorities.holder >= 0 and self.priorities.holder not in moved:
                self.priorities.highest, self.priorities.holder = np.float32(1), -1
            self.priorities.holder = moved.get(self.priorities.holder, -1)
